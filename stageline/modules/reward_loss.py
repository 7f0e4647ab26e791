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
    """Rewards [P] of chosen and rejected answers, and 1.0 for each pair that counts.

    Scores of half types become float32 first.

    Pairs that only fill a batch up, or were dropped, have no labels; their rewards are 0.
    """
    if scores_BT1.dtype in (torch.bfloat16, torch.float16):
        scores_BT1 = scores_BT1.float()
    counts_P = _has_labels(batch).to(scores_BT1)
    is_read_BT = (batch["labels"] != IGNORE).to(scores_BT1.device)
    rewards_B = scores_BT1[..., 0].masked_fill(~is_read_BT, 0.0).sum(dim=1)
    chosen_P, rejected_P = rewards_B[0::2] * counts_P, rewards_B[1::2] * counts_P
    return chosen_P, rejected_P, counts_P


def count_reward_pairs(batch: Batch) -> int:
    """Pairs of a micro-batch that count."""
    return int(_has_labels(batch).sum())


def _has_labels(batch: Batch) -> torch.Tensor:
    has_B = (batch["labels"] != IGNORE).any(dim=1)
    return (has_B[0::2] & has_B[1::2]).float()
