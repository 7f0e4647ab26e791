"""Texts to token ids and back, exactly as the tokenizer of a folder does it, without BOS and EOS.

The text of a control token ("<|im_end|>" in a manual page) stays text: it gets the ids of its
characters, as with `split_special_tokens=True` in transformers. Where tiktoken gives the same ids
it is used (`fast_encoder`), else the `tokenizers` library; `Encoder.kind` and `.note` say which.
"""

import json
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.corpus import byte_ends
from stageline.corpus.encoder_texts import check_texts
from stageline.corpus.fast_encoder import FastEncoder
from stageline.corpus.fast_rules import NotFast, fast_rules
from stageline.corpus.segments import TokenizerInfo
from stageline.corpus.tokenizer_json import (
    drops_first_space,
    fingerprint,
    is_byte_level,
    make_backend,
    normalizers,
    plain_backend,
    token_bytes,
    vocab_size,
)
from stageline.errors import DataError, UserError

Kind = Literal["auto", "tiktoken", "tokenizers"]


def load_encoder(tokenizer_path: str | Path, *, kind: Kind = "auto") -> "Encoder":
    """The encoder of a tokenizer's folder.

    Args:
        tokenizer_path: a folder that transformers' AutoTokenizer can load.
        kind: `tiktoken`: an error where it would not be exact; `tokenizers`: never tiktoken;
            `auto`: tiktoken where it is exact.

    Raises:
        UserError: no such tokenizer, or one without a `tokenizers` backend.
    """
    from stageline.model_folder import check_folder, find_folder  # slow to import

    path = find_folder(tokenizer_path, option="--tokenizer-path")
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
        name=path.resolve().name,
        fingerprint=fingerprint(spec),
        vocab_size=vocab_size(spec),
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
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
        for place, ids in zip(left, self._slow([texts[place] for place in left]), strict=True):
            found[place] = ids
        return found, left

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
        return byte_ends.of_offsets(text, encoding.offsets)

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
