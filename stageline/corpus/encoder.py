"""Texts to token ids and back, exactly as the tokenizer of a folder does it, without BOS and EOS.

The text of a control token ("<|im_end|>" in a manual page) stays text: it gets the ids of its
characters, as with `split_special_tokens=True` in transformers. Where tiktoken gives the same ids
it is used (`FastEncoder`), else the `tokenizers` library; `Encoder.kind` and `.note` say which.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.corpus.fast_encoder import FastEncoder, NotFast, check_texts
from stageline.corpus.header import TokenizerInfo
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
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    info = TokenizerInfo(
        name=title_of(path.resolve()),
        fingerprint=fingerprint(spec),
        vocab_size=vocab_size(spec),
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        folder=str(path.resolve()),
    )
    encoder = Encoder(spec, info=info)
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
    """Texts to ids and back; `load_encoder` makes one.

    Attributes:
        info: what a corpus remembers of the tokenizer.
        kind: `tiktoken` or `tokenizers`: what really encodes.
        note: one line, why not tiktoken; empty where it is used or was not wanted.
        token_bytes: bytes of each id; None if a token does not stand for the same bytes always.
    """

    def __init__(self, spec: dict[str, Any], *, info: TokenizerInfo) -> None:
        """Takes what a tokenizer.json says."""
        self.info = info
        self.kind: Literal["tiktoken", "tokenizers"] = "tokenizers"
        self.note = ""
        self._spec = spec
        self._normalizers = set(normalizers(spec))
        self._fast: FastEncoder | None = None
        self.token_bytes = token_bytes(spec)
        self._is_byte_level = is_byte_level(spec)
        self._drops_first_space = not self._is_byte_level and drops_first_space(spec)
        self._lengths = numpy.array([len(part) for part in self.token_bytes or []], numpy.int64)

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
            steps = pre_tokenizers(self._spec)
            self._fast = FastEncoder(self._spec, self.token_bytes, steps, self._normalizers)
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
        for text, slow in zip(texts, self._slow(texts), strict=True):
            fast = self._fast.encode(text)
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


# What a tokenizer.json says.

# parts that decide which ids a text gets, next to added tokens that are not control tokens
_MODEL_PARTS = ("normalizer", "pre_tokenizer", "model")
_SPACE = "▁"


@cache
def byte_alphabet() -> dict[str, int]:
    """Character -> byte: how byte-level tokenizers print bytes (GPT-2's table)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    table = {chr(byte): byte for byte in printed}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


def bytes_of_tokens(tokens: Iterable[str]) -> Iterator[bytes]:
    """The bytes that each token prints in the byte alphabet.

    All by one translation: a loop over the characters takes longer than loading the tokenizer.
    """
    tokens = list(tokens)
    table = {ord(char): chr(byte) for char, byte in byte_alphabet().items()}
    joined = "".join(tokens).translate(table).encode("latin-1")
    ends = accumulate(map(len, tokens))
    return (joined[end - len(token) : end] for token, end in zip(tokens, ends, strict=True))


def is_byte_level(spec: dict[str, Any]) -> bool:
    """Whether tokens of this tokenizer.json are bytes printed as characters."""
    return any(step["type"] == "ByteLevel" for step in pre_tokenizers(spec))


def token_bytes(spec: dict[str, Any]) -> list[bytes] | None:
    """The bytes that each id stands for; None where ids do not stand for fixed bytes."""
    vocab = _vocab(spec["model"])
    if is_byte_level(spec):
        in_alphabet = frozenset(byte_alphabet()).issuperset
        known = {token: index for token, index in vocab.items() if in_alphabet(token)}
        table = dict(zip(known.values(), bytes_of_tokens(known), strict=True))
    elif marks_spaces(spec):
        single = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        has_single = spec["model"].get("byte_fallback")
        table = {
            index: (has_single and single.get(token)) or token.replace(_SPACE, " ").encode()
            for token, index in vocab.items()
        }
    else:
        return None
    added = spec["added_tokens"]
    control = {token["id"]: token["content"].encode() for token in added if token["special"]}
    # an added token that is text stands for itself, whatever the model has under its id
    table |= {token["id"]: token["content"].encode() for token in added if not token["special"]}
    table = control | table
    return [table.get(index, b"") for index in range(vocab_size(spec))]


def marks_spaces(spec: dict[str, Any]) -> bool:
    """Whether tokens are text with a low line for a space, as in Llama 2, and nothing else."""
    kinds = {step["type"] for step in (*pre_tokenizers(spec), *_decoders(spec))}
    return (
        set(normalizers(spec)) <= {"Prepend", "Replace"}
        and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
        and f'"{_SPACE}"' in json.dumps(_decoders(spec), ensure_ascii=False)
    )


def drops_first_space(spec: dict[str, Any]) -> bool:
    """Whether decoding takes away a space at the beginning, which encoding put there."""
    return any(
        step["type"] == "Strip"
        or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in _decoders(spec)
    )


def _decoders(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return _steps(spec.get("decoder"), "decoders")


def _vocab(model: dict[str, Any]) -> dict[str, int]:
    """Token -> id; Unigram models have a list of tokens and scores."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {token: index for index, (token, _) in enumerate(vocab)}


def pre_tokenizers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The pre-tokenizers one after the other, sequences unrolled."""
    return _steps(spec.get("pre_tokenizer"), "pretokenizers")


def normalizers(spec: dict[str, Any]) -> list[str]:
    """The kinds of the normalizers, one after the other."""
    return [step["type"] for step in _steps(spec.get("normalizer"), "normalizers")]


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[name] for step in _steps(inner, name)]
    return [part]


def merge_pairs(model: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE model in order; older files write a pair as one text."""
    merges = model.get("merges", [])
    return [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in merges]


def plain_backend(spec: dict[str, Any]) -> Any:
    """Return a `tokenizers` object that adds nothing, cuts nothing off, takes control text as text.

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
    backend = make_backend(plain)
    backend.encode_special_tokens = True
    return backend


def make_backend(spec: dict[str, Any]) -> Any:
    """The `tokenizers` object of a tokenizer.json."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(spec))


def _needed(model: dict[str, Any]) -> set[str]:
    """Tokens that the model looks up by name: those of merges, and single bytes."""
    single = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else set()
    pairs = merge_pairs(model)
    return single | {token for left, right in pairs for token in (left, right, left + right)}


def vocab_size(spec: dict[str, Any]) -> int:
    """All ids, control tokens' too, are below it."""
    added = [token["id"] for token in spec["added_tokens"]]
    return max([*_vocab(spec["model"]).values(), *added]) + 1


def fingerprint(spec: dict[str, Any]) -> str:
    """Of the parts that matter; what is empty or off is left out, as versions add such fields."""
    facts: dict[str, Any] = {name: spec.get(name) for name in _MODEL_PARTS}
    facts["model"] = {key: value for key, value in facts["model"].items() if value}
    # both are long: to sort and write them as JSON takes longer than to load the tokenizer
    facts["model"]["vocab"] = _digest(_vocab_lines(spec["model"]))
    facts["model"]["merges"] = _digest("\x1f".join(pair) for pair in merge_pairs(spec["model"]))
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


def _vocab_lines(model: dict[str, Any]) -> Iterator[str]:
    """Each token with its id, or of Unigram models with its score, in the order of ids."""
    vocab = model["vocab"]
    if not isinstance(vocab, dict):
        return (f"{token}\x1f{score!r}" for token, score in vocab)
    return (f"{token}\x1f{index}" for token, index in sorted(vocab.items(), key=itemgetter(1)))


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\x1e".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
