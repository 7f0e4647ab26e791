"""What a pass through the stages does: made on the first one, carried from stage to stage.

An order holds plain values only, so that it travels as JSON. Tensors travel beside it.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from stageline.errors import UserError
from stageline.inference.decoding.grammar import Grammar
from stageline.inference.decoding.request import EngineError, Sampling, TokenLogprob

Kind = Literal["prefill", "decode", "whole", "score", "measure", "tidy", "stop"]
Score = tuple[list[float], bool, list[list[tuple[int, float]]]]


@dataclass
class Order:
    """One pass.

    A model that keeps no keys and values reads its rows anew for each token: "whole" takes the
    place of "prefill" and "decode".

    Attributes:
        group: whose cache it uses.
        rows: ids of the rows, in the order in which the group has them.
        lengths: tokens of each row; of a prefill, a score and a measurement.
        piece: (first, end) of the tokens that are read of the only row; empty: all of each row.
        settings: of each new row: how its tokens are chosen.
        targets: of each row of a score: the tokens that are scored; the row ends before the last.
        leave: (group, row) that go before the pass.
        join: (from, into) groups that become one before the pass.
        seconds: what each stage took.
        error: what a stage could not do; the later ones then do nothing.
        tokens, logprobs: what the last stage chose, by place in `rows`.
        over: places of rows whose grammar nothing can follow.
        row_errors: place -> whether the request is to blame that it has no token, and why.
        num_tops: of each row of a score: so many of the likeliest tokens are told in each place.
        scores: of each row, log-probabilities of its targets, whether all were likeliest, and
            the likeliest tokens.
    """

    kind: Kind
    number: int = 0
    group: int = 0
    rows: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    piece: list[int] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    leave: list[tuple[int, int]] = field(default_factory=list)
    join: list[tuple[int, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    row_errors: dict[str, tuple[bool, str]] = field(default_factory=dict)
    num_tops: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    @property
    def span(self) -> tuple[int, int]:
        """(first, end) of the columns of a pass over prompts, in the longest of them."""
        return tuple(self.piece) if self.piece else (0, max(self.lengths))

    @property
    def is_part(self) -> bool:
        """Whether more of its prompt follows."""
        return bool(self.piece) and self.piece[1] < self.lengths[0]

    def as_json(self) -> str:
        """The fields that are not empty."""
        filled = {name: value for name, value in vars(self).items() if value or name == "group"}
        return json.dumps(filled)

    @staticmethod
    def of_json(text: str) -> "Order":
        """What `as_json` wrote."""
        return Order(**json.loads(text))


def settings_of(sampling: Sampling) -> dict[str, Any]:
    """The fields that the last stage needs and that are not the usual ones."""
    usual = asdict(Sampling())
    needless = ["max_new_tokens", "stop"]
    if sampling.grammar is None:  # only that one tells when a stop token may come
        needless.append("stop_token_ids")
    return {
        name: value
        for name, value in asdict(sampling).items()
        if name not in needless and value != usual[name]
    }


def sampling_of(settings: dict[str, Any]) -> Sampling:
    """What `settings_of` told."""
    bias = tuple((int(token), float(value)) for token, value in settings.get("logit_bias", ()))
    own: dict[str, Any] = {"logit_bias": bias}
    if "grammar" in settings:
        own["grammar"] = Grammar(**settings["grammar"])
        own["stop_token_ids"] = tuple(settings.get("stop_token_ids") or ())
    return Sampling(**{**settings, **own})


def logprob_as_json(found: TokenLogprob | None) -> Any:
    """A log-probability as plain values."""
    return found and [found.token_id, found.logprob, found.top]


def logprob_of_json(values: Any) -> TokenLogprob | None:
    """What `logprob_as_json` made."""
    if values is None:
        return None
    token_id, logprob, top = values
    return TokenLogprob(token_id, logprob, tuple((int(i), float(value)) for i, value in top))


def error_of(order: Order, place: int) -> Exception | None:
    """Why a row of an order got no token."""
    if order.error is not None:
        return EngineError(order.error)
    is_users, text = order.row_errors.get(str(place), (False, None))
    return None if text is None else UserError(text) if is_users else EngineError(text)
