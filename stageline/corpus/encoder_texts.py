"""Texts on which two ways to encode are compared before one is trusted in place of the other."""

import random
from collections.abc import Sequence

_TEXTS = (
    "Plain words, then a full stop. Another sentence; it isn't long!",
    "I'm, you're, he's, we'd, they'll, I've, can't; I'M, YOU'RE, HE'S, WE'D, THEY'LL, I'VE, CAN'T",
    "'s's 's x's'll ''' 'ſ 'S ’s ’ll it ’ s",
    "  two spaces   three    four \t tab\t\ttabs \n newline\n\n\n\r\nCRLF\r\n\r\n\rCR alone \r",
    " ",
    "   ",
    "\n",
    "\n\n\n   \n\t \n",
    "ends in spaces   ",
    "ends in newlines\n\n",
    "0 12 123 1234 12345 123456 1234567 3.14159 1,000,000 1e-9 0x7F v2.0.1 a1b2c3   5  7 \n8\n\n9",
    "½ ² ٣ ४५ Ⅷ ⑨ 一二三 １２３ x² y₃  ½\n²",
    "def f(x):\n    if x == 1:\n\t\treturn {'a': [1, 2], \"b\": None}  # why?\n\n\n",
    "/usr/share/doc/a-b_c.d+e --long-option=VALUE -x <file> || && >> 2>&1 $HOME ${x%%.*} #!/bin/sh",
    "<|endoftext|> <|im_start|>user\nhi<|im_end|> <s></s> <pad> [INST] [/INST] <unk> <|eot_id|>",
    "CamelCase camelCase HTTPServer ALLCAPS iPhone McDonald's o'clock rock'n'roll",
    "中文没有空格。下一句！“引号”？！……《书名》，、；：（括号）ＡＢＣ　全角空格",
    "ひらがなカタカナ漢字 한국어 문장입니다. ไทยไม่มีช่องว่าง हिन्दी में संयुक्ताक्षर العربية עברית",
    "é e\u0301 ñ n\u0303 Å ÅÅ ﬁ ﬀ ㎢ ﷺ ǆ ß ẞ İ ı Ωmega µ",
    "😀👍🏽👨‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪🇨🇳 a😀b 😀 😀  😀",
    "\u200b\u200d\ufeff\u00a0\u2003\u3000\u2028\u2029\x85\x0b\x0c\x1c\x1f\u00ad\u180e\u2060",
    "a\u00a0b \u00a0 c\u2003 d \u3000e\x0b\x0cf\x85\x85 g\x1c\x1dh",
    "\x00 nul \x00\x00 \x01\x02\x03\x04\x05\x06\x07\x08\x0e\x0f\x10\x13\x14\x16\x1b\x7f end",
    "\u0378 \ufffe \uffff \U0001f9ff \U000e0001 \U0010ffff \ue000 \U00040000 \U000f0000",
    "a" * 3000 + " " + "=" * 500 + "\n" + "-" * 500 + " " * 700 + "x" + "\n" * 700 + "的" * 700,
    "aGVsbG8gd29ybGQ" * 60 + " https://www.example.org/a/b?c=d&e=f#g me@example.org",
)
_NUM_MIXED = 150
_PIECES = (
    " ",
    "  ",
    "\n",
    "\t",
    "'s",
    "'",
    "7",
    "42",
    "a",
    "B",
    "é",
    "中",
    "😀",
    "-",
    "...",
    "\r\n",
)


def check_texts(tokens: Sequence[bytes] | None, *, num_single: int = 2000) -> list[str]:
    """The texts: fixed ones, mixtures of tokens and odd characters, and single tokens.

    Args:
        tokens: bytes of each id of a byte-level tokenizer.
        num_single: so many tokens, spread over the ids, also come alone.
    """
    words = []
    for token in tokens or ():
        try:
            words.append(token.decode())
        except UnicodeDecodeError:
            continue
    words = words or ["a"]
    chance = random.Random(0)
    mixed = [
        "".join(
            chance.choice(words) if chance.random() < 0.7 else chance.choice(_PIECES)
            for _ in range(60)
        )
        for _ in range(_NUM_MIXED)
    ]
    step = max(1, len(words) // num_single)
    return [*_TEXTS, *mixed, *words[::step]]
