"""Follows grammars while answers are made: which tokens may come next. By llguidance.

Shapes: R rows that have a grammar, V tokens of the vocabulary, C columns of the logits.
"""

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stageline.errors import UserError, package

Kind = Literal["json_schema", "regex", "lark"]
LONGEST = 2**18  # letters: it is compiled on the last stage while other answers wait
# without an upper bound a model may write white space until its tokens are used up
_SPACES = r"[ \t\n]{1,40}"


@dataclass(frozen=True)
class Grammar:
    """The whole answer matches it: no special token is in it but the one that ends the answer.

    Attributes:
        kind: a JSON schema (draft 2020-12 and before; the JSON has the properties in its order),
            a regular expression (Rust's, without look-around), or a grammar in Lark's syntax with
            the additions of llguidance.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if not 0 < len(self.text) <= LONGEST:
            raise UserError(
                f"the text of the grammar is {len(self.text)} letters; expected a text of 1 to "
                f"{LONGEST} letters, as every step of the model waits while it is compiled."
            )


def json_grammar(schema: Mapping[str, Any], *, is_strict: bool = True) -> Grammar:
    """JSON of a schema; its text may also follow `%json` in Lark's syntax.

    Args:
        is_strict: refuse keywords that can't be kept to, such as `not`; else they are left out.

    Raises:
        UserError: it can't be written as JSON.
    """
    options = {"lenient": not is_strict, "whitespace_pattern": _SPACES}
    try:
        text = json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"the schema is not JSON: {error}.") from None
    return Grammar("json_schema", text)


JSON_OBJECT = json_grammar({"type": "object"})


_NUM_KEPT = 64
# llguidance's own end token: real ones end an answer only where its request says so
_END = "<|the end of the grammar|>"


class RowMatcher:
    """The grammar of one answer; `error` says why it can't be followed any more."""

    def __init__(self, matcher: Any, end_id: int, stop_ids: Collection[int]) -> None:
        self.matcher = matcher
        self.end_id = end_id
        self.stop_ids = tuple(stop_ids)

    @property
    def error(self) -> UserError | None:
        if not self.matcher.is_error():
            return None
        return UserError(f"the grammar can't be followed any more: {_first(self.matcher)}")

    def allows(self, token_id: int) -> bool:
        """Whether a token may come next; False too where only all tokens together can tell."""
        is_text = token_id < self.end_id and token_id not in self.stop_ids
        return is_text and self.matcher.validate_tokens([token_id]) == 1

    def take(self, token_id: int) -> bool:
        """Take the chosen token; return whether the text is whole and nothing may follow."""
        if token_id < 0 or token_id in self.stop_ids:
            return False
        return self.matcher.consume_token(token_id) and self.matcher.is_stopped()


class Matchers:
    """Makes matchers for one tokenizer; nothing is loaded before the first grammar."""

    def __init__(self, load_tokenizer: Callable[[], Any]) -> None:
        self._vocabulary = functools.cache(lambda: _read_vocabulary(load_tokenizer()))
        self._compiled = functools.lru_cache(_NUM_KEPT)(self._compile)

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar, which may take a while, or raises a UserError."""
        self._compiled(grammar)

    def make(self, grammar: Grammar, *, stop_ids: Collection[int]) -> RowMatcher:
        """The matcher of a new answer; raises as `check`.

        Args:
            stop_ids: end the answer; they may come just where the grammar may end.
        """
        matcher = self._compiled(grammar).deep_copy()
        return RowMatcher(matcher, self._vocabulary()[1], stop_ids)

    def _compile(self, grammar: Grammar) -> Any:
        llguidance = _library()
        vocabulary, _ = self._vocabulary()
        make_text = getattr(llguidance.LLMatcher, f"grammar_from_{grammar.kind}")
        limits = llguidance.LLParserLimits(verbose_errors=False)
        try:
            text = make_text(grammar.text)
        except ValueError as error:
            raise UserError(f"the {_NAMES[grammar.kind]} can't be read: {error}") from None
        matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise UserError(f"the {_NAMES[grammar.kind]} can't be kept to: {_first(matcher)}")
        return matcher


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}


def allowed_tokens(rows: Sequence[RowMatcher], num_columns: int) -> np.ndarray:
    """Return which tokens each row may have next [R, C]; arbitrary for a row with an error."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    size = max(row.end_id for row in rows) + 1
    words = allocate_token_bitmask(len(rows), size)
    pairs = [(row.matcher, place) for place, row in enumerate(rows)]
    fill_next_token_bitmask_par(_executor(), pairs, words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)
    allowed_RC = np.zeros((len(rows), num_columns), dtype=bool)
    for place, row in enumerate(rows):
        # models may have columns that their tokenizer has no token for, and the other way round
        num_shared = min(num_columns, row.end_id)
        allowed_RC[place, :num_shared] = bits[place, :num_shared]
        stops = [token_id for token_id in row.stop_ids if token_id < num_columns]
        allowed_RC[place, stops] = bits[place, row.end_id]
    return allowed_RC


def _read_vocabulary(tokenizer: Any) -> tuple[Any, int]:
    """llguidance's tokenizer, and the id of the end token that it got."""
    from llguidance import LLTokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"The model's tokenizer is a {type(tokenizer).__name__}, and grammars are followed by "
            "the bytes of a tokenizer.json. Ask without a grammar."
        )
    described = json.loads(backend.to_str())
    described["truncation"] = described["padding"] = None
    if (described.get("decoder") or {}).get("type") == "Metaspace":
        described["decoder"] = _SPACED_DECODER  # the same but at the text's beginning
    end_id = max(tokenizer.get_vocab().values()) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described["added_tokens"].append({"id": end_id, "content": _END, "special": True, **flags})
    try:
        return LLTokenizer(json.dumps(described), eos_token=end_id), end_id
    except ValueError as error:
        raise UserError(
            f"grammars can't be followed with the model's tokenizer ({error}): ask without one."
        ) from None


_SPACED_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def _first(matcher: Any) -> str:
    """The error of a matcher, without the state that it prints."""
    return matcher.get_error().partition("\n<non-verbose")[0].strip() or "it is too complex"


def _library() -> Any:
    user = "an answer in the form of a JSON schema, a regular expression or a grammar"
    return package("llguidance", user, extra="serve", instead="ask for free text")


@functools.cache
def _executor() -> Any:
    """Return the threads that all rows share."""
    from llguidance import LLExecutor

    return LLExecutor()
