"""The configuration that an adapter was trained with: its base's, or one of its own beside it.

It has one of its own where the run changed it (scaled positions): the base's does not say so.
"""

from pathlib import Path

from stageline.checkpoint.adapter import find_base
from stageline.checkpoint.files import ADAPTER_CONFIG

CONFIG = "config.json"


def config_folder(folder: Path) -> Path:
    """The folder whose config.json counts for a model folder, or for an adapter above its base."""
    if (folder / CONFIG).exists() or not (folder / ADAPTER_CONFIG).exists():
        return folder
    return find_base(folder)
