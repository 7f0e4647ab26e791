"""What no rule by the name of a field can know about a family, by model type, with the reason."""

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any], Any], None]

EXCEPTIONS: dict[str, tuple[Change, ...]] = {}
