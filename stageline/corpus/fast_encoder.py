"""The same ids by tiktoken, some six times faster, for byte-level BPE whose rules fit it exactly.

tiktoken cuts a text by one regular expression and merges the pair with the smallest id first. So
a tokenizer fits if its ids stand in the order of its merges, each byte is a token, and its
pre-tokenizer can be written as one expression. `fast_rules` says so from the tokenizer's JSON, or
raises `NotFast` with the reason; `stageline.corpus.encoder` then compares both on texts.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy

# what ByteLevel(use_regex=True) cuts by
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# ... between digits that Digits has taken out: to white space a digit is then the text's end
_BETWEEN_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|%s| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# put between documents, so that one call encodes many; a document that holds it goes alone
SEPARATOR = "\x00<stageline: a document ends here 6f1c2a9de0b74485>\x00"
_GROUP_CHARS = 200_000
# a run of white space of about 900,000 characters overflows the stack of tiktoken's expressions
_LONG_BLANK = 32_768


class NotFast(ValueError):
    """tiktoken cannot give exactly the ids of this tokenizer; the message says why."""


@dataclass(frozen=True)
class FastRules:
    """A byte-level BPE tokenizer in tiktoken's words.

    Attributes:
        pattern: cuts a text into the chunks that are merged.
        ranks: bytes of a token -> its id.
        whole: added tokens that are text all the same (not control tokens): content -> id.
        needs_nfc: the tokenizer normalises; only texts in that form come this way.
    """

    pattern: str
    ranks: dict[bytes, int]
    whole: dict[str, int]
    needs_nfc: bool


@cache
def byte_alphabet() -> dict[str, int]:
    """Character -> byte: how byte-level tokenizers print bytes (GPT-2's table)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    table = {chr(byte): byte for byte in printed}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


def is_byte_level(spec: dict[str, Any]) -> bool:
    """Whether tokens of this tokenizer.json are bytes printed as characters."""
    steps = _steps(spec.get("pre_tokenizer"), "pretokenizers")
    return any(step["type"] == "ByteLevel" for step in steps)


def token_bytes(spec: dict[str, Any]) -> dict[int, bytes]:
    """Id -> bytes of a byte-level tokenizer's tokens."""
    alphabet = byte_alphabet()
    table = {
        index: bytes(alphabet[char] for char in token)
        for token, index in spec["model"]["vocab"].items()
        if all(char in alphabet for char in token)
    }
    return table | {token["id"]: token["content"].encode() for token in spec["added_tokens"]}


def fast_rules(spec: dict[str, Any]) -> FastRules:
    """The rules for tiktoken.

    Args:
        spec: a tokenizer.json.

    Raises:
        NotFast: it has something that tiktoken does not have.
    """
    _check_model(spec["model"])
    pattern = _pattern(_steps(spec.get("pre_tokenizer"), "pretokenizers"))
    normalizers = _steps(spec.get("normalizer"), "normalizers")
    if any(step["type"] != "NFC" for step in normalizers):
        raise NotFast(f"it normalises by {normalizers[0]['type']}")
    return FastRules(
        pattern=pattern,
        ranks=_ranks(spec),
        whole=_whole_tokens(spec["added_tokens"]),
        needs_nfc=bool(normalizers),
    )


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """A part of a tokenizer.json as a flat list."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[name] for step in _steps(inner, name)]
    return [part]


def _check_model(model: dict[str, Any]) -> None:
    if model.get("type") != "BPE":
        raise NotFast(f"its model is {model.get('type')}, not byte-level BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise NotFast(f"its BPE model has {name}")


def _pattern(steps: list[dict[str, Any]]) -> str:
    """One regular expression that cuts as these pre-tokenizers do one after the other."""
    kinds = [step["type"] for step in steps]
    if not kinds or kinds[-1] != "ByteLevel":
        raise NotFast(f"its pre-tokenizers are {', '.join(kinds) or 'none'}, not byte-level")
    last = steps[-1]
    if last.get("add_prefix_space"):
        raise NotFast("it puts a space before each text")
    uses_regex = last.get("use_regex", True)
    if kinds == ["ByteLevel"] and uses_regex:
        return GPT2_PATTERN
    if kinds == ["Digits", "ByteLevel"] and uses_regex:
        return _BETWEEN_DIGITS % (r"\p{N}" if steps[0]["individual_digits"] else r"\p{N}+")
    if kinds == ["Split", "ByteLevel"] and not uses_regex:
        return _split_pattern(steps[0])
    raise NotFast(f"its pre-tokenizers {', '.join(kinds)} cannot be one regular expression")


def _split_pattern(step: dict[str, Any]) -> str:
    way = (step["behavior"].lower(), step["invert"])
    if way not in (("isolated", False), ("removed", True)) or "Regex" not in step["pattern"]:
        raise NotFast(f"its Split is {way[0]}{' inverted' if way[1] else ''}")
    pattern = step["pattern"]["Regex"]
    if re.search(r"\{[\d,]+\}\+", pattern):
        raise NotFast("its expression has '}+': possessive for one engine, repeated for the other")
    return pattern


def _ranks(spec: dict[str, Any]) -> dict[bytes, int]:
    """Bytes -> id of every token that merging can reach, with an id for each missing byte.

    A missing byte (control characters, mostly) is dropped by `tokenizers`; here it gets an id
    beyond the vocabulary, by which such documents are found.
    """
    model, alphabet = spec["model"], byte_alphabet()
    vocab = model["vocab"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merged = [left + right for left, right in pairs]
    ids = [vocab[token] for token in merged]
    if any(before > after for before, after in pairwise(ids)):
        raise NotFast("its ids are not in the order of its merges")
    reached = {char for char in alphabet if char in vocab} | set(merged)
    added = {token["content"] for token in spec["added_tokens"]}
    if model.get("ignore_merges") and set(vocab) - reached - added:
        raise NotFast("it has whole words that no merge makes")
    ranks = {bytes(alphabet[char] for char in token): vocab[token] for token in reached}
    beyond = _beyond(spec)
    for byte in range(256):
        ranks.setdefault(bytes([byte]), beyond + byte)
    return ranks


def _beyond(spec: dict[str, Any]) -> int:
    added = [token["id"] for token in spec["added_tokens"]]
    return max([*spec["model"]["vocab"].values(), *added]) + 1


def _whole_tokens(added: list[dict[str, Any]]) -> dict[str, int]:
    tokens = [token for token in added if not token["special"]]
    for token in tokens:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise NotFast(f"its added token {token['content']!r} takes spaces or whole words")
    contents = sorted(token["content"] for token in tokens)
    for short, long in pairwise(contents):
        if long.startswith(short):
            raise NotFast(f"its added tokens {short!r} and {long!r} begin alike")
    return {token["content"]: token["id"] for token in tokens}


class FastEncoder:
    """Encodes by tiktoken what it can encode exactly; says of the other texts that it cannot."""

    def __init__(self, rules: FastRules, *, lengths: numpy.ndarray, beyond: int) -> None:
        """Takes the rules.

        Args:
            lengths: bytes of each id, below `beyond`.
            beyond: the first number that is no id.
        """
        try:
            import tiktoken
        except ImportError as error:
            raise NotFast("tiktoken is not installed (pip install tiktoken)") from error
        self.rules = rules
        self._mark = beyond + 256  # behind the ids of missing bytes
        self._beyond = beyond
        self._lengths = numpy.zeros(self._mark + 1, dtype=numpy.int64)
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
        """Ids of each text; None for one that has to go another way."""
        out: list[numpy.ndarray | None] = [None] * len(texts)
        group: list[int] = []
        num_chars = 0
        for place, text in enumerate(texts):
            if not self._takes(text):
                continue
            group.append(place)
            num_chars += len(text)
            if num_chars >= _GROUP_CHARS:
                self._encode_group(texts, group, out)
                group, num_chars = [], 0
        self._encode_group(texts, group, out)
        return out

    def _takes(self, text: str) -> bool:
        if len(text) > _LONG_BLANK and _has_long_blank(text):
            return False
        if text.isascii():
            return True
        return not self.rules.needs_nfc or unicodedata.is_normalized("NFC", text)

    def _encode_group(
        self, texts: Sequence[str], group: list[int], out: list[numpy.ndarray | None]
    ) -> None:
        """Encodes some texts by one call, and each alone where that does not work out."""
        if not group:
            return
        joined = SEPARATOR.join([texts[place] for place in group])
        ids = self._call(joined, self._allowed)
        marks = () if ids is None else numpy.flatnonzero(ids >= self._beyond)
        if ids is not None and len(marks) == len(group) - 1 and self._is_whole(joined, ids):
            starts = [0, *(marks + 1).tolist()]
            ends = [*marks.tolist(), len(ids)]
            for place, start, end in zip(group, starts, ends, strict=True):
                out[place] = ids[start:end]
            return
        for place in group:
            out[place] = self._encode_one(texts[place])

    def _encode_one(self, text: str) -> numpy.ndarray | None:
        ids = self._call(text, self._whole)
        if ids is None or (ids >= self._beyond).any() or not self._is_whole(text, ids):
            return None
        return ids

    def _is_whole(self, text: str, ids: numpy.ndarray) -> bool:
        """Whether the tokens are as long as the text: the expression left nothing out."""
        num_bytes = len(text) if text.isascii() else len(text.encode())
        return int(self._lengths[ids].sum()) == num_bytes

    def _call(self, text: str, allowed: set[str]) -> numpy.ndarray | None:
        try:
            return self._encoding.encode_to_numpy(
                text, allowed_special=allowed, disallowed_special=()
            )
        except BaseException as error:
            # a panic of tiktoken is no Exception; its class cannot be imported
            if type(error).__name__ != "PanicException":
                raise
            return None


def _has_long_blank(text: str) -> bool:
    """Whether white space fills a whole block of the text, as any run of two blocks does."""
    return any(
        text[start].isspace() and text[start : start + _LONG_BLANK].isspace()
        for start in range(0, len(text) - _LONG_BLANK + 1, _LONG_BLANK)
    )
