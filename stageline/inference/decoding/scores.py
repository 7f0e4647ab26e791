"""Log-probabilities of given tokens from the logits in their places.

Shapes: T places, V vocabulary.
"""

import torch

from stageline.inference.decoding.order import Score

# numbers that are made float32 at a time: a long row times a vocabulary would take gigabytes
PIECE = 2**25


def score_row(logits_TV: torch.Tensor, targets: list[int], *, num_top: int) -> Score:
    """Of each target, and whether each is the likeliest; the likeliest tokens in each place."""
    num_together = max(1, PIECE // logits_TV.shape[-1])
    ids_T = torch.tensor(targets, device=logits_TV.device)
    values: list[float] = []
    tops: list[list[tuple[int, float]]] = []
    is_greedy = True
    for logits, ids in zip(logits_TV.split(num_together), ids_T.split(num_together), strict=True):
        logprobs = logits.float().log_softmax(-1)
        values += logprobs.gather(-1, ids[:, None])[:, 0].tolist()
        is_greedy &= bool((logprobs.argmax(-1) == ids).all())
        if num_top:
            best = logprobs.topk(min(num_top, logprobs.shape[-1]))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            tops += [list(zip(*pair, strict=True)) for pair in pairs]
    return values, is_greedy, tops
