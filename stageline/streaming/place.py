"""Where in the user's code something of this room was made: the name of what has no other."""

import sys
from pathlib import Path


def place_of_call() -> str:
    """file:line of whoever called into this room."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
