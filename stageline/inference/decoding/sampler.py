"""Chooses the next token of each row from its logits; each row has settings of its own.

The steps are those of transformers' `generate`: bias, penalties, temperature, top_k, top_p, min_p.
A row's choice depends on its logits, its settings and its tokens, on nothing else in the batch.

Shapes: B rows, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stageline.errors import UserError
from stageline.inference.decoding.drawing import draw, uniform
from stageline.inference.decoding.matchers import RowMatcher, allowed_tokens
from stageline.inference.decoding.request import Sampling, TokenLogprob

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
    biases and temperature don't change them (as OpenAI and vLLM have it).
    """
    likeliest = logits_BV.max(dim=-1)
    tops, tokens = likeliest.values.tolist(), likeliest.indices.tolist()
    errors = {
        place: error
        for place, (row, top) in enumerate(zip(rows, tops, strict=True))
        if (error := _find_error(row, top, logits_BV.shape[-1])) is not None
    }
    others = [
        place
        for place, row in enumerate(rows)
        if place not in errors and (_is_sampled(row.sampling) or _is_changed(row))
    ]
    for place, token in zip(others, _choose_others(logits_BV, rows, others), strict=True):
        tokens[place] = token
        if token == _NONE:
            errors[place] = _no_token(rows[place])
    return [
        Chosen(-1, error=errors[place])
        if place in errors
        else Chosen(token, _logprob(logits_BV[place], token, rows[place].sampling.logprobs))
        for place, token in enumerate(tokens)
    ]


def _is_sampled(sampling: Sampling) -> bool:
    return sampling.temperature >= _LEAST_TEMPERATURE


def _is_changed(row: SampledRow) -> bool:
    sampling = row.sampling
    return bool(
        row.matcher is not None
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
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
    scores_RV = logits_BV[list(places)].float()
    chosen_from = [rows[place] for place in places]
    without = _keep_to_grammars(scores_RV, chosen_from)
    for scores_V, row in zip(scores_RV, chosen_from, strict=True):
        if _is_changed(row):
            _change(scores_V, row)
    tokens = scores_RV.argmax(-1).tolist()
    for i in without:
        tokens[i] = _NONE
    is_drawn = [_is_sampled(row.sampling) and i not in without for i, row in enumerate(chosen_from)]
    drawn = [i for i, is_one in enumerate(is_drawn) if is_one]
    if drawn:
        chosen = [chosen_from[i] for i in drawn]
        numbers = [uniform(row.sampling.seed, row.index) for row in chosen]
        found = draw(scores_RV[drawn], [row.sampling for row in chosen], numbers)
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
    forbidden_MV = ~allowed_MV.to(scores_RV.device)
    if len(matched) == len(rows):
        left_MV = scores_RV.masked_fill_(forbidden_MV, -float("inf"))
    else:
        left_MV = scores_RV[matched].masked_fill_(forbidden_MV, -float("inf"))
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
        scores_V.index_add_(0, torch.tensor(ids, device=device), _floats(biases, device))
    answer = torch.tensor(row.answer_ids, dtype=torch.long)
    if sampling.repetition_penalty != 1:
        _penalise_repetition(scores_V, row, answer)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(answer):
        ids, counts = answer.unique(return_counts=True)
        penalties = counts.float() * sampling.frequency_penalty + sampling.presence_penalty
        scores_V[ids.to(device)] -= penalties.to(device)


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


def _floats(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _logprob(logits_V: Tensor, token: int, num_top: int | None) -> TokenLogprob | None:
    if num_top is None:
        return None
    # row by row and from a new tensor: the order of a sum may depend on the shape of the whole,
    # and on a GPU on where in memory the row begins
    logprobs_V = logits_V.to(torch.float32, copy=True).log_softmax(-1)
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
