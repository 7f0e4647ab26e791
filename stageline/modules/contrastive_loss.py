"""Next-token losses over all and over marked tokens, and a comparison of the samples of a group.

Shapes: B samples, T tokens, V vocabulary; G groups of K samples: anchor, positive, negatives.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from stageline.errors import UserError

IGNORE = -100
MicroBatch = dict[str, torch.Tensor]
Similarity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def next_labels(micro_batch: MicroBatch) -> torch.Tensor:
    """The label that the logits of each token predict, [B, T]; -100 where there is none."""
    return functional.pad(micro_batch["labels"], (0, 1), value=IGNORE)[:, 1:]


def next_marks(micro_batch: MicroBatch) -> torch.Tensor:
    """Whether the logits of each token predict a marked, supervised one, [B, T]."""
    marks_BT = functional.pad(_given(micro_batch, "loss_marks"), (0, 1), value=False)[:, 1:]
    return marks_BT & (next_labels(micro_batch) != IGNORE)


def count_marked(micro_batch: MicroBatch) -> int:
    """Marked tokens of a micro-batch that are learnt."""
    return int(next_marks(micro_batch).sum())


def count_groups(micro_batch: MicroBatch) -> int:
    """Groups of a micro-batch that are compared: each sample has something to learn."""
    return int(compared_groups(micro_batch).sum())


def compared_groups(micro_batch: MicroBatch) -> torch.Tensor:
    """Which groups are compared, [G]; not those that fill up or have a dropped sample."""
    has_target_B = (next_labels(micro_batch) != IGNORE).any(dim=1)
    groups_B = _given(micro_batch, "loss_groups")
    return has_target_B.view(int(groups_B[-1]) + 1, -1).all(dim=1)


def token_losses(logits_BTV: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Next-token cross-entropy of each token in float32, [B, T]; 0 where none is learnt."""
    losses = functional.cross_entropy(
        at_least_float32(logits_BTV).flatten(0, 1),
        next_labels(micro_batch).flatten(),
        ignore_index=IGNORE,
        reduction="none",
    )
    return losses.view(logits_BTV.shape[:2])


def representations(logits_BTV: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """What each sample says, [B, V] in float32.

    The mean, over its marked tokens, of the distribution that predicts the token. A sample without
    a marked one takes all its supervised tokens; one without those is 0.
    """
    marks_BT = next_marks(micro_batch)
    is_target_BT = next_labels(micro_batch) != IGNORE
    chosen_BT = torch.where(marks_BT.any(dim=1, keepdim=True), marks_BT, is_target_BT)
    # row by row: only chosen tokens' distributions exist, and sums come in the same order each time
    rows = []
    for logits_TV, chosen_T in zip(logits_BTV, chosen_BT, strict=True):
        shares_NV = at_least_float32(logits_TV[chosen_T]).softmax(dim=-1)
        rows.append(shares_NV.sum(dim=0) / max(len(shares_NV), 1))
    return torch.stack(rows)


def group_losses(
    logits_BTV: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    sim_fn: Similarity,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of each compared group, and whether its positive is nearest, both [G].

    Softmax of the similarities of the anchor to all others, by the temperature; the positive is
    the right answer.
    """
    is_compared_G = compared_groups(micro_batch)
    all_BV = representations(logits_BTV, micro_batch)
    all_GKV = all_BV.view(len(is_compared_G), -1, all_BV.shape[-1])[is_compared_G]
    others_GKV = all_GKV[:, 1:]
    anchors_GKV = all_GKV[:, :1].expand_as(others_GKV)
    if len(all_GKV) == 0:  # a sim_fn part need not take an empty batch
        return all_GKV.new_zeros(0), is_compared_G[:0]
    pairs = sim_fn(anchors_GKV.flatten(0, 1), others_GKV.flatten(0, 1))
    similarities_GK = pairs.view(others_GKV.shape[:2])
    right_G = similarities_GK.new_zeros(len(similarities_GK), dtype=torch.long)
    losses_G = functional.cross_entropy(similarities_GK / temperature, right_G, reduction="none")
    is_nearest_G = (similarities_GK[:, :1] > similarities_GK[:, 1:]).all(dim=1)
    return losses_G, is_nearest_G


def warm_up(step: int, *, start_step: int, warmup_steps: int) -> float:
    """0 up to `start_step`, then a straight line that reaches 1 `warmup_steps` later."""
    if step < start_step:
        return 0.0
    return 1.0 if warmup_steps == 0 else min(1.0, (step - start_step) / warmup_steps)


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Half types become float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _given(micro_batch: MicroBatch, name: str) -> torch.Tensor:
    if name not in micro_batch:
        raise UserError(
            f"the contrastive loss got a micro-batch without {name}. It was expected, because "
            "samples are compared group by group: use --collate-fn contrastive with a dataset "
            "that has groups (--dataset groups)."
        )
    return micro_batch[name]
