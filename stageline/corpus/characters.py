"""What a splitter asks of each character, as bits of one byte a character, for whole texts."""

from functools import cache

import numpy

WHITE = 1  # white space at which a line may be broken: not the no-break spaces
NEWLINE = 2
STOP = 4  # ends a sentence where white space follows
FULL_STOP = 8  # ends a sentence whatever follows
CLOSER = 16  # a quote or bracket that stays with the sentence before it
LOWER = 32  # a small letter
COMMA = 64  # the sentence goes on

_NEWLINES = "\n\v\f\x85\u2028\u2029"
_NO_BREAK = "\xa0\u2007\u202f"
_STOPS = ".!?…‽⁇⁈⁉"
_FULL_STOPS = "。！？｡।॥؟۔።"
_CLOSERS = "\"')]}”’»›）］｝」』】》〉〕〗＂＇｠｣"
_COMMAS = ",;:，；：、､،؛"
# beyond it: ideographs, kana, hangul and their punctuation, written without spaces
EAST_ASIAN = 0x2E80
# characters classed at a time: a table look-up of that many stays in the processor's cache
_BLOCK = 1 << 15


def classed(text: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(code point, bits) of each character; code points are bytes where the text is ASCII."""
    if text.isascii():
        raw = text.encode("ascii")
        bits = raw.translate(_table_of_bytes())
        return numpy.frombuffer(raw, numpy.uint8), numpy.frombuffer(bits, numpy.uint8)
    codes = numpy.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    table = _table()
    flags = numpy.empty(len(codes), numpy.uint8)
    for start in range(0, len(codes), _BLOCK):
        table.take(codes[start : start + _BLOCK], out=flags[start : start + _BLOCK], mode="clip")
    return codes, flags


@cache
def _table() -> numpy.ndarray:
    """Bits of each code point of the basic plane; the others (signs, old scripts) have none."""
    table = numpy.zeros(0x10001, numpy.uint8)
    for code in range(0x10000):
        letter = chr(code)
        if letter.isspace() and letter not in _NO_BREAK:
            table[code] |= WHITE
        if letter.islower():
            table[code] |= LOWER
    groups = (_NEWLINES, NEWLINE), (_STOPS, STOP), (_CLOSERS, CLOSER), (_COMMAS, COMMA)
    for letters, bit in (*groups, (_FULL_STOPS, FULL_STOP)):
        table[[ord(letter) for letter in letters]] |= bit
    return table


@cache
def _table_of_bytes() -> bytes:
    return _table()[:256].tobytes()
