"""Rendered text -> token ids, with labels by character offsets. Knows neither images nor batches.

The ids are those that the library makes of the whole text. A token that shares a character with a
target piece is supervised, so at a border it is the answer's: where " 7" is one token and "7" the
answer, " 7" is learnt. Only where text from the data turned into a special token, the text is
tokenized run by run: special tokens of the template by their id, and what lies between them with
a copy of the tokenizer that does not know them.

Most tokenizers read what lies between two special tokens by itself. With them, what the template
writes is tokenized once and kept, and a row costs only its own text.
"""

import json
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from transformers import PreTrainedTokenizerFast

from stageline.data.text.processor import get_tokenizer
from stageline.data.text.rendered import Piece, Rendered
from stageline.data.text.tokenizers import PlainTokenizer, any_of
from stageline.errors import DataError, UserError

_USER, _FIXED, _TARGET, _MARKED, _ANSWER, _IMAGE = (1 << place for place in range(6))
_ALL = numpy.arange(1 << 6)  # the kinds, to be looked up below
_HAS_TARGET, _HAS_MARK, _HAS_ANSWER, _HAS_IMAGE = (
    _ALL & bit != 0 for bit in (_TARGET, _MARKED, _ANSWER, _IMAGE)
)
_IS_TEXT = _ALL & (_USER | _FIXED) == _USER
_IS_CUTTABLE = _ALL & (_USER | _FIXED | _TARGET) == _USER
_CONTENTS = ("q", "a", "q")
_ZERO = numpy.zeros(1, dtype=numpy.int64)
# steps of a tokenizer that treat a text alike wherever it stands
_ANYWHERE_ALIKE = ("ByteLevel", "Split", "Digits", "NFC", "NFKC", "NFD", "NFKD")
_MOST_KEPT = 1024  # of each kind of what templates write
Offsets = Sequence[tuple[int, int]]
Run = tuple[tuple[str, int], ...]  # text between special tokens: (text, kind) of its pieces
Kinds = numpy.ndarray  # of each token: the bits of the pieces that it touches


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


def token_kinds(
    spans: Sequence[tuple[int, int, Piece]], starts: numpy.ndarray, ends: numpy.ndarray
) -> Kinds:
    """Which kinds of pieces each token of a text touches; all tokens at once.

    A token across a border touches the pieces on both sides, one of no characters none.

    Args:
        spans: (start, end, piece), one behind the other.
        starts, ends: of each token, in characters.
    """
    full = [span for span in spans if span[0] < span[1]]
    kinds = [_kind(piece) for _, _, piece in full]
    span_ends = numpy.array([end for _, end, _ in full], dtype=numpy.int64)
    first = span_ends.searchsorted(starts, side="right")
    last = span_ends.searchsorted(ends, side="left")
    # behind the last piece, and for tokens of no characters, there is nothing
    touched = numpy.array([*kinds, 0], dtype=numpy.uint8)[first]
    for place in (last > first).nonzero()[0]:  # few: tokens across a border
        for kind in kinds[first[place] + 1 : last[place] + 1]:
            touched[place] |= kind
    touched[ends <= starts] = 0
    return touched


def _kind(piece: Piece) -> int:
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

    @classmethod
    def of(cls, ids: list[int], kinds: Kinds, rendered: Rendered) -> "Encoded":
        """The tokens of a text, each with the kinds of pieces that it touches."""
        has_answers = any(piece.is_answer for piece in rendered.pieces)
        has_images = any(piece.is_image for piece in rendered.pieces)
        return cls(
            ids,
            is_target=_HAS_TARGET[kinds].tolist(),
            is_cuttable=_IS_CUTTABLE[kinds].tolist(),
            is_marked=_HAS_MARK[kinds].tolist(),
            is_text=_IS_TEXT[kinds].tolist(),
            is_answer=_HAS_ANSWER[kinds].tolist() if has_answers else [],
            is_image=_HAS_IMAGE[kinds].tolist() if has_images else [],
        )

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
        self._has_runs = self._is_direct and _reads_runs_alone(self.tokenizer, self.reserved)
        self._parts: dict[str, list[str]] = {}
        self._fixed_runs: dict[Run, tuple[list[int], list[int]]] = {}
        self._compared: set[tuple[str, ...]] = set()
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
        ids, kinds = self._by_known_runs(rendered) or self._whole(rendered)
        encoded = Encoded.of(ids, kinds, rendered)
        if not rendered.is_chat:
            self._add_outer(encoded, for_generation=rendered.for_generation)
        return encoded

    def _whole(self, rendered: Rendered) -> tuple[list[int], Kinds]:
        """Ids and kinds of a text that is tokenized as one, as the library does it."""
        spans = list(rendered.spans())
        ids, starts, ends = _with_gaps(*self.tokenize(rendered.text))
        kinds = token_kinds(spans, starts, ends)
        if self._has_reserved_user_token(ids, starts, ends, kinds, rendered.text):
            ids, starts, ends = _with_gaps(*self._tokenize_by_runs(spans))
            kinds = token_kinds(spans, starts, ends)
        return ids, kinds

    def _by_known_runs(self, rendered: Rendered) -> tuple[list[int], Kinds] | None:
        """The same run by run; None where this tokenizer or text does not allow it."""
        if not (self._has_runs and self._is_as_loaded()):
            return None
        ids: list[int] = []
        kinds: list[int] = []
        for run in self._runs(rendered):
            found = self._fixed_runs.get(run) or self._encode_run(run)
            if found is None:
                return None
            ids += found[0]
            kinds += found[1]
        template = tuple(piece.text for piece in rendered.pieces if not piece.is_user)
        if template in self._compared:
            return ids, numpy.array(kinds, dtype=numpy.uint8)
        whole = self._whole(rendered)  # once for all that the same template wrote
        self._has_runs = whole[0] == ids and whole[1].tolist() == kinds
        if len(self._compared) < _MOST_KEPT:
            self._compared.add(template)
        return whole

    def _runs(self, rendered: Rendered) -> Iterator[Run]:
        """The text cut at the special tokens of the template; each is a run of its own."""
        run: list[tuple[str, int]] = []
        for piece in rendered.pieces:
            kind = _kind(piece)
            if piece.is_user:
                run.append((piece.text, kind))
                continue
            parts = self._parts.get(piece.text)
            if parts is None:
                parts = re.split(f"({any_of(self.reserved).pattern})", piece.text)
                if len(self._parts) < _MOST_KEPT:
                    self._parts[piece.text] = parts
            for place, part in enumerate(parts):
                if place % 2 == 0:
                    run.append((part, kind))
                    continue
                yield tuple(run)
                yield ((part, kind),)
                run = []
        yield tuple(run)

    def _encode_run(self, run: Run) -> tuple[list[int], list[int]] | None:
        """Ids and kinds; None where text from the data became a special token."""
        is_fixed = not any(kind & _USER for _, kind in run)
        text = "".join(own for own, _ in run)
        if is_fixed and text in self.reserved:
            ids, kinds = [self.reserved[text]], [run[0][1]]
        else:
            encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            ids, kinds = encoding.ids, _kinds_of_run(run, encoding)
            if not self.reserved_ids.isdisjoint(ids):
                return None
        if is_fixed and len(self._fixed_runs) < _MOST_KEPT:
            self._fixed_runs[run] = ids, kinds
        return ids, kinds

    def _is_as_loaded(self) -> bool:
        """No call before has left a padding, a truncation or another reading of special tokens."""
        backend = self.tokenizer.backend_tokenizer
        return (
            backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == self.tokenizer.split_special_tokens
        )

    def tokenize(self, text: str) -> tuple[list[int], Offsets]:
        """Ids of a text, as the library makes them, and the characters that each covers."""
        if self._is_direct and self._is_as_loaded():
            # what the library does in the end, without what it does before and after
            backend = self.tokenizer.backend_tokenizer
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
        kinds: Kinds,
        text: str,
    ) -> bool:
        unk_id, unk_text = self.tokenizer.unk_token_id, self.tokenizer.unk_token
        return any(
            # an unknown word is plain text; the string "<unk>" is not
            token_id != unk_id or unk_text in text[starts[place] : ends[place]]
            for place, token_id in enumerate(ids)
            if token_id in self.reserved_ids and kinds[place] & _USER
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


def _kinds_of_run(run: Run, encoding: Any) -> list[int]:
    """As `token_kinds`, of a tokenizer each of whose tokens has characters, in their order."""
    num_tokens = len(encoding)
    if len(run) == 1:
        return [run[0][1]] * num_tokens
    num_characters = sum(len(text) for text, _ in run)
    kinds = [0] * num_tokens
    first = end = 0
    for text, kind in run:
        if not text:
            continue
        end += len(text)
        behind = (encoding.char_to_token(place) for place in range(end, num_characters))
        last = next((token for token in behind if token is not None), num_tokens)
        for place in range(first, last):
            kinds[place] |= kind
        # characters that no token covers are the next one's
        reached = encoding.token_to_chars(last - 1)[1] if last else 0
        if last < num_tokens and reached < end:
            kinds[last] |= kind
        first = place = last
        while place < num_tokens and encoding.token_to_chars(place)[0] < end:
            kinds[place] |= kind
            place += 1
    return kinds


def _reads_runs_alone(tokenizer: Any, reserved: Mapping[str, int]) -> bool:
    """Text between reserved tokens gets the same tokens as in the whole, each of some characters.

    So it is with tokenizers of bytes, but for tokens that take spaces beside them.
    """
    backend = tokenizer.backend_tokenizer
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
    has_bytes = any(step["type"] == "ByteLevel" for step in steps)
    is_plain = all(
        step["type"] in _ANYWHERE_ALIKE and not step.get("add_prefix_space") for step in steps
    )
    return (
        bool(reserved)
        and has_bytes
        and is_plain
        and all(
            (token := added.get(text)) is not None
            and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
            for text in reserved
        )
    )


def _steps(component: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer or a pre-tokenizer, or of those that it is made of."""
    state = json.loads(component.__getstate__()) if component is not None else {}
    known = state.get("pretokenizers", state.get("normalizers"))
    return known if known is not None else [state] if state else []


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
