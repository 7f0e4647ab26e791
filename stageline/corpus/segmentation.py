"""Joins neighbouring units (sentences, or tokens) into segments of at most `limit` tokens.

Pure integers: knows neither text nor tokenizers. Both functions give the fewest segments there
can be. Forward greedy is optimal in that: where its k-th segment ends, no other cutting's k-th
segment ends later, as a segment that starts no earlier and takes all that fits ends no earlier.
"""

from math import isqrt

import numpy

from stageline.corpus.rising import differences

# more than any sum of squares of a document: 2^31 tokens in one segment
_NEVER = numpy.int64(2**62)
# a table of more cells than this is walked by the strip of its cells that can matter
_DENSE_CELLS = 12_000
MOST_AT_ONCE = 4096  # segments that are evened together: four million tokens at 1,024


def fewest(unit_lengths: numpy.ndarray, limit: int) -> numpy.ndarray:
    """Each segment takes as many units as fit.

    Args:
        unit_lengths: tokens of each unit, positive, at most `limit`.
        limit: tokens of a segment at most.

    Returns:
        int64: how many units lie before each segment's end; rising, the last is all of them.
    """
    ends = _borders(unit_lengths)
    return numpy.array(_forward(ends, limit), dtype=numpy.int64)


def even(unit_lengths: numpy.ndarray, limit: int) -> numpy.ndarray:
    """Of all cuttings into the fewest segments the one with the least sum of squared lengths.

    As the number of segments is fixed, so is their mean: the least sum of squares is the least
    spread. Of several such cuttings the one whose cuts all lie latest (there is one: of two best
    cuttings the later one at every cut is a best one too, as squares are convex).

    The work grows with the square of the number of segments, so a document of more than
    `MOST_AT_ONCE` is evened stretch by stretch: still the fewest, and as even but for the borders
    of stretches.

    Args and result as of `fewest`.
    """
    return _even(_borders(unit_lengths), limit)


def _even(borders: numpy.ndarray, limit: int) -> numpy.ndarray:
    latest = _forward(borders, limit)
    if len(latest) <= 1:
        return numpy.array(latest, dtype=numpy.int64)
    if len(latest) == 2:
        return numpy.array([_middle(borders), latest[1]], dtype=numpy.int64)
    pieces = _equal_pieces(borders, len(latest))
    if pieces is not None:
        return pieces
    if len(latest) > MOST_AT_ONCE:
        return _by_stretches(borders, latest, limit)
    return _least_squares(borders, latest, limit)


def _borders(unit_lengths: numpy.ndarray) -> numpy.ndarray:
    """Tokens before each border between units, both outer ones included."""
    borders = numpy.zeros(len(unit_lengths) + 1, dtype=numpy.int64)
    numpy.cumsum(unit_lengths, out=borders[1:])
    return borders


def _forward(borders: numpy.ndarray, limit: int) -> list[int]:
    """Borders where greedy segments end: nothing ends its k-th segment later."""
    ends: list[int] = []
    last, end = len(borders) - 1, 0
    while end < last:
        after = int(borders.searchsorted(borders[end] + limit, "right")) - 1
        assert after > end, f"unit {end} is longer than {limit}"
        ends.append(end := after)
    return ends


def _backward(borders: numpy.ndarray, limit: int) -> list[int]:
    """Borders where segments end if the last ones take what fits: nothing ends its k-th earlier."""
    ends, end = [], len(borders) - 1
    while end > 0:
        ends.append(end)
        end = int(borders.searchsorted(borders[end] - limit, "left"))
    return ends[::-1]


def _middle(borders: numpy.ndarray) -> int:
    """The border nearest to the middle, the later one of two. Where any fits, this one does."""
    total = int(borders[-1])
    # twice: a middle between two tokens stays an integer
    after = int(borders.searchsorted((total + 1) // 2, "left"))
    is_before_nearer = total - 2 * int(borders[after - 1]) < 2 * int(borders[after]) - total
    return after - 1 if is_before_nearer else after


def _equal_pieces(borders: numpy.ndarray, num_pieces: int) -> numpy.ndarray | None:
    """Units of one token: lengths that differ by one at most, the longer ones first.

    The first and the last unit may be longer (BOS and EOS), up to a piece. None: other units.
    """
    num_units, total = len(borders) - 1, int(borders[-1])
    first, inner = int(borders[1]), int(borders[-2] - borders[1])
    length, num_longer = divmod(total, num_pieces)
    if inner != num_units - 2 or max(first, total - inner - first) > length:
        return None
    piece = numpy.arange(1, num_pieces + 1, dtype=numpy.int64)
    ends = piece * length + numpy.minimum(piece, num_longer) - (first - 1)
    ends[-1] = num_units
    return ends


def _by_stretches(borders: numpy.ndarray, latest: list[int], limit: int) -> numpy.ndarray:
    """The first stretch evened, then the rest; they have as many segments as all together."""
    num_pieces = len(latest)
    count = num_pieces // -(-num_pieces // MOST_AT_ONCE)
    ideal = int(borders.searchsorted(borders[-1] * count / num_pieces))
    # between both any border leaves as many segments before and behind it as there have to be
    earliest = _backward(borders, limit)
    cut = min(max(ideal, earliest[count - 1]), latest[count - 1])
    first = _even(borders[: cut + 1], limit)
    return numpy.concatenate([first, cut + _even(borders[cut:] - borders[cut], limit)])


def _least_squares(borders: numpy.ndarray, latest: list[int], limit: int) -> numpy.ndarray:
    """Dynamic programming over the k-th cut, in the band where the best k-th cut can lie."""
    earliest = _backward(borders, limit)
    num_pieces, total = len(latest), int(borders[-1])
    length = total // num_pieces
    squares = _squares_of_a_guess(borders, earliest, limit)
    # what each piece of the best cutting adds to that of equal pieces is (n-length)(n-length-1),
    # no negative number; none adds more than all pieces of the guess
    added = squares - (2 * length + 1) * total + length * (length + 1) * num_pieces
    reach = isqrt(4 * added + 1) // 2 + 1
    shortest, longest = max(1, length + 1 - reach), min(limit, length + reach)
    low, high = _band(borders, earliest, latest, squares - total * total / num_pieces)
    choices = []
    places = borders[low[0] : high[0] + 1][::-1]  # descending: argmin takes the latest of equals
    costs = places * places
    for cut in range(1, num_pieces):
        targets = borders[low[cut] : high[cut] + 1][::-1]
        costs, choice = _step(places, costs, targets, shortest, longest)
        choices.append(choice)
        places = targets
    return _walk_back(choices, high)


def _step(
    sources: numpy.ndarray,
    costs: numpy.ndarray,
    targets: numpy.ndarray,
    shortest: int,
    longest: int,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """For each target the cheapest way to it, and which source that comes from."""
    if len(sources) * len(targets) > _DENSE_CELLS:
        return _strip_step(sources, costs, targets, shortest, longest)
    lengths = targets[:, None] - sources
    table = lengths * lengths
    table += costs
    if targets[0] - sources[-1] > longest:
        table[lengths > longest] = _NEVER
    choice = table.argmin(axis=1)
    return table.min(axis=1), choice


def _strip_step(
    sources: numpy.ndarray,
    costs: numpy.ndarray,
    targets: numpy.ndarray,
    shortest: int,
    longest: int,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The same; looks only at lengths from `shortest` to `longest`."""
    rising = -sources
    first = rising.searchsorted(shortest - targets, "left")
    behind = rising.searchsorted(longest - targets, "right")
    width = max(1, int((behind - first).max()))
    places = first[:, None] + numpy.arange(width)
    numpy.minimum(places, len(sources) - 1, out=places)
    lengths = targets[:, None] - sources[places]
    table = lengths * lengths
    table += costs[places]
    table[lengths > longest] = _NEVER  # none is shorter than `shortest`
    best = table.argmin(axis=1)
    rows = numpy.arange(len(targets))
    return table[rows, best], places[rows, best]


def _walk_back(choices: list[numpy.ndarray], high: list[int]) -> numpy.ndarray:
    ends = numpy.empty(len(choices) + 1, dtype=numpy.int64)
    place = 0
    ends[-1] = high[-1]
    for cut in range(len(choices) - 1, -1, -1):
        place = int(choices[cut][place])
        ends[cut] = high[cut] - place
    return ends


def _squares_of_a_guess(borders: numpy.ndarray, earliest: list[int], limit: int) -> int:
    """What the squares of a good cutting sum up to. Those of the best are no more."""
    num_pieces, total = len(earliest), int(borders[-1])
    ideal = numpy.arange(1, num_pieces) * (total / num_pieces)
    after = borders.searchsorted(ideal)
    after -= ideal - borders[after - 1] < borders[after] - ideal
    lengths = differences(numpy.append(borders[after], total))
    if lengths.max() > limit:
        lengths = _careful_lengths(borders, earliest, limit)
    return int((lengths * lengths).sum())


def _careful_lengths(borders: numpy.ndarray, earliest: list[int], limit: int) -> numpy.ndarray:
    """Piece by piece: a share of what is left, within what fits and what lets the rest fit."""
    num_pieces, total, end = len(earliest), int(borders[-1]), 0
    ends: list[int] = []
    for cut in range(num_pieces - 1):
        start = int(borders[end])
        share = (total - start) / (num_pieces - cut)
        reach = int(borders.searchsorted(start + limit, "right")) - 1
        wish = int(borders.searchsorted(start + share))
        wish -= int(2 * (start + share) < borders[wish - 1] + borders[wish])
        ends.append(end := min(reach, max(wish, earliest[cut])))
    return differences(borders[[*ends, len(borders) - 1]])


def _band(
    borders: numpy.ndarray, earliest: list[int], latest: list[int], excess: float
) -> tuple[list[int], list[int]]:
    """First and last border where each cut of the best cutting can lie.

    By Cauchy's inequality a cut after `j` of `k` pieces that is `d` tokens off its ideal place
    costs at least d^2/j + d^2/(k-j), which is no more than what the guess costs.
    """
    num_pieces, total = len(latest), int(borders[-1])
    num_before = numpy.arange(1, num_pieces)
    ideal = num_before * (total / num_pieces)
    share = num_before * (num_pieces - num_before) / num_pieces
    off = numpy.sqrt(max(excess, 0.0) * share) + 1e-3
    low = numpy.maximum(borders.searchsorted(ideal - off, "left"), earliest[:-1])
    high = numpy.minimum(borders.searchsorted(ideal + off, "right") - 1, latest[:-1])
    return [*low.tolist(), latest[-1]], [*high.tolist(), latest[-1]]
