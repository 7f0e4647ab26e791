"""Which tokenizers tiktoken can run exactly, and by which rules: byte-level BPE, mostly.

tiktoken cuts a text by one regular expression and merges the pair with the smallest id first. So
a tokenizer fits if its ids stand in the order of its merges, and its pre-tokenizers can be written
as one expression. `fast_rules` reads that from a tokenizer.json, or raises `NotFast` with the
reason. Encodes nothing itself.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

# parts that decide which ids a text gets, beside added tokens that are no control tokens
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
