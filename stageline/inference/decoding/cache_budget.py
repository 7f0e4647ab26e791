"""How much memory keys and values may take, and how many tokens that is."""

import torch

from stageline.errors import UserError
from stageline.inference.decoding.stage_decoder import StageDecoder

GIB = 2**30
SHARE_OF_A_GPU, SHARE_OF_A_HOST = 0.8, 0.25
UNKNOWN_HOST = 4 * GIB  # a guess that no machine is too small for
SPARE = 1.25  # buffers are made larger than they need to be, by up to so much


def cache_budget(
    device: torch.device, *, gib: float | None, processes: int, host_bytes: int | None = None
) -> int:
    """Bytes for the cache of one stage.

    Args:
        gib: as the user says; None: a share of what is free now.
        processes: on this machine, which share its memory.
        host_bytes: what the host could still give; None: not known, and little is taken for it.
    """
    if gib is not None:
        return int(gib * GIB)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * SHARE_OF_A_GPU)
    free = UNKNOWN_HOST if host_bytes is None else host_bytes
    return int(free * SHARE_OF_A_HOST / max(1, processes))


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
