"""From rewards to advantages: plain numbers, on the host, before answers fall into micro-batches.

Shapes: P prompts, G answers of each, R rewards.
"""

from typing import Literal

import torch

Advantage = Literal["group", "group_no_std", "batch", "rloo"]
LEAST_STD = 1e-4  # as trl: a spread of nothing divides by this


def weighted(rewards_RPG: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """The weighted sum of several rewards [P, G]; NaN where every reward has nothing to say."""
    weights_R = torch.tensor(weights, dtype=rewards_RPG.dtype)[:, None, None]
    sums_PG = (rewards_RPG * weights_R).nansum(dim=0)
    return sums_PG.masked_fill(rewards_RPG.isnan().all(dim=0), torch.nan)


def advantages(rewards_PG: torch.Tensor, kind: Advantage) -> torch.Tensor:
    """How much better each answer is than the others to its prompt, [P, G].

    An answer without a reward (NaN) is in no mean and no deviation, and has the advantage 0.

    Args:
        rewards_PG: of all prompts of the step, of all replicas: "batch" divides by the spread of
            all of them.
        kind: group: less the mean of its group, by the group's deviation (arXiv 2402.03300);
            group_no_std: less the mean alone (2503.20783); batch: by the deviation of all rewards;
            rloo: less the mean of the others (2402.14740).
    """
    centred_PG = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
    if kind == "group":
        centred_PG = centred_PG / (deviations(rewards_PG) + LEAST_STD)[:, None]
    elif kind == "batch":
        centred_PG = centred_PG / (deviations(rewards_PG.reshape(1, -1)) + LEAST_STD)
    elif kind == "rloo":
        counts_P1 = (~rewards_PG.isnan()).sum(dim=1, keepdim=True)
        centred_PG = centred_PG * counts_P1 / (counts_P1 - 1).clamp(min=1)
    return centred_PG.nan_to_num(0.0)


def deviations(rewards_PG: torch.Tensor) -> torch.Tensor:
    """The standard deviation of each group [P], of n - 1; 0 of fewer than two rewards."""
    counts_P = (~rewards_PG.isnan()).sum(dim=1)
    apart_PG = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
    variances_P = apart_PG.square().nansum(dim=1) / (counts_P - 1).clamp(min=1)
    return variances_P.sqrt()


def has_spread(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Which groups say anything [P]: answers of one reward all have the advantage 0."""
    return deviations(rewards_PG) > 1e-8
