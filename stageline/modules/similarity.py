"""Similarities of two batches of distributions; the bodies of the sim_fn parts.

Shapes: N pairs, V entries (the vocabulary).
"""

import math

import torch
from torch.nn import functional


def js_similarity(a_NV: torch.Tensor, b_NV: torch.Tensor) -> torch.Tensor:
    """1 - JSD(a, b) / ln 2 of rows that each sum to 1: 1 for equal ones, 0 for disjoint ones.

    JSD is the Jensen-Shannon divergence. Entries of 0 add nothing, and gradients stay finite.
    Rounding may lead out of [0, 1]: the value is put back, the gradient is kept.
    """
    mean_NV = (a_NV + b_NV) / 2
    divergence_N = (_kl(a_NV, mean_NV) + _kl(b_NV, mean_NV)) / 2
    similarity_N = 1 - divergence_N / math.log(2)
    return similarity_N + (similarity_N.clamp(0, 1) - similarity_N).detach()


def cos_similarity(a_NV: torch.Tensor, b_NV: torch.Tensor) -> torch.Tensor:
    """The cosine of two vectors, in [0, 1] for vectors without a negative entry."""
    return functional.cosine_similarity(a_NV, b_NV, dim=-1)


def _kl(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence in nats; q is not 0 where p is not."""
    least = torch.finfo(p_NV.dtype).tiny  # log 0 would be no number, also in the gradient
    log_ratio_NV = p_NV.clamp(min=least).log() - q_NV.clamp(min=least).log()
    return (p_NV * log_ratio_NV).sum(dim=-1)
