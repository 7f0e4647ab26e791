"""Where sentences end in Chinese and Japanese text, which has no spaces."""

import numpy

from stageline.corpus.characters import CLOSER, COMMA, EAST_ASIAN, FULL_STOP, STOP, WHITE

_MOST_CLOSERS = 8
_DOT = ord(".")


def eastern_ends(
    codes: numpy.ndarray, flags: numpy.ndarray, *, is_space_enough: bool
) -> numpy.ndarray:
    """Ends inside the text: behind the last of `。！？` in a row and the quotes that close there.

    `!`, `?` and `…` count where an ideograph follows, and white space if that `is_space_enough`;
    no end goes before a comma (`“好！”，他说`).
    """
    stops = numpy.flatnonzero(flags & (FULL_STOP | STOP))
    stops = stops[(codes[stops] != _DOT) & (stops < len(codes) - 1)]
    is_last = (flags[stops + 1] & (FULL_STOP | STOP)) == 0
    stops = stops[is_last]
    ends = stops + 1
    for _ in range(_MOST_CLOSERS):
        is_closer = (flags[ends] & CLOSER) != 0
        if not is_closer.any():
            break
        ends += is_closer
        numpy.minimum(ends, len(codes) - 1, out=ends)
    behind = flags[ends]
    is_end = (behind & (COMMA | FULL_STOP | STOP | CLOSER)) == 0
    is_full = (flags[stops] & FULL_STOP) != 0
    is_full |= codes[ends] >= EAST_ASIAN
    if is_space_enough:
        is_full |= (behind & WHITE) != 0
    is_end &= is_full
    ends = ends[is_end]
    if len(ends) and (flags[ends[-1] :] & WHITE).all():
        ends = ends[:-1]  # the last sentence keeps the white space behind it
    return ends
