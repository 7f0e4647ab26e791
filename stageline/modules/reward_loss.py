"""Rewards of pairs, read off the scores of a micro-batch.

Rows come as chosen, rejected, chosen, rejected ...; a row has one label, where its reward is read.

Shapes: B rows, T tokens, P = B / 2 pairs.
"""

import torch

IGNORE = -100
Batch = dict[str, torch.Tensor]


def pair_rewards(
    scores_BT1: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards [P] in float32 of chosen and rejected answers, and 1.0 for each pair that counts.

    Pairs that only fill a batch up, or were dropped, have no labels; their rewards are 0.
    """
    counts_P = _has_labels(batch).to(scores_BT1.device)
    is_read_BT = (batch["labels"] != IGNORE).to(scores_BT1.device)
    rewards_B = (scores_BT1[..., 0].float() * is_read_BT).sum(dim=1)
    chosen_P, rejected_P = rewards_B[0::2] * counts_P, rewards_B[1::2] * counts_P
    return chosen_P, rejected_P, counts_P


def count_pairs(batch: Batch) -> int:
    """Pairs of a micro-batch that count."""
    return int(_has_labels(batch).sum())


def _has_labels(batch: Batch) -> torch.Tensor:
    has_B = (batch["labels"] != IGNORE).any(dim=1)
    return (has_B[0::2] & has_B[1::2]).float()
