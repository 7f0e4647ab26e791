"""Choose the next token of each row from its logits; each row has settings of its own.

The steps are those of transformers' `generate`: bias, penalties, temperature, top_k, top_p, min_p.
Each row draws one number a token from a generator of its own, seeded by its request: its tokens do
not depend on the other rows of the batch, nor on the number of stages. The number is looked up in
the cumulative distribution over token ids, not over sorted tokens: a logit that differs in its last
bit moves a border a little and swaps no tokens.

Shapes: B rows of a pass, R some of them, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stageline.errors import UserError
from stageline.inference.decoding.grammars import RowMatcher, allowed_tokens
from stageline.inference.decoding.request import Sampling, TokenLogprob

# rows that are drawn at a time: on a GPU this bounds the memory, on a CPU the values fit its caches
_ROWS_AT_ONCE = 16
_VALUES_AT_ONCE_ON_CPU = 1 << 16
_FEW = 256  # largest values that are found faster than all are sorted
# below it the likeliest token is taken: float32 logits divided by less leave no other a chance
_LEAST_TEMPERATURE = 1e-5
_NONE = -1  # no token is possible
_NUMBERS_AT_ONCE = 8  # that decide a row's next tokens: a call of the generator takes longer


def draw(scores_RV: Tensor, samplings: Sequence[Sampling], numbers: Sequence[float]) -> list[int]:
    """Return a token for each row of float32 scores; `numbers` from 0 up to 1 decide."""
    size = _rows_at_once(scores_RV)
    tokens: list[int] = []
    for first in range(0, len(samplings), size):
        part = slice(first, first + size)
        weights_RV = token_weights(scores_RV[part], samplings[part])
        sums_RV = weights_RV.cumsum(-1, dtype=torch.float64)
        wanted_R1 = _column(numbers[part], scores_RV.device) * sums_RV[:, -1:]
        tokens += torch.searchsorted(sums_RV, wanted_R1, right=True)[:, 0].tolist()
    return tokens


def _rows_at_once(values_RV: Tensor) -> int:
    is_cpu = values_RV.device.type == "cpu"
    return max(1, _VALUES_AT_ONCE_ON_CPU // values_RV.shape[-1]) if is_cpu else _ROWS_AT_ONCE


def choice_bytes(num_rows: int, size: int) -> int:
    """Return the peak bytes of `choose` without the logits [num_rows, size] of sampled rows.

    A copy in float32; for the rows at a time the weights, those that are kept, and sums in float64.
    """
    at_once = min(num_rows, max(_ROWS_AT_ONCE, _VALUES_AT_ONCE_ON_CPU // size))
    return 4 * num_rows * size + 16 * at_once * (size + 2)


def token_weights(scores_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the chance of each token in shares of the likeliest one's [R, V]; 0: left out.

    Tokens with equal scores stay or go together.
    """
    device, size = scores_RV.device, scores_RV.shape[-1]
    temperature_R1 = _column([s.temperature for s in samplings], device).float()
    weights_RV = (scores_RV - scores_RV.amax(-1, keepdim=True)).div_(temperature_R1).exp_()

    rows = [row for row, s in enumerate(samplings) if 0 < s.top_k < size]
    if rows:
        counts = [samplings[row].top_k for row in rows]
        counts_R1 = torch.tensor(counts, device=device)[:, None]
        kept_RV = weights_RV[rows]
        largest_RK = kept_RV.topk(max(counts)).values
        weights_RV[rows] = kept_RV.mul_(kept_RV >= largest_RK.gather(-1, counts_R1 - 1))

    rows = [row for row, s in enumerate(samplings) if s.top_p < 1]
    if rows:
        kept_RV = weights_RV[rows]
        needed_R1 = _column([samplings[row].top_p for row in rows], device)
        needed_R1 = needed_R1 * kept_RV.sum(-1, keepdim=True, dtype=torch.float64)
        sorted_RK = kept_RV.topk(min(_FEW, size)).values
        if (sorted_RK.sum(-1, keepdim=True, dtype=torch.float64) < needed_R1).any():
            sorted_RK = _sorted_down(kept_RV)
        before_RK = sorted_RK.cumsum(-1, dtype=torch.float64) - sorted_RK
        num_kept_R1 = (before_RK < needed_R1).sum(-1, keepdim=True).clamp(min=1)
        weights_RV[rows] = kept_RV.mul_(kept_RV >= sorted_RK.gather(-1, num_kept_R1 - 1))

    if any(s.min_p > 0 for s in samplings):
        weights_RV.mul_(weights_RV >= _column([s.min_p for s in samplings], device).float())
    return weights_RV


@dataclass
class SampledRow:
    """The state that, with its logits, decides a row's next token; the caller updates it.

    Attributes:
        prompt_ids: token ids of the prompt, for the repetition penalty; None: of the answer only.
        answer_ids: the tokens chosen so far.
        matcher: follows the grammar of the answer, if it has one.
        failure: why the row gets no token at all.
    """

    sampling: Sampling
    prompt_ids: Tensor | None
    answer_ids: list[int]
    matcher: RowMatcher | None = None
    failure: Exception | None = None

    def __post_init__(self) -> None:
        sampling = self.sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._numbers: list[float] = []
        self.is_sampled = sampling.temperature >= _LEAST_TEMPERATURE
        self.kind = sampling.logprobs, sampling.tempers_logprobs, sampling.temperature
        penalties = sampling.presence_penalty, sampling.frequency_penalty
        self._is_changed = bool(
            sampling.repetition_penalty != 1 or any(penalties) or sampling.logit_bias
        )

    @property
    def index(self) -> int:
        """Number of the answer's next token, from 0."""
        return len(self.answer_ids)

    @property
    def is_changed(self) -> bool:
        """Whether its settings change its logits."""
        return self._is_changed or self.index < self.sampling.min_new_tokens

    def next_number(self) -> float:
        """Draw what decides the next token, from 0 up to 1; once a token."""
        if not self._numbers:  # several at once are those that one after the other would be
            drawn = torch.rand(_NUMBERS_AT_ONCE, generator=self._generator, dtype=torch.float64)
            self._numbers = drawn.flip(0).tolist()
        return self._numbers.pop()


@dataclass(frozen=True)
class Chosen:
    """A token, or -1 with an error if the row has none; the rest of the batch is not affected."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: Exception | None = None


def _sorted_down(values_RV: Tensor) -> Tensor:
    if values_RV.device.type != "cpu":
        return values_RV.sort(descending=True).values
    # numpy sorts with vector instructions: 4 ms a row of 49152 against torch's 17 (2026-11-27)
    return torch.from_numpy(np.sort(values_RV.numpy(), axis=-1)).flip(-1)


def choose(logits_BV: Tensor, rows: Sequence[SampledRow]) -> list[Chosen]:
    """Return the next token of each row.

    Log-probabilities are a float32 log-softmax of the logits before penalties, biases and
    temperature (as OpenAI and vLLM have it); of tempered ones where the row asks for it.
    """
    tops, tokens = _likeliest(logits_BV)
    errors = {}
    for place, (row, top) in enumerate(zip(rows, tops, strict=True)):
        if (error := _find_error(row, top, logits_BV.shape[-1])) is not None:
            errors[place] = error
    others = [
        place
        for place, row in enumerate(rows)
        if place not in errors
        and (
            row.is_sampled
            or row.is_changed
            or not (row.matcher is None or row.matcher.allows(tokens[place]))
        )
    ]
    if others:
        found = _choose_others(_rows(logits_BV, others), [rows[place] for place in others])
        for place, token in zip(others, found, strict=True):
            tokens[place] = token
            matcher = rows[place].matcher
            if token == _NONE and matcher is not None:
                errors[place] = matcher.error or UserError(
                    f"No token that the grammar allows can be token {rows[place].index} of the "
                    "answer. Change the grammar, or name a stop token."
                )
    kinds = {row.kind for row in rows}
    if len(kinds) == 1 and (kind := kinds.pop())[:2] == (0, True):
        temperature = kind[2] if rows[0].is_sampled else 0.0
        values = _own_logprobs(logits_BV, tokens, temperature)
        logprobs: list[TokenLogprob | None] = [
            TokenLogprob(*both, ()) for both in zip(tokens, values, strict=True)
        ]
    else:
        logprobs = [
            None if place in errors else _logprob(logits_BV, place, token, rows[place])
            for place, token in enumerate(tokens)
        ]
    return [
        Chosen(_NONE, error=errors[place]) if place in errors else Chosen(token, logprobs[place])
        for place, token in enumerate(tokens)
    ]


def _likeliest(logits_RV: Tensor) -> tuple[list[float], list[int]]:
    """Return the largest value of each row and its place; of equal ones the first, on a CPU."""
    if logits_RV.device.type == "cpu" and logits_RV.dtype == torch.float32:
        # numpy looks for it with vector instructions: 0.05 ms against torch's 0.65 of 16 rows
        places_R1 = torch.from_numpy(logits_RV.numpy().argmax(-1))[:, None]
        return logits_RV.gather(-1, places_R1)[:, 0].tolist(), places_R1[:, 0].tolist()
    found = logits_RV.max(dim=-1)
    # read at once, as the host waits; no vocabulary is so large that float32 has no such place
    values, places = torch.stack([each.float() for each in found]).tolist()
    return values, list(map(int, places))


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


def _choose_others(logits_RV: Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """Return the tokens of rows whose logits are changed or drawn from; -1: none is possible."""
    changed = [place for place, row in enumerate(rows) if row.is_changed]
    is_copied = bool(changed) or any(row.matcher is not None for row in rows)
    scores_RV = logits_RV.to(torch.float32, copy=is_copied)
    without = _keep_to_grammars(scores_RV, rows)
    for place in changed:
        _change(scores_RV[place], rows[place])
    drawn = [i for i, row in enumerate(rows) if row.is_sampled and i not in without]
    tokens = [_NONE] * len(rows) if len(drawn) == len(rows) else _likeliest(scores_RV)[1]
    for i in without:
        tokens[i] = _NONE
    if drawn:
        samplings = [rows[i].sampling for i in drawn]
        numbers = [rows[i].next_number() for i in drawn]
        for i, token in zip(drawn, draw(_rows(scores_RV, drawn), samplings, numbers), strict=True):
            tokens[i] = token
    return tokens


def _rows(values_RV: Tensor, rows: Sequence[int]) -> Tensor:
    return values_RV if len(rows) == len(values_RV) else values_RV[list(rows)]


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


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


def _change(scores_V: Tensor, row: SampledRow) -> None:
    """Add the bias, then the penalties, in place."""
    sampling, device, size = row.sampling, scores_V.device, len(scores_V)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        added = torch.tensor(biases, dtype=torch.float32, device=device)
        scores_V.index_add_(0, torch.tensor(ids, device=device), added)
    answer = torch.tensor(row.answer_ids, dtype=torch.long)
    if (penalty := sampling.repetition_penalty) != 1:
        seen = answer.to(device)
        if row.prompt_ids is not None:
            seen = torch.cat([row.prompt_ids.flatten().to(device), seen])
        seen = seen[seen < size]  # some models embed tokens, of images say, that they can't write
        old = scores_V[seen]
        scores_V[seen] = torch.where(old < 0, old * penalty, old / penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(answer):
        ids, counts = answer.unique(return_counts=True)
        penalties = counts.float() * sampling.frequency_penalty + sampling.presence_penalty
        scores_V[ids.to(device)] -= penalties.to(device)
    if row.index < sampling.min_new_tokens and sampling.stop_token_ids:
        scores_V[torch.tensor(sampling.stop_token_ids, device=device)] = -float("inf")


def _own_logprobs(logits_BV: Tensor, tokens: Sequence[int], temperature: float) -> list[float]:
    """Return each token's log-probability; 0 divides by no temperature, -1 has no meaning.

    For rows that are the same ones in each run, as those of a training: see `_logprob`.
    """
    size = _rows_at_once(logits_BV)
    ids_B1 = torch.tensor(tokens, device=logits_BV.device).clamp_(min=0)[:, None]
    found = []
    for wide_RV, ids_R1 in zip(logits_BV.float().split(size), ids_B1.split(size), strict=True):
        tempered_RV = wide_RV / temperature if temperature else wide_RV
        found.append(tempered_RV.log_softmax(-1).gather(-1, ids_R1))
    return torch.cat(found)[:, 0].tolist()


def _logprob(logits_BV: Tensor, place: int, token: int, row: SampledRow) -> TokenLogprob | None:
    num_top = row.sampling.logprobs
    if num_top is None:
        return None
    # row by row and from a new tensor: the order of a sum may depend on the shape of the whole,
    # and on a GPU on where in memory the row begins
    wide_V = logits_BV[place].to(torch.float32, copy=True)
    if row.sampling.tempers_logprobs and row.is_sampled:
        wide_V /= row.sampling.temperature
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
