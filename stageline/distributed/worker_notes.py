"""What workers leave for our launcher, in a folder of its own: process ids, stages, how they end.

Below torchrun there is no such folder, and every note goes nowhere.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

WORKERS_FOLDER = "STAGELINE_WORKERS_FOLDER"


def has_launcher() -> bool:
    """Whether our launcher started this process."""
    return WORKERS_FOLDER in os.environ


def note(name: str, value: Any) -> None:
    """Leaves `value` as `<rank>.<name>`; a failing process must not fail over it."""
    if has_launcher():
        with contextlib.suppress(OSError):
            path = Path(os.environ[WORKERS_FOLDER], f"{os.environ.get('RANK', '0')}.{name}")
            draft = path.with_suffix(f".{name}_draft_{os.getpid()}")
            draft.write_text(json.dumps(value))
            draft.replace(path)


def read_notes(folder: Path, name: str) -> dict[int, Any]:
    """Rank -> what it left by that name."""
    return {
        int(path.name.partition(".")[0]): json.loads(path.read_text())
        for path in sorted(folder.glob(f"*.{name}"))
    }
