"""What a tokenizer.json says: its ids, its bytes, its fingerprint, and the object made of it."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
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
