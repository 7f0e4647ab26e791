"""Draws tokens from logits: which may be drawn, how likely each is, and one number per token.

A draw must give the same token for a row alone and in any batch. So weights are whole numbers,
whose sums don't depend on the order in which a device adds them, and the number that decides is
made on the host from the answer's seed and the token's place alone. The inverse of the distribution
function goes over tokens by their ids and not by likelihood: then a last bit that differs in a
logit moves a border a little, and swaps no tokens.

Shapes: R rows, V tokens of the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stageline.inference.decoding.request import Sampling

# weight of the likeliest token; tokens 2 ** 40 times less likely are never drawn. Times a
# vocabulary of 2 ** 22 tokens it still fits 64 bits
_SCALE = 2.0**40
# on a GPU: some rows at a time bound the memory. On a CPU one: a row fits its caches, and the
# ends of rows get the same vector instructions alone and in a batch
_ROWS_AT_ONCE = {"cpu": 1}
_ROWS_AT_ONCE_ELSEWHERE = 16
# so many are found faster than all are sorted
_FEW = 256


def uniform(seed: int, index: int) -> float:
    """A number from 0 up to 1 for token `index` of the answer with this seed (Philox, 53 bits).

    The same on every machine: numpy promises the raw stream of its bit generators.
    """
    key = np.array([seed % 2**64, index], dtype=np.uint64)
    return float(np.random.Philox(key=key).random_raw() >> 11) * 2.0**-53


def draw(scores_RV: Tensor, samplings: Sequence[Sampling], numbers: Sequence[float]) -> list[int]:
    """A token for each row of float32 scores (penalties done); `numbers` decide, see `uniform`."""
    size = _ROWS_AT_ONCE.get(scores_RV.device.type, _ROWS_AT_ONCE_ELSEWHERE)
    tokens: list[int] = []
    for first in range(0, len(samplings), size):
        part = slice(first, first + size)
        weights_RV = token_weights(scores_RV[part], samplings[part])
        tokens += _pick(weights_RV, _column(numbers[part], weights_RV.device))
    return tokens


def _pick(weights_RV: Tensor, numbers_R1: Tensor) -> list[int]:
    sums_RV = weights_RV.cumsum(-1)
    total_R1 = sums_RV[:, -1:]
    wanted_R1 = (numbers_R1 * total_R1).long().minimum(total_R1 - 1)
    tokens_R1 = torch.searchsorted(sums_RV, wanted_R1, right=True)
    return tokens_R1.clamp(max=weights_RV.shape[-1] - 1)[:, 0].tolist()


def token_weights(scores_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """How likely each token is to be drawn, as integers [R, V]; 0 for those that are left out.

    Steps and meanings are those of transformers' `generate`: temperature, top_k, top_p, min_p.
    Tokens with equal scores stay or go together.
    """
    top_R1 = scores_RV.amax(-1, keepdim=True)
    temperature_R1 = _column([s.temperature for s in samplings], scores_RV.device).float()
    shares_RV = torch.exp((scores_RV - top_R1) / temperature_R1)
    weights_RV = (shares_RV * _SCALE).long()
    _leave_out_beyond_top_k(weights_RV, scores_RV, [s.top_k for s in samplings])
    _leave_out_beyond_top_p(weights_RV, [s.top_p for s in samplings])
    if any(s.min_p > 0 for s in samplings):
        min_p_R1 = _column([s.min_p for s in samplings], scores_RV.device).float()
        weights_RV.masked_fill_(shares_RV < min_p_R1, 0)
    return weights_RV


def _leave_out_beyond_top_k(weights_RV: Tensor, scores_RV: Tensor, counts: Sequence[int]) -> None:
    size = scores_RV.shape[-1]
    rows = [row for row, count in enumerate(counts) if 0 < count < size]
    if not rows:
        return
    largest = _rows(scores_RV, rows).topk(max(counts[row] for row in rows)).values
    places = torch.tensor([[counts[row] - 1] for row in rows], device=scores_RV.device)
    least_R1 = scores_RV.new_full((len(counts), 1), -float("inf"))
    least_R1[rows] = largest.gather(1, places)
    weights_RV.masked_fill_(scores_RV < least_R1, 0)


def _leave_out_beyond_top_p(weights_RV: Tensor, shares: Sequence[float]) -> None:
    """Cuts by weight, not by score: equal weights are equally likely."""
    rows = [row for row, share in enumerate(shares) if share < 1]
    if not rows:
        return
    sorted_RV = _sorted_down(_rows(weights_RV, rows))
    sums_RV = sorted_RV.cumsum(-1)
    needed_R1 = _column([shares[row] for row in rows], weights_RV.device) * sums_RV[:, -1:]
    num_kept_R1 = (sums_RV - sorted_RV < needed_R1).sum(-1, keepdim=True).clamp(min=1)
    least_R1 = weights_RV.new_zeros(len(shares), 1)
    least_R1[rows] = sorted_RV.gather(1, num_kept_R1 - 1)
    weights_RV.masked_fill_(weights_RV < least_R1, 0)


def _rows(values_RV: Tensor, rows: Sequence[int]) -> Tensor:
    return values_RV if len(rows) == len(values_RV) else values_RV[list(rows)]


def _sorted_down(weights_RV: Tensor) -> Tensor:
    """The weights of each row, falling; zeros at the end may be missing."""
    num_left = int((weights_RV > 0).sum(-1).max())
    if num_left <= _FEW:
        return weights_RV.topk(num_left).values
    if weights_RV.device.type != "cpu":
        return weights_RV.sort(descending=True).values
    # numpy sorts values with vector instructions, torch on a CPU doesn't: 0.2 ms against 4 ms a row
    return torch.from_numpy(np.sort(weights_RV.numpy(), axis=-1)).flip(-1)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]
