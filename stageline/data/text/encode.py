"""Rendered text -> token ids, with labels by character offsets. Knows neither images nor batches.

A token that shares a character with a target piece is supervised: where " 7" is one token and "7"
the answer, " 7" is. Only where text from the data turned into a special token, the text is
tokenized run by run: special tokens of the template by their id, and the rest with a copy of the
tokenizer that does not know them. The bytes of tokens show which characters a token covers, where
they are those of the text: offsets would take a quarter of a tokenizer's time.
"""

import itertools
import os
import warnings
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from tokenizers.decoders import ByteLevel

from stageline.data.text.processor import get_tokenizer
from stageline.data.text.rendered import Piece, Rendered
from stageline.data.text.tokenizers import PlainTokenizer
from stageline.errors import DataError, UserError

_USER, _FIXED, _TARGET, _MARKED, _ANSWER, _IMAGE = (1 << place for place in range(6))
Offsets = Sequence[tuple[int, int]]
Kinds = numpy.ndarray  # each token's bits of the pieces that it touches


def structural_tokens(processor: Any) -> set[str]:
    """Return added tokens that the chat template writes around the turns of a plain conversation.

    Some tokenizers add "<|user|>" as an ordinary token, which would begin a turn in text from the
    data. `<think>` and tool tags stay ordinary, so no answer is last: templates write them there.
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
    for content in ("q", [{"type": "text", "text": "q"}]):
        messages = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
        try:
            written = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False
            )
        except Exception:  # a template raises anything, which chat.py reports
            continue
        return {token for token in added if token in written}
    return set()


def token_kinds(
    spans: Sequence[tuple[int, int, Piece]], starts: numpy.ndarray, ends: numpy.ndarray
) -> Kinds:
    """Return which kinds of pieces each token (from `starts` to `ends`) of a text touches.

    A token across a border touches the pieces on both sides, one of no characters none. `spans` are
    (start, end, piece), one behind the other.
    """
    full = [span for span in spans if span[0] < span[1]]
    kinds = [_kind(piece) for _, _, piece in full]
    span_ends = numpy.array([end for _, end, _ in full], dtype=numpy.int64)
    first = span_ends.searchsorted(starts, side="right")
    last = span_ends.searchsorted(ends, side="left")
    # behind the last piece, and for tokens of no characters, there is nothing
    touched = numpy.array([*kinds, 0], dtype=numpy.uint8)[first]
    for place in (last > first).nonzero()[0]:  # few tokens cross a border
        for kind in kinds[first[place] + 1 : last[place] + 1]:
            touched[place] |= kind
    touched[ends <= starts] = 0
    return touched


def _kind(piece: Piece) -> int:
    is_answer = piece.is_target or piece.is_answer
    own = (piece.is_user, not piece.is_user, piece.is_target, piece.is_marked, is_answer)
    return sum(flag << place for place, flag in enumerate((*own, piece.is_image)))


@dataclass(frozen=True)
class Encoded:
    """Token ids of one sample and what they are; all lists have one entry a token."""

    input_ids: list[int]
    is_target: list[bool]  # supervised
    is_cuttable: list[bool]  # from the data and in the prompt, which `cut_prompt` cuts
    is_marked: list[bool] = field(default_factory=list)  # in a marked piece; empty = none
    is_text: list[bool] = field(default_factory=list)  # from the data only; empty: not known
    is_answer: list[bool] = field(default_factory=list)  # in an answer; empty = as `is_target`
    is_image: list[bool] = field(default_factory=list)  # in an image; empty = no image

    @classmethod
    def of(cls, ids: list[int], kinds: Kinds, rendered: Rendered) -> "Encoded":
        """Return the tokens of a text, each with the kinds of pieces that it touches."""
        has_answers = any(piece.is_answer for piece in rendered.pieces)
        has_images = any(piece.is_image for piece in rendered.pieces)
        return cls(
            ids,
            is_target=(kinds & _TARGET != 0).tolist(),
            is_cuttable=(kinds & (_USER | _FIXED | _TARGET) == _USER).tolist(),
            is_marked=(kinds & _MARKED != 0).tolist(),
            is_text=(kinds & (_USER | _FIXED) == _USER).tolist(),
            is_answer=(kinds & _ANSWER != 0).tolist() if has_answers else [],
            is_image=(kinds & _IMAGE != 0).tolist() if has_images else [],
        )

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Supervised tokens, but for the first token, which is never predicted."""
        return sum(self.is_target[1:])

    @property
    def marks(self) -> list[list[bool]]:
        """The lists of marks, without those that are empty."""
        lists = (self.is_target, self.is_cuttable, self.is_marked)
        return [marks for marks in (*lists, self.is_text, self.is_answer, self.is_image) if marks]

    def keep(self, chosen: list[int]) -> "Encoded":
        """Return the tokens at the given places."""
        kept = {name: values and [values[i] for i in chosen] for name, values in vars(self).items()}
        return Encoded(**kept)


def _token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Return id -> bytes of each token of a byte-level tokenizer."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table: defaultdict[int, int] = defaultdict(lambda: 0xFF)  # a byte that no UTF-8 text has
    table.update({ord(letter): byte for byte, letter in bytes_to_unicode().items()})
    vocabulary = tokenizer.get_vocab().items()
    found = {token_id: text.translate(table).encode("latin-1") for text, token_id in vocabulary}
    added = tokenizer.added_tokens_decoder.items()
    return found | {token_id: str(token).encode() for token_id, token in added}


NO_END = (
    "the tokenizer has no end-of-sequence token, so answers are learnt without an end and the "
    "model won't learn to stop: name one as eos_token in its tokenizer_config.json"
)


class TextEncoder:
    """Encodes with one fast tokenizer; use `TextEncoder.of`, which keeps one for each.

    Reserved are the tokens that the tokenizer marks as special, those that its processor has for
    images, and those that its chat template writes around turns. Other added tokens (`<think>`,
    runs of spaces) are ordinary text, and stay wherever they occur.
    """

    _known: "weakref.WeakKeyDictionary[Any, tuple[int, TextEncoder]]"
    _known = weakref.WeakKeyDictionary()

    def __init__(self, processor: Any) -> None:
        self.tokenizer = get_tokenizer(processor)
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                f"the tokenizer is a {type(self.tokenizer).__name__}, which gives no character "
                "offsets. Convert it into a fast one with AutoTokenizer, and save it again."
            )
        self.reserved = _reserved_tokens(processor)
        self.reserved_ids = frozenset(self.reserved.values())
        bare, full = (
            self.tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (False, True)
        )
        places = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        self.prefix = full[: next(places, 0)]  # the ids before a text
        from transformers import PreTrainedTokenizerFast

        # a class of a model's own code may do more than transformers'
        kind, base = type(self.tokenizer), PreTrainedTokenizerFast
        self._is_direct = issubclass(kind, base) and all(
            getattr(kind, name, None) is getattr(base, name, None)
            for name in ("__call__", "_encode_plus", "backend_tokenizer")
        )
        self._bytes: dict[int, bytes] | None = None
        if self._is_direct and isinstance(self.tokenizer.backend_tokenizer.decoder, ByteLevel):
            self._bytes = _token_bytes(self.tokenizer)
        # one text at a time: threads would only hand it on, and be missing in forked workers
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._plain: PlainTokenizer | None = None
        self._has_warned = False

    @classmethod
    def of(cls, processor: Any) -> "TextEncoder":
        """Return the encoder of this processor; a new one when tokens were added since."""
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
        """Tokenize a rendered sample.

        Text of a plain template gets the tokenizer's first tokens and, unless it is for
        generation, a supervised end-of-sequence token; a chat template holds its own.
        """
        ids, kinds = self._by_bytes(rendered) or self._whole(rendered)
        encoded = Encoded.of(ids, kinds, rendered)
        if not rendered.is_chat:
            self._add_outer(encoded, for_generation=rendered.for_generation)
        return encoded

    def _whole(self, rendered: Rendered) -> tuple[list[int], Kinds]:
        """Return ids and kinds of a text that is tokenized as one."""
        spans = list(rendered.spans())
        ids, starts, ends = _with_gaps(*self.tokenize(rendered.text))
        kinds = token_kinds(spans, starts, ends)
        unk_id, unk_text = self.tokenizer.unk_token_id, self.tokenizer.unk_token
        if any(
            # an unknown word is plain text; the string "<unk>" is not
            ids[place] != unk_id or unk_text in rendered.text[starts[place] : ends[place]]
            for place in self._reserved_in_data(ids, kinds)
        ):
            ids, starts, ends = _with_gaps(*self._tokenize_by_runs(spans))
            kinds = token_kinds(spans, starts, ends)
        return ids, kinds

    def _reserved_in_data(self, ids: list[int], kinds: Kinds) -> list[int]:
        """Return the places of reserved tokens that touch text from the data."""
        places = (kinds & _USER).nonzero()[0].tolist()
        return [place for place in places if ids[place] in self.reserved_ids]

    def _by_bytes(self, rendered: Rendered) -> tuple[list[int], Kinds] | None:
        """Return ids and kinds without offsets, from the bytes of each token.

        None where these are not the bytes of the text, as with a normalizer, and where text from
        the data became a special token.
        """
        if self._bytes is None or not self._is_as_loaded() or not rendered.pieces:
            return None
        # only the call for many texts can do without offsets
        backend = self.tokenizer.backend_tokenizer
        ids = backend.encode_batch_fast([rendered.text], add_special_tokens=False)[0].ids
        tokens = list(map(self._bytes.__getitem__, ids))
        if b"".join(tokens) != rendered.text.encode():
            return None
        widths = numpy.fromiter(map(len, tokens), numpy.int64, len(tokens))
        ends = widths.cumsum()
        lengths = [len(piece.text.encode()) for piece in rendered.pieces]
        borders = itertools.pairwise(itertools.accumulate(lengths, initial=0))
        spans = [(*border, piece) for border, piece in zip(borders, rendered.pieces, strict=True)]
        kinds = token_kinds(spans, ends - widths, ends)
        return None if self._reserved_in_data(ids, kinds) else (ids, kinds)

    def _is_as_loaded(self) -> bool:
        """Tell whether no call has left a padding, a truncation or other special tokens."""
        backend = self.tokenizer.backend_tokenizer
        return (
            backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == self.tokenizer.split_special_tokens
        )

    def tokenize(self, text: str) -> tuple[list[int], Offsets]:
        """Return the ids of a text, and the characters that each covers."""
        if self._is_direct and self._is_as_loaded():  # transformers ends in the same call
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

    def _tokenize_by_runs(self, spans: list[tuple[int, int, Piece]]) -> tuple[list[int], Offsets]:
        """Take special tokens from the template only; everything between is plain text."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        run = ""
        run_start = 0

        def finish_run() -> None:
            found = self.plain.encode(run, is_first=run_start == 0) if run else ()
            for token_id, start, end in found:
                ids.append(token_id)
                offsets.append((run_start + start, run_start + end))

        for start, _, piece in spans:
            for part in [piece.text] if piece.is_user else self.plain.split_reserved(piece.text):
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
        if for_generation or not any(is_target):
            return
        if eos_id is None:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(NO_END, stacklevel=2)
        elif ids[-1] == eos_id:  # the template ends with it
            is_target[-1] = True
        else:
            for marks in encoded.marks:
                marks.append(marks is is_target or marks is encoded.is_answer)
            ids.append(eos_id)


def encode_rendered(rendered: Rendered, processor: Any) -> Encoded:
    """Tokenize a rendered sample with the (fast) tokenizer of `processor`."""
    return TextEncoder.of(processor).encode(rendered)


def check_targets(encoded: Encoded, *, name: str) -> None:
    """Refuse a sample without a token to learn."""
    if encoded.num_targets == 0:
        raise DataError(
            f"{name}: none of its {len(encoded)} tokens is supervised. Fill its answer, or write "
            "[ANSWER] into the `prompt`."
        )


def _with_gaps(ids: list[int], offsets: Offsets) -> tuple[list[int], numpy.ndarray, numpy.ndarray]:
    """Give characters that no token covers (spaces that offsets leave out) to the next token."""
    spans = numpy.array(offsets, dtype=numpy.int64).reshape(len(offsets), 2)
    starts, ends = spans[:, 0], spans[:, 1]
    reached = numpy.maximum.accumulate(ends)
    before = numpy.concatenate(([0], reached[:-1])) if len(ids) else reached
    return ids, numpy.minimum(starts, before), numpy.maximum(starts, ends)


def _reserved_tokens(processor: Any) -> dict[str, int]:
    """Return text -> id of every token that text from the data must not become."""
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
