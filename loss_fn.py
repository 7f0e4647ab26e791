"""The loss_fn parts: (logits, micro-batch) -> one number, already divided for the whole batch.

Shapes: logits [B, T, V], labels [B, T] aligned with the token ids, -100 where unsupervised.
"""

import torch
from torch.nn import functional

from register import loss_fn_register

IGNORE = -100


@loss_fn_register("sft")
def sft(
    logits_BTV: torch.Tensor, micro_batch: dict[str, torch.Tensor], *, num_targets: torch.Tensor
) -> torch.Tensor:
    """Next-token cross-entropy: the sum over supervised tokens by their number in the whole batch.

    Dividing by the global number, not per micro-batch, is what makes the result independent of
    how samples fall into micro-batches.

    Args:
        num_targets: supervised tokens of all micro-batches of the optimizer step together.
    """
    labels = functional.pad(micro_batch["labels"], (0, 1), value=IGNORE)[:, 1:]
    if logits_BTV.dtype in (torch.bfloat16, torch.float16):
        logits_BTV = logits_BTV.float()
    total = functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total / num_targets


sft.is_token_sum = True  # --logits-chunk may add it up from chunks of tokens
