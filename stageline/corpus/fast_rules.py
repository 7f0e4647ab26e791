"""Which tokenizers tiktoken can run exactly, and by which rules: byte-level BPE, mostly.

tiktoken cuts a text by one regular expression and merges the pair with the smallest id first. So
a tokenizer fits if its ids stand in the order of its merges, and its pre-tokenizers can be written
as one expression. `fast_rules` reads that from a tokenizer.json, or raises `NotFast` with the
reason. Encodes nothing itself.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stageline.corpus.tokenizer_json import (
    byte_alphabet,
    bytes_of_tokens,
    merge_pairs,
    normalizers,
    pre_tokenizers,
    vocab_size,
)

# what ByteLevel(use_regex=True) cuts by
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# ... between digits that Digits has taken out: to white space a digit is then the text's end
_BETWEEN_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|%s| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"


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


def fast_rules(spec: dict[str, Any]) -> FastRules:
    """The rules for tiktoken.

    Args:
        spec: a tokenizer.json.

    Raises:
        NotFast: it has something that tiktoken does not have.
    """
    _check_model(spec["model"])
    pattern = _pattern(pre_tokenizers(spec))
    kinds = normalizers(spec)
    if set(kinds) - {"NFC"}:
        raise NotFast(f"it normalises by {', '.join(kinds)}")
    return FastRules(
        pattern=pattern,
        ranks=_ranks(spec),
        whole=_whole_tokens(spec["added_tokens"]),
        needs_nfc=bool(kinds),
    )


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
    merged = [left + right for left, right in merge_pairs(model)]
    ids = [vocab[token] for token in merged]
    if any(before > after for before, after in pairwise(ids)):
        raise NotFast("its ids are not in the order of its merges")
    reached = {char for char in alphabet if char in vocab} | set(merged)
    added = {token["content"] for token in spec["added_tokens"]}
    if model.get("ignore_merges") and set(vocab) - reached - added:
        raise NotFast("it has whole words that no merge makes")
    ranks = dict(zip(bytes_of_tokens(reached), map(vocab.__getitem__, reached), strict=True))
    beyond = vocab_size(spec)
    for byte in range(256):
        ranks.setdefault(bytes([byte]), beyond + byte)
    return ranks


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
