"""What may be cast while weights are read: floats of one width to another, and nothing else."""

from collections.abc import Iterable
from pathlib import Path

import torch

from stageline.checkpoint.header import TensorEntry, read_header

_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def entries_of(files: dict[str, Path]) -> dict[str, TensorEntry]:
    """Name on disk -> what the header of its file says of it."""
    headers = {file: read_header(file) for file in set(files.values())}
    return {name: headers[file][name] for name, file in files.items()}


def integer_weights(entries: dict[str, TensorEntry], leaves: set[str]) -> list[str]:
    """Tensors that are integers in the file and weights in the model, such as quantised ones.

    Args:
        leaves: last parts of the names of the model's parameters, such as `weight`.
    """
    return [
        f"{name} ({entry.dtype})"
        for name, entry in entries.items()
        if not entry.is_floating_point and name.rpartition(".")[2] in leaves
    ]


def cast_note(
    entries: dict[str, TensorEntry], names: Iterable[str], dtype: torch.dtype
) -> str | None:
    """What is said where weights are kept in another type than they were saved in; else None."""
    kinds = {entries[name].dtype for name in names if name in entries}
    others = sorted(
        str(_NAMES.get(kind, kind)).removeprefix("torch.")
        for kind in kinds
        if kind.startswith(("F", "BF")) and _NAMES.get(kind) != dtype
    )
    if not others:
        return None
    kept = str(dtype).removeprefix("torch.")
    return f"the weights were saved in {', '.join(others)} and are kept in {kept} here"
