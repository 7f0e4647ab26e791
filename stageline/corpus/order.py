"""Permutations that are computed, not stored: any place of an order of any size, in O(1) memory.

A Feistel network over a rectangle of just the size: a place is (left, right), and in turn one half
is shifted by a hash of the other, which can be undone, so no two places meet. What falls into the
few cells beyond `size` goes through once more until it lies inside (cycle walking). Integers only:
the same on every machine and in every version of NumPy.
"""

import numpy

_ROUNDS = 16  # at fewer, some orders of four to seven things come more often than others
_GOLDEN = 0x9E3779B97F4A7C15
_SHIFTS = tuple(numpy.uint64(shift) for shift in (30, 27, 31))
_FACTORS = tuple(numpy.uint64(factor) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Permutation:
    """An order of 0 .. size-1: `order(places)` are the numbers at these places.

    Args:
        size: of how many, from 1 on.
        seed: 0 <= seed < 2**63; another seed gives an unrelated order.
    """

    def __init__(self, size: int, seed: int) -> None:
        assert size > 0
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def __call__(self, places: numpy.ndarray) -> numpy.ndarray:
        """int64, of the shape of `places`, each of which is 0 <= place < size."""
        places = numpy.asarray(places, dtype=numpy.int64)
        flat = permute(places.reshape(-1), numpy.array([self.size]), numpy.array([self.seed]))
        return flat.reshape(places.shape)


def permute(places: numpy.ndarray, sizes: numpy.ndarray, seeds: numpy.ndarray) -> numpy.ndarray:
    """Each place in the order of its own size and seed: many orders in one call.

    Args:
        places: int64 [N], 0 <= place < its size.
        sizes, seeds: int64 [N], or [1] for all.

    Returns:
        int64 [N].
    """
    assert ((places >= 0) & (places < sizes)).all()
    sizes, keys = sizes.astype(numpy.uint64), _hash(seeds.astype(numpy.uint64))
    widths = numpy.ceil(numpy.sqrt(sizes)).astype(numpy.uint64)
    widths += widths % numpy.uint64(2)  # shifts along an odd width make even permutations alone
    heights = (sizes + widths - numpy.uint64(1)) // widths
    numbers = _shuffled(places.astype(numpy.uint64), widths, heights, keys)
    if len(sizes) == 1:
        sizes, widths, heights, keys = (
            numpy.broadcast_to(array, places.shape) for array in (sizes, widths, heights, keys)
        )
    outside = numpy.flatnonzero(numbers >= sizes)
    while len(outside):
        walked = _shuffled(numbers[outside], widths[outside], heights[outside], keys[outside])
        numbers[outside] = walked
        outside = outside[walked >= sizes[outside]]
    return numbers.astype(numpy.int64)


def _shuffled(
    cells: numpy.ndarray, widths: numpy.ndarray, heights: numpy.ndarray, keys: numpy.ndarray
) -> numpy.ndarray:
    """A permutation of all cells of a rectangle of `widths` x `heights`."""
    left, right = cells // heights, cells % heights
    for turn in range(0, _ROUNDS, 2):
        left = (left + _hash(right + _round_key(keys, turn)) % widths) % widths
        right = (right + _hash(left + _round_key(keys, turn + 1)) % heights) % heights
    return left * heights + right


def _round_key(keys: numpy.ndarray, turn: int) -> numpy.ndarray:
    # halves are far below 2**32, so rounds share no input of the hash
    return keys ^ numpy.uint64((turn + 1) * _GOLDEN % 2**64)


def _hash(values: numpy.ndarray) -> numpy.ndarray:
    """SplitMix64's; wraps around at 2**64."""
    values = (values ^ (values >> _SHIFTS[0])) * _FACTORS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _FACTORS[1]
    return values ^ (values >> _SHIFTS[2])
