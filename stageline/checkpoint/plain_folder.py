"""A plain Hugging Face folder of whatever a model may be given as, for engines that read no other.

A plain folder is handed on as it is. Of a training checkpoint, an adapter, or a model with adapters
one is exported, once: it lies in a cache under a name made from the content.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from stageline.checkpoint.adapter import find_base
from stageline.checkpoint.adapter_start import Adapters
from stageline.checkpoint.export import export_folder
from stageline.checkpoint.export_target import find_source
from stageline.checkpoint.files import ADAPTER_CONFIG
from stageline.checkpoint.layout import MANIFEST, read_manifest, verify

_KEY_LENGTH = 16
# what changes no answer
_LEFT_OUT = (".md", ".log")


def plain_folder(
    source: str | Path,
    *,
    cache: str | Path,
    adapter_paths: Sequence[str | Path] = (),
    adapter_weights: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """The folder, exported first where it isn't a plain one.

    Args:
        source: a model folder, an adapter folder, or a checkpoint that a run saved.
        cache: folder of the exported folders.
        adapter_paths, adapter_weights: LoRA adapters that are merged into it.
        dtype: of an exported folder's weights; None: as they are.

    Raises:
        UserError: as `export_folder`; among others a source that isn't whole.
    """
    folder = find_source(source)
    is_adapter = (folder / ADAPTER_CONFIG).exists()
    if not (is_adapter or adapter_paths or _is_of_a_run(folder)):
        return folder
    parts = [folder, *([find_base(folder)] if is_adapter else []), *map(Path, adapter_paths)]
    key = _key(parts, [list(adapter_weights or ()), str(dtype)])
    target = Path(cache).expanduser().absolute() / f"{folder.name}-{key}"
    if target.exists():
        verify(target)
        return target
    weights = tuple(adapter_weights) if adapter_weights else None
    return export_folder(
        folder,
        target,
        merge=is_adapter,
        adapters=Adapters(tuple(map(Path, adapter_paths)), weights) if adapter_paths else None,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    ).folder


def _is_of_a_run(folder: Path) -> bool:
    """Whether a run saved it: beside weights there may be files that only training reads."""
    manifest = folder / MANIFEST
    return manifest.exists() and read_manifest(folder).get("kind") != "export"


def _key(folders: Sequence[Path], settings: object) -> str:
    """Changes with any file; by content where a manifest has it, else by size and time."""
    facts = [_facts(folder.expanduser().absolute()) for folder in folders]
    text = json.dumps([facts, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]


def _facts(folder: Path) -> object:
    if (folder / MANIFEST).exists():
        return read_manifest(folder)["sha256"]
    files = sorted(path for path in folder.iterdir() if path.is_file())
    kept = [path for path in files if not path.name.endswith(_LEFT_OUT)]
    return [
        str(folder),
        [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in kept],
    ]
