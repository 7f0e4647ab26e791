"""Which folder has the configuration and the tokenizer of an adapter: its own or its base's.

It has its own where the run changed it (scaled positions): the base's does not say so.
"""

from collections.abc import Sequence
from pathlib import Path

from stageline.checkpoint.adapter import find_base
from stageline.checkpoint.files import ADAPTER_CONFIG
from stageline.errors import UserError

CONFIG = "config.json"


def config_folder(folder: Path, adapters: Sequence[str | Path] = ()) -> Path:
    """The folder whose config.json counts for a model folder, or for an adapter above its base.

    Args:
        adapters: that are put on it; the last one that has a configuration counts.
    """
    for adapter in reversed(adapters):
        if (Path(adapter) / CONFIG).exists():
            return Path(adapter)
    if (folder / CONFIG).exists() or not (folder / ADAPTER_CONFIG).exists():
        return folder
    return find_base(folder)


def refuse_two_ways(folder: Path, adapters: Sequence[str | Path]) -> None:
    """Refuses adapters by --adapter-path above one by --model-path.

    Raises:
        UserError: there are some.
    """
    if adapters:
        raise UserError(
            f"--model-path {folder} is an adapter, and --adapter-path "
            f"{','.join(map(str, adapters))} came too; the base of these was expected as "
            "--model-path: it is what they are put on. Name all adapters in --adapter-path, in "
            "their order."
        )


def processor_folder(adapter: Path, base: Path) -> Path:
    """An adapter's own folder, which may know new tokens, if all is there that its base has."""
    names = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
    needed = {name for name in names if (base / name).is_file()} | {names[0]}
    return adapter if all((adapter / name).is_file() for name in needed) else base
