"""Rendered text -> token ids, with labels by character offsets. Knows neither images nor batches.

The whole text is tokenized once, as the library does it. A token that shares a character with a
target piece is supervised, so at a border it is the answer's: where " 7" is one token and "7" the
answer, " 7" is learnt. Only where text from the data turned into a special token, the text is
tokenized run by run: special tokens of the template by their id, and what lies between them with
a copy of the tokenizer that does not know them.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from transformers import PreTrainedTokenizerFast

from stageline.data.text.processor import get_tokenizer
from stageline.data.text.rendered import Piece, Rendered
from stageline.data.text.tokenizers import PlainTokenizer
from stageline.errors import DataError, UserError

_USER, _FIXED, _TARGET, _MARKED, _ANSWER, _IMAGE = (1 << place for place in range(6))
_CONTENTS = ("q", "a", "q")
_ZERO = numpy.zeros(1, dtype=numpy.int64)
Offsets = Sequence[tuple[int, int]]


def structural_tokens(processor: Any) -> set[str]:
    """Added tokens that the chat template writes around the turns of a plain conversation.

    Some tokenizers add "<|user|>" as an ordinary token. In text from the data it would still begin
    a turn, so it is treated like a special one. `<think>` and tool tags are not: answers hold them.
    So the last turn is the user's: before an answer some templates write such tags.
    """
    tokenizer = get_tokenizer(processor)
    added = {
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if not token.special and str(token).strip()
    }
    template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    if not added or not isinstance(template, str):
        return set()
    written = _plain_conversation(tokenizer, template)
    return {token for token in added if token in written}


def _plain_conversation(tokenizer: Any, template: str) -> str:
    roles = ("user", "assistant", "user")
    for is_list in (False, True):
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if is_list else text}
            for role, text in zip(roles, _CONTENTS, strict=True)
        ]
        try:
            return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        except Exception:  # a template raises anything; chat.py reports that when it is used
            continue
    return ""


def token_marks(
    spans: Sequence[tuple[int, int, Piece]], starts: numpy.ndarray, ends: numpy.ndarray
) -> dict[str, numpy.ndarray]:
    """Which kinds of pieces each token of a text touches; all tokens at once.

    A token across a border touches the pieces on both sides, one of no characters none.

    Args:
        spans: (start, end, piece), one behind the other.
        starts, ends: of each token, in characters.
    """
    full = [span for span in spans if span[0] < span[1]]
    kinds = [_kinds(piece) for _, _, piece in full]
    span_ends = numpy.array([end for _, end, _ in full], dtype=numpy.int64)
    first = span_ends.searchsorted(starts, side="right")
    last = span_ends.searchsorted(ends, side="left")
    # behind the last piece, and for tokens of no characters, there is nothing
    touched = numpy.array([*kinds, 0], dtype=numpy.int64)[first]
    for place in (last > first).nonzero()[0]:  # few: tokens across a border
        for kind in kinds[first[place] + 1 : last[place] + 1]:
            touched[place] |= kind
    touched[ends <= starts] = 0
    return {
        "is_user": touched & _USER != 0,
        "is_text": touched & (_USER | _FIXED) == _USER,  # from the data alone
        "is_cuttable": touched & (_USER | _FIXED | _TARGET) == _USER,
        "is_target": touched & _TARGET != 0,
        "is_marked": touched & _MARKED != 0,
        "is_answer": touched & _ANSWER != 0,
        "is_image": touched & _IMAGE != 0,
    }


def _kinds(piece: Piece) -> int:
    return (
        (_USER if piece.is_user else _FIXED)
        | (_TARGET | _ANSWER if piece.is_target else 0)
        | (_MARKED if piece.is_marked else 0)
        | (_ANSWER if piece.is_answer else 0)
        | (_IMAGE if piece.is_image else 0)
    )


@dataclass(frozen=True)
class Encoded:
    """Token ids of one sample and what they are; all lists have one entry a token.

    Attributes:
        is_target: supervised.
        is_cuttable: from the data and in the prompt; the only ones that `cut_prompt` cuts.
        is_marked: of a marked piece of the text; empty where none is.
        is_text: from the data alone, in prompts and answers; empty where it isn't known.
        is_answer: of an answer, supervised or not; empty where that is `is_target`.
        is_image: of an image; empty where there is none.
    """

    input_ids: list[int]
    is_target: list[bool]
    is_cuttable: list[bool]
    is_marked: list[bool] = field(default_factory=list)
    is_text: list[bool] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)
    is_image: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Supervised tokens that have a token before them: the first one is never predicted."""
        return sum(self.is_target[1:])

    @property
    def marks(self) -> list[list[bool]]:
        """The lists of marks, without those that are empty."""
        lists = (self.is_target, self.is_cuttable, self.is_marked)
        return [marks for marks in (*lists, self.is_text, self.is_answer, self.is_image) if marks]

    def keep(self, chosen: list[int]) -> "Encoded":
        """Only the tokens at the given places."""

        def kept(values: list[Any]) -> list[Any]:
            return [values[place] for place in chosen] if values else []

        return Encoded(**{name: kept(values) for name, values in vars(self).items()})


class TextEncoder:
    """Encodes with one tokenizer; use `TextEncoder.of`, which keeps one for each.

    Reserved are the tokens that the tokenizer marks as special, those that its processor has for
    images, and those that its chat template writes around turns. Other added tokens that are not
    special are ordinary text to the tokenizer's makers (`<think>`, runs of spaces) and stay what
    they are wherever they occur.

    Args:
        processor: a processor with a fast tokenizer, or the tokenizer.
    """

    _known: "weakref.WeakKeyDictionary[Any, tuple[int, TextEncoder]]"
    _known = weakref.WeakKeyDictionary()

    def __init__(self, processor: Any) -> None:
        self.tokenizer = get_tokenizer(processor)
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                f"the tokenizer is a {type(self.tokenizer).__name__}, which gives no character "
                "offsets. A fast one (with a tokenizer.json) was expected, because offsets say "
                "which tokens are the answer: convert it with the library's AutoTokenizer and "
                "save it again."
            )
        self.reserved = _reserved_tokens(processor)
        self.reserved_ids = frozenset(self.reserved.values())
        self.prefix = _first_tokens(self.tokenizer)
        self._is_direct = _is_plain_class(type(self.tokenizer))
        self._plain: PlainTokenizer | None = None

    @classmethod
    def of(cls, processor: Any) -> "TextEncoder":
        """The encoder of this processor; a new one when tokens were added since."""
        size = len(get_tokenizer(processor))
        known = cls._known.get(processor)
        if known is None or known[0] != size:
            known = (size, cls(processor))
            cls._known[processor] = known
        return known[1]

    @property
    def plain(self) -> PlainTokenizer:
        """The copy without reserved tokens; made when first needed."""
        if self._plain is None:
            self._plain = PlainTokenizer(self.tokenizer, self.reserved)
        return self._plain

    def encode(self, rendered: Rendered) -> Encoded:
        """Tokenizes a rendered sample.

        Text of a plain template gets the tokenizer's first tokens and, unless it is for
        generation, a supervised end-of-sequence token; a chat template holds its own.
        """
        text = rendered.text
        spans = list(rendered.spans())
        ids, starts, ends = _with_gaps(*self.tokenize(text))
        marks = token_marks(spans, starts, ends)
        if self._has_reserved_user_token(ids, starts, ends, marks["is_user"], text):
            ids, starts, ends = _with_gaps(*self._tokenize_by_runs(spans))
            marks = token_marks(spans, starts, ends)
        lists = {kind: own.tolist() for kind, own in marks.items() if kind != "is_user"}
        if not any(piece.is_answer for piece in rendered):
            lists["is_answer"] = []
        if not rendered.num_images:
            lists["is_image"] = []
        encoded = Encoded(ids, **lists)
        if not rendered.is_chat:
            self._add_outer(encoded, for_generation=rendered.for_generation)
        return encoded

    def tokenize(self, text: str) -> tuple[list[int], Offsets]:
        """Ids of a text, as the library makes them, and the characters that each covers."""
        backend = self.tokenizer.backend_tokenizer if self._is_direct else None
        if (
            backend is not None
            and backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == self.tokenizer.split_special_tokens
        ):  # what the library does in the end, without what it does before and after
            encoding = backend.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.offsets
        output = self.tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,  # our own limit is checked later
        )
        return output["input_ids"], output["offset_mapping"]

    def _has_reserved_user_token(
        self,
        ids: list[int],
        starts: numpy.ndarray,
        ends: numpy.ndarray,
        is_user: numpy.ndarray,
        text: str,
    ) -> bool:
        reserved = self.reserved_ids
        suspects = [place for place, token_id in enumerate(ids) if token_id in reserved]
        unk_id, unk_text = self.tokenizer.unk_token_id, self.tokenizer.unk_token
        return any(
            # an unknown word is plain text; the string "<unk>" is not
            ids[place] != unk_id or unk_text in text[starts[place] : ends[place]]
            for place, is_from_data in zip(suspects, is_user[suspects].tolist(), strict=True)
            if is_from_data
        )

    def _tokenize_by_runs(self, spans: list[tuple[int, int, Piece]]) -> tuple[list[int], Offsets]:
        """Special tokens from the template only; everything between is plain text."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        run = ""
        run_start = 0

        def finish_run() -> None:
            if run:
                for token_id, start, end in self.plain.encode(run, is_first=run_start == 0):
                    ids.append(token_id)
                    offsets.append((run_start + start, run_start + end))

        for start, _, piece in spans:
            parts = [piece.text] if piece.is_user else self.plain.split_reserved(piece.text)
            for part in parts:
                token_id = None if piece.is_user else self.plain.reserved_id(part)
                if token_id is None:
                    run += part
                else:
                    finish_run()
                    ids.append(token_id)
                    offsets.append((start, start + len(part)))
                    run, run_start = "", start + len(part)
                start += len(part)
        finish_run()
        return ids, offsets

    def _add_outer(self, encoded: Encoded, *, for_generation: bool) -> None:
        ids, is_target = encoded.input_ids, encoded.is_target
        if self.prefix and ids[: len(self.prefix)] != self.prefix:
            ids[:0] = self.prefix
            for marks in encoded.marks:
                marks[:0] = [False] * len(self.prefix)
        eos_id = self.tokenizer.eos_token_id
        if for_generation or eos_id is None or not any(is_target):
            return
        if ids[-1] == eos_id:  # the template ends with it
            is_target[-1] = True
            return
        others = [marks for marks in encoded.marks if marks is not is_target]
        ids.append(eos_id)
        is_target.append(True)
        for marks in others:
            marks.append(False)
        if encoded.is_answer:
            encoded.is_answer[-1] = True


def encode_rendered(rendered: Rendered, processor: Any) -> Encoded:
    """Tokenizes a rendered sample with the (fast) tokenizer of `processor`."""
    return TextEncoder.of(processor).encode(rendered)


def check_targets(encoded: Encoded, *, name: str) -> None:
    """Refuses a sample without a token to learn.

    Raises:
        DataError: names the sample.
    """
    if encoded.num_targets == 0:
        raise DataError(
            f"{name}: none of its {len(encoded)} tokens is supervised. At least one was expected, "
            "because a sample without one teaches nothing: its answer is empty, or the template "
            "holds no [ANSWER]. Correct the row or the `prompt`."
        )


def _with_gaps(ids: list[int], offsets: Offsets) -> tuple[list[int], numpy.ndarray, numpy.ndarray]:
    """Gives characters that no token covers (spaces that offsets leave out) to the next token."""
    spans = numpy.array(offsets, dtype=numpy.int64).reshape(len(offsets), 2)
    starts, ends = spans[:, 0], spans[:, 1]
    reached = numpy.maximum.accumulate(ends)
    before = numpy.concatenate((_ZERO, reached[:-1])) if len(ids) else reached
    return ids, numpy.minimum(starts, before), numpy.maximum(starts, ends)


def _reserved_tokens(processor: Any) -> dict[str, int]:
    """Text -> id of every token that text from the data must not become."""
    tokenizer = get_tokenizer(processor)
    texts = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts.update(str(token) for token in tokenizer.all_special_tokens)
    if processor is not tokenizer:
        # image_token, video_token, start_image_token, fake_image_token ...
        texts.update(
            value
            for name, value in vars(processor).items()
            if name.endswith("_token") and isinstance(value, str)
        )
    texts.update(structural_tokens(processor))
    vocabulary = tokenizer.get_vocab()
    return {text: vocabulary[text] for text in sorted(texts) if text and text in vocabulary}


def _first_tokens(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def _is_plain_class(kind: type) -> bool:
    """Whether a class leaves encoding to the library's; one of a model's own code may do more."""
    names = ("__call__", "_encode_plus", "backend_tokenizer")
    return issubclass(kind, PreTrainedTokenizerFast) and all(
        getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in names
    )
