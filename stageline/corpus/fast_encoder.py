"""The ids of a byte-level BPE tokenizer by tiktoken, six times as fast as by `tokenizers`.

tiktoken cuts a text by one regular expression and merges the pair with the smallest id first. A
tokenizer fits if its ids are in the order of its merges and its pre-tokenizers are one expression.
`Encoder.check` compares both and drops tiktoken where an id differs.
"""

import random
import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy

Spec = dict[str, Any]
# the expression of ByteLevel(use_regex=True)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# ... between digits that Digits has taken out: to white space a digit is then the text's end
_BETWEEN_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|%s| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# a run of white space of about 900,000 characters overflows the stack of tiktoken's expressions
_LONG_BLANK = re.compile(r"(?<!\s)\s{32768}")


class NotFast(ValueError):
    """tiktoken cannot give exactly the ids of this tokenizer; the message says why."""


class FastEncoder:
    """Encodes by tiktoken what it can encode exactly; leaves out the other texts.

    Args:
        spec: a tokenizer.json; `steps` are its pre-tokenizers, `normalizers` the kinds of those.

    Raises:
        NotFast: the tokenizer has something that tiktoken does not have.
    """

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
        merged = ["".join(p.split(" ") if isinstance(p, str) else p) for p in model["merges"]]
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
        self._whole = [one["content"] for one in added if not one["special"]]  # as <think>

    def encode(self, text: str) -> numpy.ndarray | None:
        """Return the ids (uint32) of a text; None for one that `tokenizers` has to encode.

        Raises:
            UnicodeEncodeError: a text holds half a surrogate pair.
        """
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


_TEXTS = (
    "I'm, you're, he's, we'd, they'll, I've, can't; I'M, YOU'RE, HE'S, WE'D, THEY'LL, I'VE, CAN'T",
    "'s's 's x's'll ''' 'ſ 'S ’s ’ll it ’ s",
    "  two spaces   three    four \t tab\t\ttabs \n newline\n\n\n\r\nCRLF\r\n\r\n\rCR alone \r",
    "\n\n\n   \n\t \n",
    "ends in spaces   ",
    "0 12 123 1234 12345 123456 1234567 3.14159 1,000,000 1e-9 0x7F v2.0.1 a1b2c3   5  7 \n8\n\n9",
    "½ ² ٣ ४५ Ⅷ ⑨ 一二三 １２３ x² y₃  ½\n²",
    "/usr/share/doc/a-b_c.d+e --long-option=VALUE -x <file> || && >> 2>&1 $HOME ${x%%.*} #!/bin/sh",
    "<|endoftext|> <|im_start|>user\nhi<|im_end|> <s></s> <pad> [INST] [/INST] <unk> <|eot_id|>",
    "中文没有空格。下一句！“引号”？！……《书名》，、；：（括号）ＡＢＣ　全角空格",
    "ひらがなカタカナ漢字 한국어 문장입니다. ไทยไม่มีช่องว่าง हिन्दी में संयुक्ताक्षर العربية עברית",
    "é e\u0301 ñ n\u0303 Å ÅÅ ﬁ ﬀ ㎢ ﷺ ǆ ß ẞ İ ı Ωmega µ",
    "😀👍🏽👨‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪🇨🇳 a😀b 😀 😀  😀",
    "\u200b\u200d\ufeff\u00a0\u2003\u3000\u2028\u2029\x85\x0b\x0c\x1c\x1f\u00ad\u180e\u2060",
    "a\u00a0b \u00a0 c\u2003 d \u3000e\x0b\x0cf\x85\x85 g\x1c\x1dh",
    "\x00 nul \x00\x00 \x01\x02\x03\x04\x05\x06\x07\x08\x0e\x0f\x10\x13\x14\x16\x1b\x7f end",
    "\u0378 \ufffe \uffff \U0001f9ff \U000e0001 \U0010ffff \ue000 \U00040000 \U000f0000",
    "a" * 3000 + " " + "=" * 500 + "\n" + "-" * 500 + " " * 700 + "x" + "\n" * 700 + "的" * 700,
)


def check_texts(tokens: Sequence[bytes] | None) -> list[str]:
    """Return texts to compare on: odd ones, 150 mixtures with tokens, and 2,000 single tokens."""
    words = [token.decode(errors="ignore") for token in tokens or [b"a"]]
    chance, odd = random.Random(0), (*" \n\t'7aBé中😀-", "  ", "'s", "42", "...", "\r\n")
    mixed = [
        "".join(chance.choice(words if chance.random() < 0.7 else odd) for _ in range(60))
        for _ in range(150)
    ]
    return [*_TEXTS, *mixed, *words[:: max(1, len(words) // 2000)]]
