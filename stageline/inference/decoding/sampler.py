"""Chooses the next token of each row from its logits; each row has settings of its own.

The steps are those of transformers' `generate`: bias, penalties, temperature, top_k, top_p, min_p.
A row's choice depends on its logits, its settings and its tokens, on nothing else in the batch.

Shapes: B rows, V tokens of the vocabulary.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stageline.errors import UserError
from stageline.inference.decoding.grammars import RowMatcher, allowed_tokens
from stageline.inference.decoding.request import Sampling, TokenLogprob

# Draws tokens from logits: which may be drawn, how likely each is, and one number per token.
# A draw must give the same token for a row alone and in any batch. So weights are whole numbers,
# whose sums don't depend on the order in which a device adds them, and the number that decides is
# made on the host from the answer's seed and the token's place alone. The inverse of the
# distribution function goes over tokens by their ids and not by likelihood: then a last bit that
# differs in a logit moves a border a little, and swaps no tokens.
#
# Shapes: R rows, V tokens of the vocabulary.

# weight of the likeliest token; tokens 2 ** 40 times less likely are never drawn. Times a
# vocabulary of 2 ** 22 tokens it still fits 64 bits
_SCALE = 2.0**40
# some rows at a time: on a GPU they bound the memory, on a CPU so many values fit its caches
_ROWS_AT_ONCE = 16
_VALUES_AT_ONCE_ON_CPU = 1 << 16
# so many are found faster than all are sorted
_FEW = 256


def uniform(seed: int, index: int) -> float:
    """A number from 0 up to 1 for token `index` of the answer with this seed (Philox, 53 bits).

    The same on every machine: numpy promises the raw stream of its bit generators.
    """
    return float(_STREAMS.first(seed % 2**64, index) >> 11) * 2.0**-53


class _Streams(threading.local):
    """One generator a thread, set to the start of each stream: a new one takes longer by far."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._start = self._bits.state

    def first(self, *key: int) -> int:
        self._start["state"]["key"] = np.array(key, dtype=np.uint64)
        self._bits.state = self._start
        return int(self._bits.random_raw())


_STREAMS = _Streams()


def draw(scores_RV: Tensor, samplings: Sequence[Sampling], numbers: Sequence[float]) -> list[int]:
    """A token for each row of float32 scores (penalties done); `numbers` decide, see `uniform`."""
    is_cpu = scores_RV.device.type == "cpu"
    size = max(1, _VALUES_AT_ONCE_ON_CPU // scores_RV.shape[-1]) if is_cpu else _ROWS_AT_ONCE
    tokens: list[int] = []
    for first in range(0, len(samplings), size):
        part = slice(first, first + size)
        numbers_R1 = _column(numbers[part], scores_RV.device)
        # no name for the weights: they would lie beside the next ones
        tokens += _pick(token_weights(scores_RV[part], samplings[part]), numbers_R1)
    return tokens


def choice_bytes(num_rows: int, size: int) -> int:
    """What `choose` holds at most beside the logits of rows that are all drawn from.

    A copy in float32; for the rows at once their weights and the sums of these, in int64, and some
    numbers of each.
    """
    at_once = min(num_rows, max(_ROWS_AT_ONCE, _VALUES_AT_ONCE_ON_CPU // size))
    return 4 * num_rows * size + 16 * at_once * (size + 2)


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
    shares_RV = _exp((scores_RV - top_R1) / temperature_R1)
    weights_RV = (shares_RV * _SCALE).long()
    _leave_out_beyond_top_k(weights_RV, scores_RV, [s.top_k for s in samplings])
    _leave_out_beyond_top_p(weights_RV, [s.top_p for s in samplings])
    if any(s.min_p > 0 for s in samplings):
        min_p_R1 = _column([s.min_p for s in samplings], scores_RV.device).float()
        weights_RV.mul_(shares_RV >= min_p_R1)
    return weights_RV


def _exp(values_RV: Tensor) -> Tensor:
    if values_RV.device.type != "cpu":
        return values_RV.exp()
    # numpy's has the same bits for a value wherever it lies; torch's need not at the ends of a
    # tensor, and so of a row alone
    return torch.from_numpy(np.exp(values_RV.numpy()))


def _leave_out_beyond_top_k(weights_RV: Tensor, scores_RV: Tensor, counts: Sequence[int]) -> None:
    size = scores_RV.shape[-1]
    rows = [row for row, count in enumerate(counts) if 0 < count < size]
    if not rows:
        return
    largest = _rows(scores_RV, rows).topk(max(counts[row] for row in rows)).values
    places = torch.tensor([[counts[row] - 1] for row in rows], device=scores_RV.device)
    least_R1 = scores_RV.new_full((len(counts), 1), -float("inf"))
    least_R1[rows] = largest.gather(1, places)
    weights_RV.mul_(scores_RV >= least_R1)


def _leave_out_beyond_top_p(weights_RV: Tensor, shares: Sequence[float]) -> None:
    """Cuts by weight, not by score: equal weights are equally likely."""
    rows = [row for row, share in enumerate(shares) if share < 1]
    if not rows:
        return
    kept_from_RV = _rows(weights_RV, rows)
    total_R1 = kept_from_RV.sum(-1, keepdim=True)
    needed_R1 = _column([shares[row] for row in rows], weights_RV.device) * total_R1
    sorted_RV = kept_from_RV.topk(min(_FEW, weights_RV.shape[-1])).values
    if (sorted_RV.sum(-1, keepdim=True) < needed_R1).any():  # more are kept than these
        sorted_RV = _sorted_down(kept_from_RV)
    sums_RV = sorted_RV.cumsum(-1)
    num_kept_R1 = (sums_RV - sorted_RV < needed_R1).sum(-1, keepdim=True).clamp(min=1)
    least_R1 = weights_RV.new_zeros(len(shares), 1)
    least_R1[rows] = sorted_RV.gather(1, num_kept_R1 - 1)
    weights_RV.mul_(weights_RV >= least_R1)


def _rows(values_RV: Tensor, rows: Sequence[int]) -> Tensor:
    return values_RV if len(rows) == len(values_RV) else values_RV[list(rows)]


def _sorted_down(weights_RV: Tensor) -> Tensor:
    """The weights of each row, falling."""
    if weights_RV.device.type != "cpu":
        return weights_RV.sort(descending=True).values
    # numpy sorts values with vector instructions, torch on a CPU doesn't: 0.2 ms against 4 ms a row
    return torch.from_numpy(np.sort(weights_RV.numpy(), axis=-1)).flip(-1)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


# below it the likeliest token is taken: float32 logits divided by less leave no other a chance
_LEAST_TEMPERATURE = 1e-5
_NONE = -1  # no token may come


@dataclass
class SampledRow:
    """What the choice of a token depends on, besides its logits; who chooses keeps it up to date.

    Attributes:
        prompt_ids: token ids of the prompt, for the repetition penalty; None: of the answer only.
        answer_ids: the tokens chosen so far.
        index: which token of the answer this is, from 0.
        matcher: follows the grammar of the answer, if it has one.
        failure: why the row gets no token at all.
    """

    sampling: Sampling
    prompt_ids: Tensor | None
    answer_ids: list[int]
    index: int
    matcher: RowMatcher | None = None
    failure: Exception | None = None


@dataclass(frozen=True)
class Chosen:
    """A token; -1 with an error if the row has none (the others of the batch have theirs)."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: Exception | None = None


def choose(logits_BV: Tensor, rows: Sequence[SampledRow]) -> list[Chosen]:
    """The next token of each row.

    Log-probabilities are those of the logits as they come, a float32 log-softmax: penalties,
    biases and temperature don't change them (as OpenAI and vLLM have it), but for the temperature
    of a row that wants it so.
    """
    tops, tokens = _likeliest(logits_BV)
    errors = {
        place: error
        for place, (row, top) in enumerate(zip(rows, tops, strict=True))
        if (error := _find_error(row, top, logits_BV.shape[-1])) is not None
    }
    others = [
        place
        for place, row in enumerate(rows)
        if place not in errors
        and (_is_sampled(row.sampling) or _is_changed(row) or not _may_come(row, tokens[place]))
    ]
    for place, token in zip(others, _choose_others(logits_BV, rows, others), strict=True):
        tokens[place] = token
        if token == _NONE:
            errors[place] = _no_token(rows[place])
    return [
        Chosen(-1, error=errors[place])
        if place in errors
        else Chosen(token, _logprob(logits_BV, place, token, rows[place].sampling))
        for place, token in enumerate(tokens)
    ]


def _is_sampled(sampling: Sampling) -> bool:
    return sampling.temperature >= _LEAST_TEMPERATURE


def _likeliest(logits_RV: Tensor) -> tuple[list[float], list[int]]:
    """The largest value of each row and its place; of equal ones the first, on a CPU."""
    if logits_RV.device.type == "cpu" and logits_RV.dtype == torch.float32:
        # numpy looks for it with vector instructions, torch doesn't: 0.6 ms against 3.2 of 64 rows
        places_R1 = torch.from_numpy(logits_RV.numpy().argmax(-1))[:, None]
        return logits_RV.gather(-1, places_R1)[:, 0].tolist(), places_R1[:, 0].tolist()
    found = logits_RV.max(dim=-1)
    # read at once, as the host waits; no vocabulary is so large that float32 has no such place
    values, places = torch.stack([each.float() for each in found]).tolist()
    return values, list(map(int, places))


def _may_come(row: SampledRow, token: int) -> bool:
    return row.matcher is None or row.matcher.allows(token)


def _is_changed(row: SampledRow) -> bool:
    """Whether its settings change its logits."""
    sampling = row.sampling
    return bool(
        sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or row.index < sampling.min_new_tokens
    )


def _find_error(row: SampledRow, top: float, size: int) -> Exception | None:
    if row.failure is not None:
        return row.failure
    unknown = [token_id for token_id, _ in row.sampling.logit_bias if token_id >= size]
    if unknown:
        return UserError(f"logit_bias names token {unknown[0]}; the model has tokens 0..{size - 1}")
    if -float("inf") < top < float("inf"):
        return None
    if top == -float("inf"):
        return ValueError(f"all logits of token {row.index} of the answer are -inf: none is left")
    return ValueError(
        f"the logits of token {row.index} of the answer hold {top}: the model's weights, its dtype "
        "or its attention went wrong"
    )


def _choose_others(
    logits_BV: Tensor, rows: Sequence[SampledRow], places: Sequence[int]
) -> list[int]:
    """Tokens of the rows whose logits are changed or drawn from."""
    if not places:
        return []
    scores_RV = _rows(logits_BV, places).to(torch.float32, copy=True)
    chosen_from = [rows[place] for place in places]
    without = _keep_to_grammars(scores_RV, chosen_from)
    for scores_V, row in zip(scores_RV, chosen_from, strict=True):
        if _is_changed(row):
            _change(scores_V, row)
    _, tokens = _likeliest(scores_RV)
    for i in without:
        tokens[i] = _NONE
    is_drawn = [_is_sampled(row.sampling) and i not in without for i, row in enumerate(chosen_from)]
    drawn = [i for i, is_one in enumerate(is_drawn) if is_one]
    if drawn:
        chosen = [chosen_from[i] for i in drawn]
        numbers = [uniform(row.sampling.seed, row.index) for row in chosen]
        found = draw(_rows(scores_RV, drawn), [row.sampling for row in chosen], numbers)
        for i, token in zip(drawn, found, strict=True):
            tokens[i] = token
    return tokens


def _keep_to_grammars(scores_RV: Tensor, rows: Sequence[SampledRow]) -> set[int]:
    """Leaves rows with a grammar the tokens that may come, in place; those that have none then."""
    matched = [i for i, row in enumerate(rows) if row.matcher is not None]
    if not matched:
        return set()
    matchers = [row.matcher for row in rows if row.matcher is not None]
    allowed_MV = torch.from_numpy(allowed_tokens(matchers, scores_RV.shape[-1]))
    # inf or -inf: a least value is found with vector instructions, masked_fill_ branches on a CPU
    bounds_MV = allowed_MV.to(scores_RV.device).float().sub_(0.5).mul_(float("inf"))
    if len(matched) == len(rows):
        left_MV = torch.minimum(scores_RV, bounds_MV, out=scores_RV)
    else:
        left_MV = bounds_MV.minimum(scores_RV[matched])
        scores_RV[matched] = left_MV
    is_none = (left_MV.amax(-1) == -float("inf")).tolist()
    return {
        i
        for i, matcher, is_without in zip(matched, matchers, is_none, strict=True)
        if is_without or matcher.error is not None
    }


def _no_token(row: SampledRow) -> Exception:
    assert row.matcher is not None
    return row.matcher.error or UserError(
        f"no token that the grammar allows can be token {row.index} of the answer: the model's "
        "vocabulary has none, or the grammar has ended and the request names no stop token"
    )


def _change(scores_V: Tensor, row: SampledRow) -> None:
    """Bias first, then the penalties, in place."""
    sampling, device = row.sampling, scores_V.device
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        scores_V.index_add_(
            0,
            torch.tensor(ids, device=device),
            torch.tensor(biases, dtype=torch.float32, device=device),
        )
    answer = torch.tensor(row.answer_ids, dtype=torch.long)
    if sampling.repetition_penalty != 1:
        _penalise_repetition(scores_V, row, answer)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(answer):
        ids, counts = answer.unique(return_counts=True)
        penalties = counts.float() * sampling.frequency_penalty + sampling.presence_penalty
        scores_V[ids.to(device)] -= penalties.to(device)
    if row.index < sampling.min_new_tokens and sampling.stop_token_ids:
        scores_V[torch.tensor(sampling.stop_token_ids, device=device)] = -float("inf")


def _penalise_repetition(scores_V: Tensor, row: SampledRow, answer: Tensor) -> None:
    device, size = scores_V.device, len(scores_V)
    ids = answer.to(device)
    if row.prompt_ids is not None:
        ids = torch.cat([row.prompt_ids.flatten().to(device), ids])
    # one place more: some models embed tokens, of images say, that they can't write
    ids, longer_V = ids.clamp(max=size), torch.cat([scores_V, scores_V.new_zeros(1)])
    old, penalty = longer_V[ids], row.sampling.repetition_penalty
    scores = torch.where(old < 0, old * penalty, old / penalty)
    scores_V.copy_(longer_V.scatter(0, ids, scores)[:size])


def _logprob(logits_BV: Tensor, place: int, token: int, sampling: Sampling) -> TokenLogprob | None:
    num_top = sampling.logprobs
    if num_top is None:
        return None
    # row by row and from a new tensor: the order of a sum may depend on the shape of the whole,
    # and on a GPU on where in memory the row begins
    wide_V = logits_BV[place].to(torch.float32, copy=True)
    if sampling.tempers_logprobs and _is_sampled(sampling):
        wide_V /= sampling.temperature
    logprobs_V = wide_V.log_softmax(-1)
    top = _largest(logprobs_V, min(num_top, len(logprobs_V)))
    return TokenLogprob(token, logprobs_V[token].item(), top)


def _largest(values_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The largest values with their places; of equal ones the first come first."""
    if count == 0:
        return ()
    least = values_V.topk(count).values[-1]
    above, equal = (values_V > least).nonzero()[:, 0], (values_V == least).nonzero()[:, 0]
    places = torch.cat([above, equal[: count - len(above)]])
    values, order = values_V[places].sort(descending=True, stable=True)
    return tuple(zip(places[order].tolist(), values.tolist(), strict=True))
