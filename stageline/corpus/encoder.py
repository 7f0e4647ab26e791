"""Texts to token ids and back, exactly as the tokenizer of a folder does it, without BOS and EOS.

The text of a control token ("<|im_end|>" in a manual page) stays text: it gets the ids of its
characters, as with `split_special_tokens=True` in transformers. Where tiktoken gives the same ids
it is used (`fast_encoder`), else the `tokenizers` library; `Encoder.kind` and `.note` say which.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.corpus import byte_ends, encoder_texts
from stageline.corpus.fast_encoder import (
    FastEncoder,
    NotFast,
    fast_rules,
    is_byte_level,
    token_bytes,
)
from stageline.corpus.segments import TokenizerInfo
from stageline.errors import DataError, UserError

Kind = Literal["auto", "tiktoken", "tokenizers"]
_MODEL_PARTS = ("normalizer", "pre_tokenizer", "model")


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
    try:
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
    except AttributeError:
        raise UserError(
            f"The tokenizer in {path} is a {type(tokenizer).__name__} without a tokenizer.json; "
            "a corpus is built with the tokenizers library only: save it once as a fast tokenizer "
            "(AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(folder))."
        ) from None
    info = TokenizerInfo(
        name=path.resolve().name,
        fingerprint=_fingerprint(spec),
        vocab_size=_vocab_size(spec),
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
    )
    return Encoder(path, spec, info=info, kind=kind)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 of what decides which ids a text gets: not of control tokens, padding or a template.

    Args:
        tokenizer: of transformers, with a `tokenizers` backend.
    """
    return _fingerprint(json.loads(tokenizer.backend_tokenizer.to_str()))


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
    """Texts to ids and back. Can be pickled: loads itself again from its folder.

    Attributes:
        info: what a corpus remembers of the tokenizer.
        kind: `tiktoken` or `tokenizers`: what really encodes.
        note: one line, why not tiktoken; empty where it is used or was not wanted.
    """

    def __init__(
        self, path: Path, spec: dict[str, Any], *, info: TokenizerInfo, kind: Kind
    ) -> None:
        """Takes a tokenizer.json; `load_encoder` is the usual way."""
        self.path = path
        self.info = info
        self.kind: Literal["tiktoken", "tokenizers"] = "tokenizers"
        self.note = ""
        self._backend = _plain_backend(spec)
        self._table = _byte_table(spec, info.vocab_size) if is_byte_level(spec) else None
        self._lengths = (
            numpy.array([len(part) for part in self._table], dtype=numpy.int64)
            if self._table
            else None
        )
        self._decoder = None if self._table else _backend(spec)
        self._fast: FastEncoder | None = None
        if kind != "tokenizers":
            self._try_fast(spec, must=kind == "tiktoken")

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (self.path, self.kind, self.note)

    def encode(self, texts: Sequence[str]) -> list[numpy.ndarray]:
        """The ids (uint32) of each text, without special tokens.

        Raises:
            DataError: a text for which `why_bad` has an answer.
        """
        try:
            found = self._fast.encode(texts) if self._fast else [None] * len(texts)
            left = [place for place, ids in enumerate(found) if ids is None]
            for place, ids in zip(left, self._slow([texts[i] for i in left]), strict=True):
                found[place] = ids
            return found
        except UnicodeEncodeError:
            raise self._bad_text(texts) from None

    def byte_ends(self, text: str, ids: numpy.ndarray) -> numpy.ndarray:
        """Where each token of `encode([text])` ends, in bytes of the text as UTF-8 (int64).

        A token that ends inside a character ends inside its bytes.
        """
        if self._lengths is not None and self._normalizes_not(text):
            ends = numpy.cumsum(self._lengths[ids])
            if len(ends) and ends[-1] == (len(text) if text.isascii() else len(text.encode())):
                return ends
        encoding = self._backend.encode(text, add_special_tokens=False)
        assert len(encoding.ids) == len(ids), "ids of another text"
        return byte_ends.of_offsets(text, encoding.offsets)

    def decode(self, ids: Sequence[int] | numpy.ndarray) -> str:
        """The text of a whole document's ids (without BOS and EOS), or of a piece of it.

        Bytes of half a character, at the ends of a piece, become U+FFFD.
        """
        if self._table is not None:
            return b"".join([self._table[index] for index in ids]).decode(errors="replace")
        return self._decoder.decode([int(index) for index in ids], skip_special_tokens=False)

    def check(self, texts: Sequence[str]) -> bool:
        """Compares with the tokenizers library on real documents; falls back where ids differ.

        Returns:
            Whether the encoder is what it was before; else `.kind` and `.note` have changed, and
            what was encoded before must be encoded again.
        """
        if self._fast is None:
            return True
        text = self._first_difference(texts)
        if text is None:
            return True
        self._fall_back(f"it gives other ids on the text {text[:60]!r}")
        return False

    def _try_fast(self, spec: dict[str, Any], *, must: bool) -> None:
        try:
            self._fast = FastEncoder(
                fast_rules(spec), lengths=self._lengths, beyond=self.info.vocab_size
            )
            self.kind = "tiktoken"
            self.check(encoder_texts.check_texts(self._table))
        except NotFast as error:
            self._fall_back(str(error))
        if must and self._fast is None:
            raise UserError(
                f"The tokenizer {self.info.name} cannot be run by tiktoken exactly: {self.note}. "
                "Leave the choice to 'auto', or say 'tokenizers'."
            )

    def _fall_back(self, reason: str) -> None:
        self._fast = None
        self.kind = "tokenizers"
        self.note = reason

    def _first_difference(self, texts: Sequence[str]) -> str | None:
        """The first text on which tiktoken and tokenizers disagree."""
        texts = [text for text in texts if why_bad(text) is None]
        pairs = zip(texts, self._fast.encode(texts), self._slow(texts), strict=True)
        for text, fast, slow in pairs:
            if fast is not None and not numpy.array_equal(fast, slow):
                return text
        return None

    def _slow(self, texts: list[str]) -> list[numpy.ndarray]:
        if not texts:
            return []
        try:
            found = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # what the library says to half a surrogate pair
            raise self._bad_text(texts) from None
        return [numpy.array(encoding.ids, dtype=numpy.uint32) for encoding in found]

    def _bad_text(self, texts: Sequence[str]) -> DataError:
        for place, text in enumerate(texts):
            reason = why_bad(text)
            if reason:
                return DataError(
                    f"Text {place} of {len(texts)} cannot be encoded: {reason}; it begins with "
                    f"{text[:40]!r}. Repair the file, or let bad documents be skipped."
                )
        raise AssertionError("no bad text")

    def _normalizes_not(self, text: str) -> bool:
        normalizer = self._backend.normalizer
        return normalizer is None or normalizer.normalize_str(text) == text


def _load_again(path: Path, kind: Literal["tiktoken", "tokenizers"], note: str) -> Encoder:
    encoder = load_encoder(path, kind=kind)
    encoder.note = note
    return encoder


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise UserError(
            f"{path} holds no tokenizer that transformers can load ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}). Name a folder with "
            "tokenizer.json and tokenizer_config.json."
        ) from error


def _plain_backend(spec: dict[str, Any]) -> Any:
    """Of the `tokenizers` library: adds nothing, cuts nothing off, takes control text as text.

    Control tokens get names that no text has: Unigram models hold them as pieces, which the text
    "</s>" would give, whatever is said of special tokens.
    """
    model, added = spec["model"], spec["added_tokens"]
    control = {token["content"] for token in added if token["special"]} - _needed(model)

    def hide(token: str) -> str:
        return f"\uffff{token}\ufffe hidden" if token in control else token

    plain = {**spec, "truncation": None, "padding": None, "post_processor": None}
    plain["added_tokens"] = [{**token, "content": hide(token["content"])} for token in added]
    if isinstance(model["vocab"], dict):
        hidden: Any = {hide(token): index for token, index in model["vocab"].items()}
    else:
        hidden = [[hide(token), score] for token, score in model["vocab"]]
    plain["model"] = {**model, "vocab": hidden}
    if model.get("unk_token"):
        plain["model"]["unk_token"] = hide(model["unk_token"])
    backend = _backend(plain)
    backend.encode_special_tokens = True
    return backend


def _backend(spec: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(spec))


def _needed(model: dict[str, Any]) -> set[str]:
    """Tokens that the model looks up by name: those of merges, and single bytes."""
    single = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else set()
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", [])]
    return single | {token for left, right in pairs for token in (left, right, left + right)}


def _byte_table(spec: dict[str, Any], size: int) -> list[bytes]:
    found = token_bytes(spec)
    return [found.get(index, b"") for index in range(size)]


def _vocab_size(spec: dict[str, Any]) -> int:
    vocab = spec["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
    return max([*ids, *(token["id"] for token in spec["added_tokens"])]) + 1


def _fingerprint(spec: dict[str, Any]) -> str:
    """Of the parts that matter; what is empty or off is left out, as versions add such fields."""
    facts: dict[str, Any] = {name: spec.get(name) for name in _MODEL_PARTS}
    facts["model"] = {key: value for key, value in facts["model"].items() if value}
    facts["added"] = sorted(
        (token["id"], token["content"], token["lstrip"], token["rstrip"], token["single_word"])
        for token in spec["added_tokens"]
        if not token["special"]
    )
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
