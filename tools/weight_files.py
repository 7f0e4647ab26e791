"""Write a model folder of another one's weights, file by file; shared by the tools here."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from stageline.checkpoint.files import open_tensors, read_tensor
from stageline.checkpoint.layout import discard, draft_name, refuse_existing
from stageline.checkpoint.shards import shard_name, write_index, write_shard


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a draft folder that becomes `folder` at the end; an error leaves nothing behind."""
    refuse_existing(folder)
    draft = folder.parent / draft_name(folder)
    draft.mkdir(parents=True)
    try:
        yield draft
        draft.rename(folder)
    finally:
        discard(draft)


def rewrite_weights(
    files: Mapping[str, Path],
    folder: Path,
    change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Write one new file of weights for each old one, and their index; one is in memory at a time.

    Args:
        files: name on disk -> file.
        change: (name, tensor) -> what is written in its place, by name.

    Returns:
        Name -> shape and dtype of what was written.
    """
    paths = sorted(set(files.values()))
    facts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    written = {}
    for number, path in enumerate(paths, 1):
        tensors: dict[str, torch.Tensor] = {}
        with open_tensors(path) as file:
            for name in [name for name, place in files.items() if place == path]:
                tensors |= change(name, read_tensor(file, name, path))
        if not tensors:
            continue
        target = folder / shard_name(number, len(paths))
        written[target.name] = write_shard(tensors, target)
        facts |= {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    if len(paths) > 1:
        write_index(folder, written)
    return facts
