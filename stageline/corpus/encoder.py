"""Texts to token ids and back, exactly as the tokenizer of a folder does it, without BOS and EOS.

The text of a control token ("<|im_end|>" in a manual page) stays text: it gets the ids of its
characters, as with `split_special_tokens=True` in transformers. tiktoken encodes where it gives the
same ids (`FastEncoder`), else the `tokenizers` library; `Encoder.kind` and `.note` say which.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.corpus.fast_encoder import FastEncoder, NotFast, check_texts
from stageline.corpus.header import TokenizerInfo
from stageline.errors import DataError, UserError
from stageline.hub import title_of

Kind = Literal["auto", "tiktoken", "tokenizers"]
Spec = dict[str, Any]  # of a tokenizer.json
_SPACE = "▁"


def load_encoder(tokenizer_path: str | Path, *, kind: Kind = "auto") -> "Encoder":
    """Return the encoder of a tokenizer's folder.

    Args:
        kind: `auto`: tiktoken where it gives the same ids; `tiktoken`: an error where it does not;
            `tokenizers`: never tiktoken.

    Raises:
        UserError: no such tokenizer, or one without a `tokenizers` backend.
    """
    from transformers import AutoTokenizer

    from stageline.model_folder import check_folder, find_folder  # slow to import

    path = find_folder(tokenizer_path, option="`tokenizer_path`")
    check_folder(path, trust_remote_code=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        reason = (str(error) or "no reason given").splitlines()[0]
        raise UserError(
            f"{path} holds no tokenizer that transformers can load ({type(error).__name__}: "
            f"{reason}). Name a folder with tokenizer.json and tokenizer_config.json."
        ) from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(
            f"The tokenizer in {path} is a {type(tokenizer).__name__} without a tokenizer.json. "
            "Save it once as a fast tokenizer and give that folder."
        )
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    info = TokenizerInfo(
        name=title_of(path.resolve()),
        fingerprint=_fingerprint(spec),
        vocab_size=_vocab_size(spec),
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        folder=str(path.resolve()),
    )
    encoder = Encoder(spec, info=info, kind=kind)
    if kind == "tiktoken" and encoder.kind != kind:
        raise UserError(
            f"The tokenizer in {path} cannot be run by tiktoken exactly: {encoder.note}. "
            "Leave the choice to 'auto', or say 'tokenizers'."
        )
    return encoder


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the sha256 of what decides which ids a text gets, so not of padding or a template.

    Args:
        tokenizer: of transformers, with a `tokenizers` backend.
    """
    return _fingerprint(json.loads(tokenizer.backend_tokenizer.to_str()))


def why_bad(text: str) -> str | None:
    """Why a text cannot be encoded: it holds half a surrogate pair; None for all other texts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"character {error.start} is U+{ord(text[error.start]):04X}, half of a surrogate pair, "
            "which is no character"
        )
    return None


class Encoder:
    """Texts to ids and back; `load_encoder` makes one.

    Attributes:
        info: what a corpus remembers of the tokenizer.
        kind: `tiktoken` or `tokenizers`: what really encodes.
        note: one line, why not tiktoken; empty where it is used or was not wanted.
        token_bytes: bytes of each id; None if a token does not stand for the same bytes always.
    """

    def __init__(self, spec: Spec, *, info: TokenizerInfo, kind: Kind = "auto") -> None:
        self.info = info
        self.kind: Literal["tiktoken", "tokenizers"] = "tokenizers"
        self.note = ""
        self._spec = spec
        steps = _steps(spec.get("pre_tokenizer"), "pretokenizers")
        self._normalizers = {one["type"] for one in _steps(spec.get("normalizer"), "normalizers")}
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        decoders = _steps(spec.get("decoder"), "decoders")
        self.token_bytes: list[bytes] | None = None
        if self._is_byte_level or _marks_spaces(self._normalizers, steps, decoders):
            self.token_bytes = _token_bytes(spec, is_byte_level=self._is_byte_level)
        # encoding put a space before the text
        self._drops_first_space = not self._is_byte_level and any(
            step["type"] == "Strip"
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in decoders
        )
        self._lengths = numpy.array([len(part) for part in self.token_bytes or []], numpy.int64)
        self._fast: FastEncoder | None = None
        if kind == "tokenizers":
            return
        try:
            self._fast = FastEncoder(spec, self.token_bytes, steps, self._normalizers)
            self.kind = "tiktoken"
        except NotFast as error:
            self.note = str(error)
        self.check(check_texts(self.token_bytes))

    def encode(self, texts: Sequence[str]) -> list[numpy.ndarray]:
        """The ids (uint32) of each text, without special tokens.

        Raises:
            DataError: a text for which `why_bad` has an answer.
        """
        return self.encode_and_doubt(texts)[0]

    def encode_and_doubt(self, texts: Sequence[str]) -> tuple[list[numpy.ndarray], list[int]]:
        """As `encode`, and which texts may not come back from their ids by `decode`.

        The tokens of the others are known to be as long as the text.
        """
        try:
            found = [self._fast.encode(text) if self._fast else None for text in texts]
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
        return _ends_of_offsets(text, encoding.offsets)

    def decode(self, ids: Sequence[int] | numpy.ndarray) -> str:
        """The text of a whole document's ids (without BOS and EOS), or of a piece of it.

        Bytes of half a character, at the ends of a piece, become U+FFFD.
        """
        if self.token_bytes is not None:
            return self._decode_bytes(ids).decode(errors="replace")
        return self._decoder.decode([int(index) for index in ids], skip_special_tokens=False)

    def check(self, texts: Sequence[str]) -> bool:
        """Compare with the tokenizers library, on real documents say; fall back if ids differ.

        Returns:
            Whether the encoder is what it was before; else `.kind` and `.note` have changed, and
            what was encoded before must be encoded again.
        """
        if self._fast is None:
            return True
        texts = [text for text in texts if why_bad(text) is None]
        for text, slow in zip(texts, self._slow(texts), strict=True):
            fast = self._fast.encode(text)
            if fast is not None and not numpy.array_equal(fast, slow):
                self._fast, self.kind = None, "tokenizers"
                self.note = f"it gives other ids on the text {text[:60]!r}"
                return False
        return True

    @cached_property
    def _backend(self) -> Any:
        """The tokenizers library's; not made where tiktoken takes everything."""
        return _plain_backend(self._spec)

    @cached_property
    def _decoder(self) -> Any:
        return _make_backend(self._spec)

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


def _ends_of_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> numpy.ndarray:
    """Byte ends (int64) of tokens whose (start, end) are characters; rising, the last at the end.

    Several tokens of one character (bytes of a rare one) all name its end: only the last of them
    gets it, those before get the bytes before it.
    """
    if not offsets:
        return numpy.zeros(0, dtype=numpy.int64)
    ends = numpy.maximum.accumulate(numpy.array([end for _, end in offsets], dtype=numpy.int64))
    ends[-1] = len(text)  # what a tokenizer drops at the end belongs to the last token
    code = numpy.frombuffer(text.encode("utf-32-le"), dtype=numpy.uint32)
    sizes = 1 + (code >= 0x80).astype(numpy.int64) + (code >= 0x800) + (code >= 0x10000)
    byte_ends = numpy.concatenate([numpy.zeros(1, dtype=numpy.int64), numpy.cumsum(sizes)])[ends]
    last = numpy.searchsorted(ends, ends, side="right") - 1
    return numpy.maximum(byte_ends - (last - numpy.arange(len(ends))), 0)


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


# What a tokenizer.json says.


@cache
def _byte_alphabet() -> dict[str, int]:
    """Character -> byte: how byte-level tokenizers print bytes (GPT-2's table)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    table = {chr(byte): byte for byte in printed}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


def _token_bytes(spec: Spec, *, is_byte_level: bool) -> list[bytes]:
    """The bytes that each id stands for."""
    vocab = _vocab(spec["model"])
    if is_byte_level:
        alphabet = _byte_alphabet()
        is_known = frozenset(alphabet).issuperset
        letters = {ord(char): chr(byte) for char, byte in alphabet.items()}
        table = {
            index: token.translate(letters).encode("latin-1")
            for token, index in vocab.items()
            if is_known(token)
        }
    else:
        single = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        has_single = spec["model"].get("byte_fallback")
        table = {
            index: (has_single and single.get(token)) or token.replace(_SPACE, " ").encode()
            for token, index in vocab.items()
        }
    for token in spec["added_tokens"]:
        if token["special"]:
            table.setdefault(token["id"], token["content"].encode())
        else:  # it stands for itself, whatever the model has under its id
            table[token["id"]] = token["content"].encode()
    return [table.get(index, b"") for index in range(_vocab_size(spec))]


def _marks_spaces(normalizers: set[str], steps: list[Spec], decoders: list[Spec]) -> bool:
    """Whether tokens are text with a low line for a space, as in Llama 2, and nothing else."""
    return (
        normalizers <= {"Prepend", "Replace"}
        and {step["type"] for step in (*steps, *decoders)}
        <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
        and f'"{_SPACE}"' in json.dumps(decoders, ensure_ascii=False)
    )


def _vocab(model: Spec) -> dict[str, int]:
    """Token -> id; Unigram models have a list of tokens and scores."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {token: index for index, (token, _) in enumerate(vocab)}


def _vocab_size(spec: Spec) -> int:
    """All ids, control tokens' too, are below it."""
    added = [token["id"] for token in spec["added_tokens"]]
    return max([*_vocab(spec["model"]).values(), *added]) + 1


def _steps(part: Spec | None, name: str) -> list[Spec]:
    """Normalizers, pre-tokenizers or decoders one after the other, sequences unrolled."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[name] for step in _steps(inner, name)]
    return [part]


def _merge_pairs(model: Spec) -> list[tuple[str, str]]:
    """The merges of a BPE model in order; older files write a pair as one text."""
    merges = model.get("merges", [])
    return [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in merges]


def _plain_backend(spec: Spec) -> Any:
    """Return a `tokenizers` object that adds nothing, cuts nothing off, takes control text as text.

    Control tokens get names that no text has: Unigram models hold them as pieces, which the text
    "</s>" would give, whatever is said of special tokens.
    """
    model, added = spec["model"], spec["added_tokens"]
    needed = {token for left, right in _merge_pairs(model) for token in (left, right, left + right)}
    if model.get("byte_fallback"):
        needed |= {f"<0x{byte:02X}>" for byte in range(256)}
    control = {token["content"] for token in added if token["special"]} - needed

    def hide(token: str) -> str:
        return f"\uffff{token}\ufffe hidden" if token in control else token

    if isinstance(model["vocab"], dict):
        hidden: Any = {hide(token): index for token, index in model["vocab"].items()}
    else:
        hidden = [[hide(token), score] for token, score in model["vocab"]]
    plain = {**spec, "truncation": None, "padding": None, "post_processor": None}
    plain["added_tokens"] = [{**token, "content": hide(token["content"])} for token in added]
    plain["model"] = {**model, "vocab": hidden}
    if model.get("unk_token"):
        plain["model"]["unk_token"] = hide(model["unk_token"])
    backend = _make_backend(plain)
    backend.encode_special_tokens = True
    return backend


def _make_backend(spec: Spec) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(spec))


def _fingerprint(spec: Spec) -> str:
    """Of the parts that matter; what is empty or off is left out, as versions add such fields."""
    facts: Spec = {name: spec.get(name) for name in ("normalizer", "pre_tokenizer", "model")}
    facts["model"] = {key: value for key, value in facts["model"].items() if value}
    # both are long: to sort and write them as JSON takes longer than to load the tokenizer
    vocab = spec["model"]["vocab"]
    pairs = sorted(vocab.items(), key=itemgetter(1)) if isinstance(vocab, dict) else vocab
    facts["model"]["vocab"] = _digest(f"{token}\x1f{value!r}" for token, value in pairs)
    facts["model"]["merges"] = _digest("\x1f".join(pair) for pair in _merge_pairs(spec["model"]))
    added = sorted(
        (token["id"], token["content"], token["lstrip"], token["rstrip"], token["single_word"])
        for token in spec["added_tokens"]
        if not token["special"]
    )
    pre_tokenizer = facts["pre_tokenizer"] or {}
    if pre_tokenizer.get("type") == "Metaspace" and not added:
        # saving one of Llama 2 again makes "first" of "always": of a text without added tokens,
        # which is one stretch, both say the same
        scheme = pre_tokenizer["prepend_scheme"].replace("always", "first")
        facts["pre_tokenizer"] = {**pre_tokenizer, "prepend_scheme": scheme}
    facts["added"] = added
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\x1e".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
