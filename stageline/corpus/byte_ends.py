"""Where tokens end, in bytes of the text: from the character offsets of the tokenizers library."""

from collections.abc import Sequence

import numpy


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
