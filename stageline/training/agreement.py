"""Whether all ranks of a pipeline hold the same micro-batches, asked before a step sends anything.

Each rank loads its micro-batches itself and takes shapes of what comes from them. Where they
differ, gloo fills a buffer in part without a word, or ends the process; and nobody would see that
tokens differ.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from stageline import progress
from stageline.errors import DataError

# pixels are made on the first stage only
SHARED = ("input_ids", "labels", "loss_kl_input_ids", "loss_kl_labels")


def check_agreement(
    micro_batches: Sequence[Mapping[str, torch.Tensor]], *, group: dist.ProcessGroup | None
) -> None:
    """Compares a hash of 8 bytes over the pipeline; every rank calls this.

    Raises:
        DataError: ranks differ; on all of them.
    """
    num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if num_ranks == 1:
        return
    # on the CPU where the group can: no wait for a GPU
    device = "cpu" if "cpu" in str(dist.get_backend_config(group)) else "cuda"
    own = torch.tensor([digest(micro_batches)], device=device)
    hashes = [torch.empty_like(own) for _ in range(num_ranks)]
    with progress.doing("other ranks at the start of a step", is_waiting=True):
        dist.all_gather(hashes, own, group=group)
        if all(torch.equal(other, own) for other in hashes):
            return
        gathered: list[list[str]] = [[] for _ in range(num_ranks)]
        dist.all_gather_object(gathered, list(map(_describe, micro_batches)), group=group)
    raise DataError(explain_difference(gathered))


def digest(micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> int:
    """Number, shapes, types and contents of what every rank holds."""
    told = 0
    for batch in micro_batches:
        for name, value in _shared(batch):
            told = zlib.crc32(f"{name} {tuple(value.shape)} {value.dtype}".encode(), told)
            told = zlib.crc32(_contents(value), told)
    return told << 16 | len(micro_batches) & 0xFFFF


def explain_difference(gathered: Sequence[Sequence[str]]) -> str:
    """The first difference between rank 0 of a pipeline and another one."""
    first = gathered[0]
    other = next(rank for rank, batches in enumerate(gathered) if list(batches) != list(first))
    why = (
        "Stages exchange tensors of the shapes that each rank takes from its own copy: the dataset "
        "and the collate part must give the same on every rank (no randomness of their own, no "
        "files that differ between machines)."
    )
    if len(first) != len(gathered[other]):
        return (
            f"stage ranks 0 and {other} of a pipeline made {len(first)} and "
            f"{len(gathered[other])} micro-batches of one step, equal ones were expected. {why}"
        )
    pairs = enumerate(zip(first, gathered[other], strict=True))
    index, (here, there) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return (
        f"stage ranks 0 and {other} of a pipeline made different micro-batches {index} of one "
        f"step: {here} on rank 0, {there} on rank {other}; equal ones were expected. {why}"
    )


def _describe(batch: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(
        f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} "
        f"(contents {zlib.crc32(_contents(value)):08x})"
        for name, value in _shared(batch)
    )


def _shared(batch: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(name, batch[name]) for name in SHARED if name in batch]


def _contents(value: torch.Tensor) -> memoryview:
    return memoryview(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
