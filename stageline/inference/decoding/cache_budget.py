"""How much memory keys and values may take, and how many tokens that is."""

import torch

from stageline.errors import UserError
from stageline.inference.decoding.stage_decoder import StageDecoder

GIB = 2**30
SHARE_OF_A_GPU, SHARE_OF_A_HOST = 0.8, 0.25
SPARE = 1.25  # buffers are made larger than they need to be, by up to so much


def cache_budget(device: torch.device, *, gib: float | None, processes: int) -> int:
    """Bytes for the cache of one stage.

    Args:
        gib: as the user says; None: a share of what is free now.
        processes: on this machine, which share its memory.
    """
    if gib is not None:
        return int(gib * GIB)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * SHARE_OF_A_GPU)
    return int(free_host_bytes() * SHARE_OF_A_HOST / max(1, processes))


def free_host_bytes() -> int:
    """What the host could still give, as the kernel estimates it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # no Linux: a guess that no machine is too small for
        return 4 * GIB


def cells_within(budget: int, decoder: StageDecoder) -> int:
    """Tokens whose keys and values fit on this stage.

    Raises:
        UserError: not even one does.
    """
    cells = int(budget / (decoder.bytes_of_a_token() * SPARE))
    if cells < 1:
        raise UserError(
            f"the cache may take {budget / GIB:.2f} GiB on stage {decoder.stage.stage}, and one "
            f"token takes {decoder.bytes_of_a_token()} bytes there. Room for whole prompts was "
            "expected: raise --cache-gib, or use more stages."
        )
    return cells
