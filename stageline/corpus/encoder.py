"""Texts to token ids and back, exactly as the tokenizer of a folder does it, without BOS and EOS.

The text of a control token ("<|im_end|>" in a manual page) stays text: it gets the ids of its
characters, as with `split_special_tokens=True` in transformers. Where tiktoken gives the same ids
it is used (`FastEncoder`), else the `tokenizers` library; `Encoder.kind` and `.note` say which.
"""

import json
import random
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.corpus.header import TokenizerInfo
from stageline.corpus.tokenizer_rules import (
    FastRules,
    NotFast,
    drops_first_space,
    fast_rules,
    fingerprint,
    is_byte_level,
    make_backend,
    normalizers,
    plain_backend,
    token_bytes,
    vocab_size,
)
from stageline.errors import DataError, UserError
from stageline.hub import title_of


def of_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> numpy.ndarray:
    """Byte ends (int64) of tokens whose (start, end) are characters; rising, the last at the end.

    Several tokens of one character (bytes of a rare one) all name its end: only the last of them
    gets it, those before get the bytes before it.
    """
    if not offsets:
        return numpy.zeros(0, dtype=numpy.int64)
    ends = numpy.array([end for _, end in offsets], dtype=numpy.int64)
    ends = numpy.maximum.accumulate(ends)
    ends[-1] = len(text)  # what a tokenizer drops at the end belongs to the last token
    byte_ends = char_bytes(text)[ends]
    later = numpy.arange(len(ends))
    last = numpy.searchsorted(ends, ends, side="right") - 1
    return numpy.maximum(byte_ends - (last - later), 0)


def char_bytes(text: str) -> numpy.ndarray:
    """Bytes of the text before each character, and at the end its whole length (int64 [n + 1])."""
    if text.isascii():
        return numpy.arange(len(text) + 1, dtype=numpy.int64)
    code = numpy.frombuffer(text.encode("utf-32-le"), dtype=numpy.uint32)
    sizes = 1 + (code >= 0x80).astype(numpy.int64) + (code >= 0x800) + (code >= 0x10000)
    return numpy.concatenate([numpy.zeros(1, dtype=numpy.int64), numpy.cumsum(sizes)])


_TEXTS = (
    "Plain words, then a full stop. Another sentence; it isn't long!",
    "I'm, you're, he's, we'd, they'll, I've, can't; I'M, YOU'RE, HE'S, WE'D, THEY'LL, I'VE, CAN'T",
    "'s's 's x's'll ''' 'ſ 'S ’s ’ll it ’ s",
    "  two spaces   three    four \t tab\t\ttabs \n newline\n\n\n\r\nCRLF\r\n\r\n\rCR alone \r",
    " ",
    "   ",
    "\n",
    "\n\n\n   \n\t \n",
    "ends in spaces   ",
    "ends in newlines\n\n",
    "0 12 123 1234 12345 123456 1234567 3.14159 1,000,000 1e-9 0x7F v2.0.1 a1b2c3   5  7 \n8\n\n9",
    "½ ² ٣ ४५ Ⅷ ⑨ 一二三 １２３ x² y₃  ½\n²",
    "def f(x):\n    if x == 1:\n\t\treturn {'a': [1, 2], \"b\": None}  # why?\n\n\n",
    "/usr/share/doc/a-b_c.d+e --long-option=VALUE -x <file> || && >> 2>&1 $HOME ${x%%.*} #!/bin/sh",
    "<|endoftext|> <|im_start|>user\nhi<|im_end|> <s></s> <pad> [INST] [/INST] <unk> <|eot_id|>",
    "CamelCase camelCase HTTPServer ALLCAPS iPhone McDonald's o'clock rock'n'roll",
    "中文没有空格。下一句！“引号”？！……《书名》，、；：（括号）ＡＢＣ　全角空格",
    "ひらがなカタカナ漢字 한국어 문장입니다. ไทยไม่มีช่องว่าง हिन्दी में संयुक्ताक्षर العربية עברית",
    "é e\u0301 ñ n\u0303 Å ÅÅ ﬁ ﬀ ㎢ ﷺ ǆ ß ẞ İ ı Ωmega µ",
    "😀👍🏽👨‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪🇨🇳 a😀b 😀 😀  😀",
    "\u200b\u200d\ufeff\u00a0\u2003\u3000\u2028\u2029\x85\x0b\x0c\x1c\x1f\u00ad\u180e\u2060",
    "a\u00a0b \u00a0 c\u2003 d \u3000e\x0b\x0cf\x85\x85 g\x1c\x1dh",
    "\x00 nul \x00\x00 \x01\x02\x03\x04\x05\x06\x07\x08\x0e\x0f\x10\x13\x14\x16\x1b\x7f end",
    "\u0378 \ufffe \uffff \U0001f9ff \U000e0001 \U0010ffff \ue000 \U00040000 \U000f0000",
    "a" * 3000 + " " + "=" * 500 + "\n" + "-" * 500 + " " * 700 + "x" + "\n" * 700 + "的" * 700,
    "aGVsbG8gd29ybGQ" * 60 + " https://www.example.org/a/b?c=d&e=f#g me@example.org",
)
_NUM_MIXED = 150
_PIECES = (*" \n\t'7aBé中😀-", "  ", "'s", "42", "...", "\r\n")


def check_texts(tokens: Sequence[bytes] | None, *, num_single: int = 2000) -> list[str]:
    """The texts: fixed ones, mixtures of tokens and odd characters, and single tokens.

    Args:
        tokens: bytes of each id of a byte-level tokenizer.
        num_single: so many tokens, spread over the ids, also come alone.
    """
    words = []
    for token in tokens or ():
        try:
            words.append(token.decode())
        except UnicodeDecodeError:
            continue
    words = words or ["a"]
    chance = random.Random(0)
    mixed = [
        "".join(
            chance.choice(words) if chance.random() < 0.7 else chance.choice(_PIECES)
            for _ in range(60)
        )
        for _ in range(_NUM_MIXED)
    ]
    step = max(1, len(words) // num_single)
    return [*_TEXTS, *mixed, *words[::step]]


# The same ids by tiktoken, some six times faster, for tokenizers that `fast_rules` has rules for.
# Many documents go through one call, with a separator between them: for short ones that is twice as
# fast as a call each. What tiktoken would get wrong, or die of, is handed back unencoded.

# a document that holds it goes alone
SEPARATOR = "\x00<stageline: a document ends here 6f1c2a9de0b74485>\x00"
_GROUP_CHARS = 200_000
# a run of white space of about 900,000 characters overflows the stack of tiktoken's expressions
_LONG_BLANK = 32_768


class FastEncoder:
    """Encodes by tiktoken what it can encode exactly; says of the other texts that it cannot."""

    def __init__(self, rules: FastRules, lengths: numpy.ndarray) -> None:
        """Takes the rules, and the number of bytes of each id."""
        import tiktoken

        self.rules = rules
        self._beyond = len(lengths)  # ids of bytes that the tokenizer does not have begin here
        self._mark = self._beyond + 256
        self._lengths = numpy.zeros(self._mark + 1, dtype=numpy.int32)
        self._lengths[: len(lengths)] = lengths
        self._lengths[self._mark] = len(SEPARATOR)
        try:
            self._encoding = tiktoken.Encoding(
                "corpus",
                pat_str=rules.pattern,
                mergeable_ranks=rules.ranks,
                special_tokens={**rules.whole, SEPARATOR: self._mark},
            )
        except ValueError as error:
            raise NotFast(f"tiktoken does not take its expression: {error}") from error
        self._whole = set(rules.whole)
        self._allowed = {*self._whole, SEPARATOR}

    def encode(self, texts: Sequence[str]) -> list[numpy.ndarray | None]:
        """Ids of each text; None for one that has to go another way.

        Raises:
            UnicodeEncodeError: a text holds half a surrogate pair.
        """
        out: list[numpy.ndarray | None] = []
        for first, behind in _groups([len(text) for text in texts]):
            out += self._encode_group(texts[first:behind])
        return out

    def _encode_group(self, texts: Sequence[str]) -> list[numpy.ndarray | None]:
        """Encodes texts by one call, or each alone where that does not work out."""
        joined = SEPARATOR.join(texts)
        ids = self._call(joined, self._allowed) if self._takes(joined) else None
        if ids is not None:
            marks = numpy.flatnonzero(ids >= self._beyond)
            if len(marks) == len(texts) - 1 and self._is_whole(joined, ids):
                starts, ends = [0, *(marks + 1).tolist()], [*marks.tolist(), len(ids)]
                return [ids[start:end] for start, end in zip(starts, ends, strict=True)]
        return [self._encode_one(text) for text in texts]

    def _encode_one(self, text: str) -> numpy.ndarray | None:
        ids = self._call(text, self._whole) if self._takes(text) else None
        if ids is None or (ids >= self._beyond).any() or not self._is_whole(text, ids):
            return None
        return ids

    def _takes(self, text: str) -> bool:
        if len(text) > _LONG_BLANK and _has_long_blank(text):
            return False
        is_any_form = text.isascii() or not self.rules.needs_nfc
        return is_any_form or unicodedata.is_normalized("NFC", text)

    def _is_whole(self, text: str, ids: numpy.ndarray) -> bool:
        """Whether the tokens are as long as the text: the expression left nothing out."""
        num_bytes = len(text) if text.isascii() else len(text.encode())
        return int(self._lengths[ids].sum(dtype=numpy.int64)) == num_bytes

    def _call(self, text: str, allowed: set[str]) -> numpy.ndarray | None:
        try:
            return self._encoding.encode_to_numpy(
                text, allowed_special=allowed, disallowed_special=()
            )
        except BaseException as error:
            # a panic of tiktoken is no Exception, and its class cannot be imported
            if type(error).__name__ != "PanicException":
                raise
            return None


def _groups(num_chars: list[int]) -> list[tuple[int, int]]:
    """Neighbours that go through one call: (first, behind) of each group."""
    groups, first, total = [], 0, 0
    for place, num in enumerate(num_chars):
        total += num
        if total >= _GROUP_CHARS:
            groups.append((first, place + 1))
            first, total = place + 1, 0
    if first < len(num_chars):
        groups.append((first, len(num_chars)))
    return groups


def _has_long_blank(text: str) -> bool:
    """Whether white space fills a whole block of the text, as any run of two blocks does."""
    return any(
        text[start].isspace() and text[start : start + _LONG_BLANK].isspace()
        for start in range(0, len(text) - _LONG_BLANK + 1, _LONG_BLANK)
    )


Kind = Literal["auto", "tiktoken", "tokenizers"]


def load_encoder(tokenizer_path: str | Path, *, kind: Kind = "auto") -> "Encoder":
    """The encoder of a tokenizer's folder.

    Args:
        kind: `tiktoken`: an error where it would not be exact; `tokenizers`: never tiktoken;
            `auto`: tiktoken where it is exact.

    Raises:
        UserError: no such tokenizer, or one without a `tokenizers` backend.
    """
    from stageline.model_folder import check_folder, find_folder  # slow to import

    path = find_folder(tokenizer_path, option="`tokenizer_path`")
    check_folder(path, trust_remote_code=False)
    tokenizer = _load_tokenizer(path)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(
            f"The tokenizer in {path} is a {type(tokenizer).__name__} without a tokenizer.json; "
            "a corpus is built with the tokenizers library only, for it is exact and quick: "
            "save it once as a fast tokenizer (tokenizer.json) and give that folder."
        )
    text = tokenizer.backend_tokenizer.to_str()
    spec = json.loads(text)
    info = TokenizerInfo(
        name=title_of(path.resolve()),
        fingerprint=fingerprint(spec),
        vocab_size=vocab_size(spec),
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        folder=str(path.resolve()),
    )
    encoder = Encoder(text, info=info, spec=spec)
    if kind != "tokenizers":
        encoder.try_fast()
        encoder.check(check_texts(encoder.token_bytes))
    if kind == "tiktoken" and encoder.kind != kind:
        raise UserError(
            f"The tokenizer in {path} cannot be run by tiktoken exactly: {encoder.note}. "
            "Leave the choice to 'auto', or say 'tokenizers'."
        )
    return encoder


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 of what decides which ids a text gets: not of control tokens, padding or a template.

    Args:
        tokenizer: of transformers, with a `tokenizers` backend.
    """
    return fingerprint(json.loads(tokenizer.backend_tokenizer.to_str()))


def why_bad(text: str) -> str | None:
    """Why a text cannot be encoded: it holds half a surrogate pair; None for all other texts."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"character {error.start} is U+{ord(text[error.start]):04X}, half of a surrogate pair, "
            "which is no character"
        )
    return None


class Encoder:
    """Texts to ids and back. Can be pickled, and is ready again without transformers.

    Attributes:
        info: what a corpus remembers of the tokenizer.
        kind: `tiktoken` or `tokenizers`: what really encodes.
        note: one line, why not tiktoken; empty where it is used or was not wanted.
        token_bytes: bytes of each id; None if a token does not stand for the same bytes always.
    """

    def __init__(
        self, tokenizer_json: str, *, info: TokenizerInfo, spec: dict[str, Any] | None = None
    ) -> None:
        """Takes the text of a tokenizer.json; `load_encoder` is the usual way.

        Args:
            spec: what the text says, where it was read already.
        """
        self.info = info
        self.kind: Literal["tiktoken", "tokenizers"] = "tokenizers"
        self.note = ""
        self._json = tokenizer_json
        spec = self._spec = json.loads(tokenizer_json) if spec is None else spec
        self._normalizers = set(normalizers(spec))
        self._fast: FastEncoder | None = None
        self.token_bytes = token_bytes(spec)
        self._is_byte_level = is_byte_level(spec)
        self._drops_first_space = not self._is_byte_level and drops_first_space(spec)
        self._lengths = numpy.array([len(part) for part in self.token_bytes or []], numpy.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._json, self.info, self.kind, self.note)

    def encode(self, texts: Sequence[str]) -> list[numpy.ndarray]:
        """The ids (uint32) of each text, without special tokens.

        Raises:
            DataError: a text for which `why_bad` has an answer.
        """
        return self.encode_and_doubt(texts)[0]

    def encode_and_doubt(self, texts: Sequence[str]) -> tuple[list[numpy.ndarray], list[int]]:
        """As `encode`, and which texts may not come back from their ids by `decode`.

        Of the others it is known: their tokens are as long as they are.
        """
        try:
            found = self._fast.encode(texts) if self._fast else [None] * len(texts)
        except UnicodeEncodeError:
            raise _bad_text(texts) from None
        left = [place for place, ids in enumerate(found) if ids is None]
        slow = dict(zip(left, self._slow([texts[place] for place in left]), strict=True))
        return [slow[place] if ids is None else ids for place, ids in enumerate(found)], left

    def byte_ends(self, text: str, ids: numpy.ndarray) -> numpy.ndarray:
        """Where each token of `encode([text])` ends, in bytes of the text as UTF-8 (int64).

        A token that ends inside a character ends inside its bytes.
        """
        if self.token_bytes is not None and self._is_bytes_of(text, ids):
            ends = numpy.cumsum(self._lengths[ids])
            # a space that encoding has put before the text counts nothing
            return ends - (int(ends[-1]) - _num_bytes(text)) if len(ends) else ends
        encoding = self._backend.encode(text, add_special_tokens=False)
        assert len(encoding.ids) == len(ids), "ids of another text"
        return of_offsets(text, encoding.offsets)

    def decode(self, ids: Sequence[int] | numpy.ndarray) -> str:
        """The text of a whole document's ids (without BOS and EOS), or of a piece of it.

        Bytes of half a character, at the ends of a piece, become U+FFFD.
        """
        if self.token_bytes is not None:
            return self._decode_bytes(ids).decode(errors="replace")
        return self._decoder.decode([int(index) for index in ids], skip_special_tokens=False)

    def try_fast(self) -> None:
        """Takes tiktoken if there are rules for it; unchecked."""
        try:
            self._fast = FastEncoder(fast_rules(self._spec), self._lengths)
            self.kind = "tiktoken"
        except NotFast as error:
            self._fall_back(str(error))

    def check(self, texts: Sequence[str]) -> bool:
        """Compares with the tokenizers library, on real documents say; falls back if ids differ.

        Returns:
            Whether the encoder is what it was before; else `.kind` and `.note` have changed, and
            what was encoded before must be encoded again.
        """
        if self._fast is None:
            return True
        texts = [text for text in texts if why_bad(text) is None]
        pairs = zip(texts, self._fast.encode(texts), self._slow(texts), strict=True)
        for text, fast, slow in pairs:
            if fast is not None and not numpy.array_equal(fast, slow):
                self._fall_back(f"it gives other ids on the text {text[:60]!r}")
                return False
        return True

    def _fall_back(self, reason: str) -> None:
        self._fast = None
        self.kind = "tokenizers"
        self.note = reason

    @cached_property
    def _backend(self) -> Any:
        """The tokenizers library's; not made where tiktoken takes everything."""
        return plain_backend(self._spec)

    @cached_property
    def _decoder(self) -> Any:
        return make_backend(self._spec)

    def _slow(self, texts: list[str]) -> list[numpy.ndarray]:
        if not texts:
            return []
        try:
            found = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # what the library says to half a surrogate pair
            raise _bad_text(texts) from None
        return [numpy.array(encoding.ids, dtype=numpy.uint32) for encoding in found]

    def _decode_bytes(self, ids: Sequence[int] | numpy.ndarray) -> bytes:
        assert self.token_bytes is not None  # the callers looked
        data = b"".join([self.token_bytes[index] for index in ids])
        return data.removeprefix(b" ") if self._drops_first_space else data

    def _is_bytes_of(self, text: str, ids: numpy.ndarray) -> bool:
        """Whether the bytes of the tokens, one behind the other, are the text."""
        if self._is_byte_level and self._normalizers <= {"NFC"}:
            is_normal = not self._normalizers or text.isascii()
            if is_normal or unicodedata.is_normalized("NFC", text):
                return int(self._lengths[ids].sum()) == _num_bytes(text)
        return self._decode_bytes(ids) == text.encode()


def _again(
    tokenizer_json: str, info: TokenizerInfo, kind: Literal["tiktoken", "tokenizers"], note: str
) -> Encoder:
    """An encoder out of a pickle: what it uses was decided, and checked, before."""
    encoder = Encoder(tokenizer_json, info=info)
    if kind == "tiktoken":
        encoder.try_fast()
        if encoder.kind != kind:
            raise UserError(f"tiktoken runs on one machine and not on another: {encoder.note}.")
    encoder.note = note
    return encoder


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _bad_text(texts: Sequence[str]) -> DataError:
    place, reason = next(
        (place, reason) for place, text in enumerate(texts) if (reason := why_bad(text))
    )
    return DataError(
        f"Text {place} of {len(texts)} cannot be encoded: {reason}; it begins with "
        f"{texts[place][:40]!r}. Repair the file, or let bad documents be skipped."
    )


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        reason = (str(error) or "no reason given").splitlines()[0]
        raise UserError(
            f"{path} holds no tokenizer that transformers can load ({type(error).__name__}: "
            f"{reason}). Name a folder with tokenizer.json and tokenizer_config.json."
        ) from error
