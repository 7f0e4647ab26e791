"""Requests and results of the decoding engine: plain values, no model and no rank."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from stageline.errors import UserError
from stageline.inference.decoding.grammars import Grammar

Prompt = Mapping[str, Tensor]
MASK = "attention_mask"  # made from the lengths, on each stage
_LARGEST = 2**31 - 1


def answer_room(length: int, longest: int | None, *, images: str = "") -> int:
    """Return how many tokens an answer to a prompt may have.

    Args:
        longest: tokens of prompt and answer that fit; None: any number.

    Raises:
        UserError: the prompt is empty, or there is no room for one token.
    """
    most = _LARGEST if longest is None else longest
    if 1 <= length < most:
        return most - length
    allowed = "one or more" if longest is None else f"1 to {longest - 1}"
    raise UserError(
        f"The prompt has {length} tokens{images}; {allowed} fit the model's positions and the "
        f"cache with one token of the answer. {'Shorten it' if length else 'Give it a text'}."
    )


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the tokens of one answer, and for its end.

    Attributes:
        temperature: 0 takes the likeliest token, whatever top_k, top_p and min_p say.
        top_k: number of the likeliest tokens to choose from; 0: all.
        top_p: only the likeliest tokens that together have this probability; at least one.
        min_p: only tokens with at least this share of the likeliest token's probability.
        repetition_penalty: above 1 makes tokens of prompt and answer less likely (transformers).
        presence_penalty: taken once from the logit of each token of the answer (OpenAI).
        frequency_penalty: taken from it as often as the answer has that token (OpenAI).
        logit_bias: (token id, what its logit gets more) pairs (OpenAI).
        stop: the text ends before the first of these that appears in it.
        stop_token_ids: end the answer; None: those of model and tokenizer, (): none.
        min_new_tokens: no stop token comes before the answer has this many tokens.
        logprobs: None: none; n: that of each chosen token and of the n likeliest ones.
        tempers_logprobs: they are those of what is drawn from, the logits by the temperature.
        grammar: what the whole answer has to be; stop tokens then come only where it may end.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    min_new_tokens: int = 0
    logprobs: int | None = None
    tempers_logprobs: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    Attributes:
        key: unique among the requests that run.
        prompt: what `stageline.inference.generation.encode_prompts` makes of one prompt.
        adapter: number of the adapter that answers; 0: none, the base does.
    """

    key: str
    prompt: Prompt
    sampling: Sampling
    adapter: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token and of the likeliest ones in its place, likeliest first.

    They are those of the model: before penalties and biases, and before the temperature unless the
    request says otherwise.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class AnswerPiece:
    """New text and tokens of an answer; the texts of all pieces make the text of `Finished`."""

    key: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """A whole answer.

    Attributes:
        text: ends before the stop string.
        token_ids: without the stop token; includes the tokens of a stop string.
        stopped_by: the stop string or the stop token's id, where one ended the answer; a grammar
            that nothing can follow needs none.
        stop_logprob: of the stop token, where log-probabilities were asked for.
    """

    key: str
    reason: Literal["stop", "length", "cancelled"]
    prompt_tokens: int
    completion_tokens: int
    text: str
    token_ids: tuple[int, ...]
    stopped_by: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_logprob: TokenLogprob | None = None


class EngineError(RuntimeError):
    """A stage could not do its part; the requests concerned got no answer."""


class Cancelled(EngineError):
    """The request was cancelled before its result was there."""


@dataclass(frozen=True)
class Failed:
    """A request that got no answer, by a `UserError` if its own fault, else by the engine's."""

    key: str
    error: Exception


@dataclass(frozen=True)
class ScoreRequest:
    """A row whose last `num_targets` tokens are to be scored.

    Attributes:
        num_top: number of the likeliest tokens that are returned in each place.
        adapter: as in `Request`.
    """

    key: str
    prompt: Prompt
    num_targets: int
    num_top: int = 0
    adapter: int = 0


@dataclass(frozen=True)
class Scored:
    """Log-probability of each target; `is_greedy`: each was the likeliest token in its place.

    Attributes:
        tops: in the place of each target the likeliest tokens, likeliest first, if they were
            asked for.
    """

    key: str
    logprobs: tuple[float, ...]
    is_greedy: bool
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()


# called in the engine's thread: must return at once
Listener = Callable[[AnswerPiece | Finished | Scored | Failed], None]


@dataclass(frozen=True)
class EngineStats:
    """Load and totals of the engine.

    Attributes:
        prompt_tokens, completion_tokens: read and made since the start.
        cache_cells, max_cache_cells: rows times columns of caches; None: no limit.
    """

    queued: int
    running: int
    max_running: int
    prompt_tokens: int
    completion_tokens: int
    num_groups: int
    cache_cells: int
    max_cache_cells: int | None
    is_healthy: bool


Kind = Literal["prefill", "decode", "whole", "score", "tidy", "stop"]
Score = tuple[list[float], bool, list[list[tuple[int, float]]]]


@dataclass
class PassOrder:
    """One pass through the stages: made on the first one, carried from stage to stage.

    An order holds plain values; tensors are sent separately. A model that keeps no keys and values
    reads its rows again for each token: "whole" takes the place of "prefill" and "decode".

    Attributes:
        group: whose cache it uses.
        rows: ids of the rows, in the order in which the group has them.
        adapters: number of each row's adapter, 0: none; empty: no row has one.
        lengths: tokens of each row; of a prefill and a score.
        copies: rows that each prompt becomes when it is read; 0: one.
        room: (rows, columns) that the group has at most, if known.
        piece: (first, end) of the tokens that are read of the only row; empty: all of each row.
        settings: of each new row: how its tokens are chosen.
        targets: of each row of a score: the tokens that are scored; the row ends before the last.
        num_tops: of each row of a score: how many of the likeliest tokens are told in each place.
        leave: (group, row) that go before the pass.
        join: (from, into) groups that become one before the pass.
        seconds: of each stage.
        error: what a stage could not do; the later ones then do nothing.
        tokens, logprobs: what the last stage chose, by place in `rows`.
        over: places of rows whose grammar nothing can follow.
        row_errors: place -> whether the request is to blame that it has no token, and why.
        scores: of each row, log-probabilities of its targets, whether all were likeliest, and
            the likeliest tokens.
    """

    kind: Kind
    number: int = 0
    group: int = 0
    rows: list[int] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    copies: int = 0
    room: list[int] = field(default_factory=list)
    piece: list[int] = field(default_factory=list)
    settings: list[Sampling] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    leave: list[tuple[int, int]] = field(default_factory=list)
    join: list[tuple[int, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    row_errors: dict[int, tuple[bool, str]] = field(default_factory=dict)
    num_tops: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    @property
    def span(self) -> tuple[int, int]:
        """(first, end) of the columns of a pass over prompts, in the longest of them."""
        first, end = self.piece or (0, max(self.lengths))
        return first, end

    @property
    def is_part(self) -> bool:
        """Whether more of its prompt follows."""
        return bool(self.piece) and self.piece[1] < self.lengths[0]

    def as_json(self) -> str:
        """The fields that are not empty."""
        filled = {name: value for name, value in vars(self).items() if value or name == "group"}
        return json.dumps(filled, default=vars)

    @staticmethod
    def of_json(text: str) -> "PassOrder":
        """Read what `as_json` wrote."""
        order = PassOrder(**json.loads(text))
        order.leave = [(group, row) for group, row in order.leave]
        order.join = [(group, into) for group, into in order.join]
        for place, values in enumerate(cast(list[dict[str, Any]], order.settings)):
            lists = {name: tuple(value) for name, value in values.items() if type(value) is list}
            lists["logit_bias"] = tuple((token, added) for token, added in values["logit_bias"])
            grammar = values["grammar"] and Grammar(**values["grammar"])
            order.settings[place] = Sampling(**{**values, **lists, "grammar": grammar})
        for place, found in enumerate(cast(list[dict[str, Any] | None], order.logprobs)):
            if found is not None:
                top = tuple((token, logprob) for token, logprob in found["top"])
                order.logprobs[place] = TokenLogprob(found["token_id"], found["logprob"], top)
        errors = order.row_errors.items()
        order.row_errors = {int(place): (is_users, text) for place, (is_users, text) in errors}
        return order


def error_of(order: PassOrder, place: int) -> Exception | None:
    """Return why a row of an order got no token; None if it got one."""
    if order.error is not None:
        return EngineError(order.error)
    is_users, text = order.row_errors.get(place, (False, None))
    return None if text is None else UserError(text) if is_users else EngineError(text)


def adapters_of(requests: Iterable[Request | ScoreRequest]) -> list[int]:
    """Return each row's adapter for an order; empty if none has one."""
    numbers = [request.adapter for request in requests]
    return numbers if any(numbers) else []


def length_of(prompt: Prompt) -> int:
    """Tokens of a prompt."""
    return prompt["input_ids"].shape[1]


def is_alone(prompt: Prompt) -> bool:
    """Whether it is read by itself: what images bring is not padded to that of others."""
    shape = prompt["input_ids"].shape
    return any(value.shape != shape or value.is_floating_point() for value in prompt.values())


def padded_right(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Rows of ids of several lengths as `input_ids` [B, T]."""
    ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for place, row in enumerate(rows):
        ids_BT[place, : len(row)] = torch.tensor(row)
    return {"input_ids": ids_BT}


def part_of(prompt: Prompt, piece: range) -> Prompt:
    """Return a run of the prompt's tokens, with the other values for each of them."""
    shape = prompt["input_ids"].shape
    own = slice(piece.start, piece.stop)
    return {name: v[:, own] if v.shape == shape else v for name, v in prompt.items()}


def together(prompts: Sequence[Prompt], *, pads_right: bool = False) -> dict[str, Tensor]:
    """Return the inputs [B, T] of prompts that may share a pass, or of a single prompt."""
    if len(prompts) == 1:
        return {name: value for name, value in prompts[0].items() if name != MASK}
    width = max(map(length_of, prompts))
    padded = {}
    for name in [name for name in prompts[0] if name != MASK]:
        padded[name] = torch.zeros(len(prompts), width, dtype=prompts[0][name].dtype)
        for row, prompt in zip(padded[name], prompts, strict=True):
            if name in prompt:
                begin = 0 if pads_right else width - length_of(prompt)
                row[begin : begin + length_of(prompt)] = prompt[name][0]
    return padded
