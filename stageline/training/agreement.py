"""Compare the micro-batches of a pipeline's ranks before each step."""

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
    """Compare a hash over the pipeline, before a step sends anything; every rank calls this.

    Each rank loads its micro-batches itself and computes shapes from them. Where they differ, gloo
    fills a buffer in part or ends the process, and different tokens would go unseen.

    Raises:
        DataError: ranks differ; on all of them.
    """
    num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if num_ranks == 1:
        return
    described = []  # shapes, types and checksums of each micro-batch
    for batch in micro_batches:
        values = {name: batch[name].cpu().contiguous() for name in SHARED if name in batch}
        sums = [zlib.crc32(v.flatten().view(torch.uint8).numpy().data) for v in values.values()]
        described.append(
            " ".join(
                f"{name} {tuple(value.shape)} {str(value.dtype)[6:]} (contents {checksum:08x})"
                for (name, value), checksum in zip(values.items(), sums, strict=True)
            )
        )
    # on the CPU where the group can: no wait for an accelerator
    has_gloo = "cpu" in str(dist.get_backend_config(group))
    device = "cpu" if has_gloo else torch.accelerator.current_accelerator()
    own = torch.tensor([zlib.crc32("\n".join(described).encode())], device=device)
    hashes = [torch.empty_like(own) for _ in range(num_ranks)]
    with progress.doing("other ranks at the start of a step", is_waiting=True):
        dist.all_gather(hashes, own, group=group)
        if all(torch.equal(other, own) for other in hashes):
            return
        gathered: list[list[str]] = [[] for _ in range(num_ranks)]
        dist.all_gather_object(gathered, described, group=group)
    first = gathered[0]
    rank, other = next((rank, one) for rank, one in enumerate(gathered) if one != first)
    what = f"{len(first)} and {len(other)} micro-batches of one step"
    if len(first) == len(other):
        index = next(index for index, one in enumerate(first) if one != other[index])
        what = (
            f"different micro-batches {index} of one step: {first[index]} on rank 0, "
            f"{other[index]} on rank {rank}"
        )
    raise DataError(
        f"stage ranks 0 and {rank} of a pipeline made {what}. Make the dataset and the collate "
        "part give the same on every rank: no randomness of their own, no files that differ."
    )
