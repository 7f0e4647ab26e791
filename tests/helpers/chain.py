"""The chain of stages of `stageline/verify/batches.py`, by the name that tests know."""

import torch

from stageline.verify.batches import drop_pixels, run_chain

__all__ = ["chained_logits", "drop_pixels", "evaluate_chain", "run_chain"]
evaluate_chain = torch.no_grad()(run_chain)


def chained_logits(stages, batch):
    """Return the output for a batch of the last of several stages in this process."""
    batch = {name: value for name, value in batch.items() if name != "labels"}
    values = (batch["input_ids"],)
    for stage in stages:
        made = stage(*values, **batch)
        values = made if isinstance(made, tuple) else (made,)  # deepstack features travel along
    return values[0]
