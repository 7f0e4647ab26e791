"""Texts handed to a splitter in stretches of the size it is quickest with.

Short texts are joined by blank lines: one ends a sentence whatever stands on either side, and no
rule of ours looks past it. Long texts are taken in stretches that end at a newline: to judge the
gaps behind it the rules need one character before it, to judge itself the first ones of the next
word.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy

# places inside the text where sentences end
Finder = Callable[[str], numpy.ndarray]

# characters: less is spent on calls, more on memory that no cache holds
_BLOCK = 1 << 16
_BLANK_LINE = "\n\n"
# of a word behind a newline: `(a) `
_LOOK_AHEAD = 4
_WORD = re.compile(r"\S")


def in_blocks(find: Finder, text: str) -> numpy.ndarray:
    """The ends in a text and the end of the text."""
    if not text:
        return numpy.zeros(0, numpy.int64)
    if len(text) <= 2 * _BLOCK:
        return numpy.append(find(text), len(text))
    found = []
    for start, stop, behind in _blocks(text):
        first = max(start - 1, 0)
        ends = find(text[first:behind])
        ends += first
        found.append(ends[ends.searchsorted(start, "right") : ends.searchsorted(stop, "right")])
    return numpy.concatenate([*found, [len(text)]])


def _blocks(text: str) -> Iterator[tuple[int, int, int]]:
    """(start, stop, how far to look): newlines behind a word, and the first signs of the next."""
    start = 0
    while len(text) - start > 2 * _BLOCK:
        stop = text.find("\n", start + _BLOCK)
        while stop > 0 and text[stop - 1].isspace():
            stop = text.find("\n", stop + 1)
        word = _WORD.search(text, stop) if stop > 0 else None
        if word is None:  # white space to the end: no word behind it, no end before it
            break
        yield start, stop, word.start() + _LOOK_AHEAD
        start = stop
    yield start, len(text), len(text)


def all_at_once(find: Finder, texts: Sequence[str]) -> list[numpy.ndarray]:
    """The ends in each text and its end, in the order of the texts."""
    found: list[numpy.ndarray | None] = [None] * len(texts)
    # apart: one letter that is not ASCII makes all that it is joined to slower
    for is_plain in (True, False):
        chosen = [place for place, text in enumerate(texts) if text.isascii() == is_plain]
        for batch in _batches(texts, chosen):
            ends = _joined(find, [texts[place] for place in batch])
            for place, text_ends in zip(batch, ends, strict=True):
                found[place] = text_ends
    return [ends for ends in found if ends is not None]


def _batches(texts: Sequence[str], chosen: list[int]) -> Iterator[list[int]]:
    batch, size = [], 0
    for place in chosen:
        if batch and size + len(texts[place]) > _BLOCK:
            yield batch
            batch, size = [], 0
        batch.append(place)
        size += len(texts[place])
    if batch:
        yield batch


def _joined(find: Finder, texts: list[str]) -> list[numpy.ndarray]:
    if len(texts) == 1:
        return [in_blocks(find, texts[0])]
    whole = in_blocks(find, _BLANK_LINE.join(texts))
    lengths = numpy.array([len(text) for text in texts])
    starts = numpy.cumsum(lengths + len(_BLANK_LINE)) - lengths - len(_BLANK_LINE)
    firsts = whole.searchsorted(starts, "right").tolist()
    behind = whole.searchsorted(starts + lengths, "right").tolist()
    ends = []
    for text, start, first, stop in zip(texts, starts.tolist(), firsts, behind, strict=True):
        inside = whole[first:stop] - start
        if not len(inside):  # white space alone
            inside = numpy.full(min(len(text), 1), len(text))
        elif text:  # the last sentence keeps the white space behind it
            inside[-1] = len(text)
        ends.append(inside)
    return ends
