"""Encode texts and decode ids exactly as the tokenizer of a folder does, without BOS and EOS.

The text of a control token ("<|im_end|>" in a manual page) stays text: it gets the ids of its
characters, as with `split_special_tokens=True` in transformers. tiktoken encodes where it gives the
same ids (`FastEncoder`), else the `tokenizers` library; `Encoder.kind` and `.note` say which.
"""

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.corpus.header import TokenizerInfo
from stageline.errors import UserError
from stageline.hub import title_of

Kind = Literal["auto", "tiktoken", "tokenizers"]
Spec = dict[str, Any]  # content of a tokenizer.json


def load_encoder(tokenizer_path: str | Path, *, kind: Kind = "auto") -> "Encoder":
    """Return the encoder of a tokenizer's folder, or of the folder of a file.

    Args:
        kind: `auto`: tiktoken where it gives the same ids; `tiktoken`: an error where it does not.

    Raises:
        UserError: no such tokenizer, or one without a `tokenizers` backend.
    """
    from transformers import AutoTokenizer

    from stageline.model_folder import check_folder, find_folder  # slow to import

    path = find_folder(tokenizer_path, option="`tokenizer_path`")
    check_folder(path, trust_remote_code=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        raise UserError(
            f"{path} holds no tokenizer that transformers can load as a fast one. Name a folder "
            f"with tokenizer.json and tokenizer_config.json ({' '.join(str(error).split())[:200]})."
        ) from error
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
            "Choose 'auto' or 'tokenizers'."
        )
    return encoder


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the sha256 of what decides which ids a text gets from a tokenizer of transformers."""
    return _fingerprint(json.loads(tokenizer.backend_tokenizer.to_str()))


class Encoder:
    """Texts to ids and back; `load_encoder` makes one.

    Attributes:
        kind: `tiktoken` or `tokenizers`: what really encodes.
        note: one line, why not tiktoken; empty where it is used or was not wanted.
        token_bytes: bytes of each id of a byte-level tokenizer; of others None.
    """

    def __init__(self, spec: Spec, *, info: TokenizerInfo, kind: Kind = "auto") -> None:
        self.info = info
        self.kind: Literal["tiktoken", "tokenizers"] = "tokenizers"
        self.note = ""
        self._spec = spec
        steps = _steps(spec.get("pre_tokenizer"), "pretokenizers")
        self._normalizers = {one["type"] for one in _steps(spec.get("normalizer"), "normalizers")}
        is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self.token_bytes = _token_bytes(spec) if is_byte_level else None
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
        """Return the ids (uint32) of each text, without special tokens."""
        return self.encode_and_doubt(texts)[0]

    def encode_and_doubt(self, texts: Sequence[str]) -> tuple[list[numpy.ndarray], list[int]]:
        """Encode texts, and return the places of those whose ids `decode` may not turn back."""
        found = [self._fast.encode(text) if self._fast else None for text in texts]
        left = [place for place, ids in enumerate(found) if ids is None]
        slow = dict(zip(left, self._slow([texts[place] for place in left]), strict=True))
        return [slow[place] if ids is None else ids for place, ids in enumerate(found)], left

    def byte_ends(self, text: str, ids: numpy.ndarray) -> numpy.ndarray:
        """Return the end of each token of `encode([text])`, in UTF-8 bytes of the text (int64).

        A token that ends inside a character ends inside its bytes.
        """
        if self.token_bytes is not None:
            is_normal = not self._normalizers or unicodedata.is_normalized("NFC", text)
            if self._normalizers <= {"NFC"} and is_normal:
                is_whole = int(self._lengths[ids].sum()) == len(text.encode())
            else:
                is_whole = self._decode_bytes(ids) == text.encode()
            if is_whole:
                return numpy.cumsum(self._lengths[ids])
        encoding = self._backend.encode(text, add_special_tokens=False)
        assert len(encoding.ids) == len(ids), "ids of another text"
        return _ends_of_offsets(text, encoding.offsets)

    def decode(self, ids: Sequence[int] | numpy.ndarray) -> str:
        """Return the text of ids; bytes of half a character, at the ends, become U+FFFD."""
        if self.token_bytes is not None:
            return self._decode_bytes(ids).decode(errors="replace")
        return self._decoder.decode([int(index) for index in ids], skip_special_tokens=False)

    def check(self, texts: Sequence[str]) -> bool:
        """Compare with the tokenizers library; if ids differ, use it and return False."""
        if self._fast is None:
            return True
        for text, slow in zip(texts, self._slow(list(texts)), strict=True):
            fast = self._fast.encode(text)
            if fast is not None and not numpy.array_equal(fast, slow):
                self._fast, self.kind = None, "tokenizers"
                self.note = f"it gives other ids on the text {text[:60]!r}"
                return False
        return True

    @cached_property  # these two are not made where tiktoken encodes everything
    def _backend(self) -> Any:
        return _plain_backend(self._spec)

    @cached_property
    def _decoder(self) -> Any:
        return _make_backend(self._spec)

    def _slow(self, texts: list[str]) -> list[numpy.ndarray]:
        if not texts:
            return []
        found = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [numpy.array(encoding.ids, dtype=numpy.uint32) for encoding in found]

    def _decode_bytes(self, ids: Sequence[int] | numpy.ndarray) -> bytes:
        assert self.token_bytes is not None
        return b"".join([self.token_bytes[index] for index in ids])


def _ends_of_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> numpy.ndarray:
    """Return byte ends (int64) of tokens whose (start, end) are characters; they rise.

    Several tokens of one character (bytes of a rare one) all name its end: only the last of them
    gets it, those before get the bytes before it.
    """
    if not offsets:
        return numpy.zeros(0, dtype=numpy.int64)
    ends = numpy.maximum.accumulate(numpy.array([end for _, end in offsets], dtype=numpy.int64))
    ends[-1] = len(text)  # text dropped at the end belongs to the last token
    code = numpy.frombuffer(text.encode("utf-32-le"), dtype=numpy.uint32)
    sizes = 1 + (code >= 0x80).astype(numpy.int64) + (code >= 0x800) + (code >= 0x10000)
    byte_ends = numpy.concatenate([numpy.zeros(1, dtype=numpy.int64), numpy.cumsum(sizes)])[ends]
    last = numpy.searchsorted(ends, ends, side="right") - 1
    return numpy.maximum(byte_ends - (last - numpy.arange(len(ends))), 0)


# Reading a tokenizer.json.


def _token_bytes(spec: Spec) -> list[bytes]:
    """Return the bytes that each id of a byte-level tokenizer stands for."""
    # character -> byte: GPT-2's table
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {byte: chr(byte) for byte in printed}
    letters |= {256 + place: chr(byte) for place, byte in enumerate(others)}
    is_known = frozenset(map(chr, letters)).issuperset
    table = {
        index: token.translate(letters).encode("latin-1")
        for token, index in _vocab(spec["model"]).items()
        if is_known(token)
    }
    for token in spec["added_tokens"]:
        if token["special"]:
            table.setdefault(token["id"], token["content"].encode())
        else:  # its bytes are its own text, whatever the model has under its id
            table[token["id"]] = token["content"].encode()
    return [table.get(index, b"") for index in range(_vocab_size(spec))]


def _vocab(model: Spec) -> dict[str, int]:
    """Return token -> id; Unigram models have a list of tokens and scores."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {token: index for index, (token, _) in enumerate(vocab)}


def _vocab_size(spec: Spec) -> int:
    """Return a number above all ids, those of control tokens included."""
    added = [token["id"] for token in spec["added_tokens"]]
    return max([*_vocab(spec["model"]).values(), *added]) + 1


def _steps(part: Spec | None, name: str) -> list[Spec]:
    """Return normalizers, pre-tokenizers or decoders in order, sequences unrolled."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[name] for step in _steps(inner, name)]
    return [part]


def _merge_pairs(model: Spec) -> list[tuple[str, str]]:
    """Return the merges of a BPE model in order; older files write a pair as one text."""
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
    """Hash the parts that decide ids, without empty or disabled fields, which versions add."""
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


# The ids of a byte-level BPE tokenizer by tiktoken, six times as fast as by `tokenizers`. tiktoken
# cuts a text by one regular expression and merges the pair with the smallest id first. A tokenizer
# fits if its ids are in the order of its merges and its pre-tokenizers are one expression.

# the expression of ByteLevel(use_regex=True)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# ... between digits that Digits has taken out: to white space a digit is then the text's end
_BETWEEN_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|%s| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# a run of white space of about 900,000 characters overflows the stack of tiktoken's expressions
_LONG_BLANK = re.compile(r"(?<!\s)\s{32768}")


class NotFast(ValueError):
    """tiktoken cannot give exactly the ids of this tokenizer; the message says why."""


class FastEncoder:
    """Encodes by tiktoken what it can encode exactly; raises NotFast for other tokenizers."""

    def __init__(
        self,
        spec: Spec,
        token_bytes: Sequence[bytes] | None,
        steps: list[Spec],
        normalizers: set[str],
    ) -> None:
        import tiktoken  # late: slow to import

        model = spec["model"]
        odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        if model.get("type") != "BPE" or any(model.get(name) for name in odd):
            raise NotFast("it is not plain byte-level BPE")
        if normalizers - {"NFC"}:
            raise NotFast(f"it normalises by {', '.join(sorted(normalizers))}")
        pattern = _pattern(steps)
        assert token_bytes is not None  # each id of a byte-level tokenizer has some
        vocab, added = model["vocab"], spec["added_tokens"]
        merged = ["".join(pair) for pair in _merge_pairs(model)]
        if any(vocab[before] > vocab[after] for before, after in pairwise(merged)):
            raise NotFast("its ids are not in the order of its merges")
        reached = {token for token in vocab if len(token) == 1} | set(merged)
        if model.get("ignore_merges") and set(vocab) - reached - {one["content"] for one in added}:
            raise NotFast("it has whole words that no merge makes")
        ranks = {token_bytes[vocab[token]]: vocab[token] for token in reached}
        # `tokenizers` drops bytes that a vocabulary lacks; ids beyond it find such texts
        self._beyond = len(token_bytes)
        for byte in range(256):
            ranks.setdefault(bytes([byte]), self._beyond + byte)
        try:
            self._encoding = tiktoken.Encoding(
                "corpus", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
            )
        except ValueError as error:
            raise NotFast(f"tiktoken does not take its expression: {error}") from error
        self._lengths = numpy.array([len(part) for part in token_bytes], dtype=numpy.int64)
        self._needs_nfc = bool(normalizers)
        self._whole = [one["content"] for one in added if not one["special"]]  # <think>, say

    def encode(self, text: str) -> numpy.ndarray | None:
        """Return the ids (uint32) of a text; None for one that `tokenizers` has to encode."""
        if any(token in text for token in self._whole):
            return None
        if len(text) > 32_768 and _LONG_BLANK.search(text):
            return None
        num_bytes = len(text) if text.isascii() else len(text.encode())
        if self._needs_nfc and num_bytes > len(text) and not unicodedata.is_normalized("NFC", text):
            return None
        try:
            ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        except BaseException as error:
            # a panic of tiktoken is not an Exception, and its class cannot be imported
            if type(error).__name__ != "PanicException":
                raise
            return None
        # tokens are as long as the text: the expression left nothing out
        is_whole = not (ids >= self._beyond).any() and int(self._lengths[ids].sum()) == num_bytes
        return ids if is_whole else None


def _pattern(steps: list[Spec]) -> str:
    """Return one regular expression that cuts as these pre-tokenizers do one after the other."""
    kinds = [step["type"] for step in steps]
    if not kinds or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise NotFast(f"its pre-tokenizers are {', '.join(kinds) or 'none'}, not plain bytes")
    uses_regex, first = steps[-1].get("use_regex", True), steps[0]
    if kinds == ["ByteLevel"] and uses_regex:
        return GPT2_PATTERN
    if kinds == ["Digits", "ByteLevel"] and uses_regex:
        return _BETWEEN_DIGITS % (r"\p{N}" if first["individual_digits"] else r"\p{N}+")
    if kinds == ["Split", "ByteLevel"] and not uses_regex and "Regex" in first["pattern"]:
        if (first["behavior"].lower(), first["invert"]) in (("isolated", False), ("removed", True)):
            return first["pattern"]["Regex"]
    raise NotFast(f"its pre-tokenizers {', '.join(kinds)} cannot be one regular expression")


def check_texts(tokens: Sequence[bytes] | None) -> list[str]:
    """Return texts to compare on: 150 mixtures of tokens and odd signs, and 2,000 single tokens."""
    words = [token.decode(errors="ignore") for token in tokens or [b"a"]]
    signs = " \n\t'7aBé中😀-½²٣Ⅷ\u00a0\u3000\u2028\x85\x0b\x1c\x00\u0301\u200dſｓ"
    chance, odd = random.Random(0), (*signs, "  ", "'s", "'LL", "'re", "42", "...", "\r\n", "\n\n")
    mixed = [
        "".join(chance.choice(words if chance.random() < 0.7 else odd) for _ in range(60))
        for _ in range(150)
    ]
    return [*mixed, *words[:: max(1, len(words) // 2000)]]
