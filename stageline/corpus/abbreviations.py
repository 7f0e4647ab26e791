"""Full stops that end no sentence: `Mr. Smith`, `J. Smith`, `U.S. Army`, `Fig. 3`, `1. Item`."""

import numpy

# never the last word of a sentence
_TITLES = """
    mr mrs ms dr prof gen col lt capt cmdr sgt gov sen rep hon rev fr mme mlle messrs st mt
    vs cf viz al fig figs eq eqs sec sect ch chap ref refs ed eds vol vols app approx resp ca
""".split()
# only before a number is it an abbreviation: `No. 5`, but `He said no. Then`
_BEFORE_NUMBERS = """
    no nos nr p pp par art jan feb mar apr jun jul aug sep sept oct nov dec col line ver v r
""".split()
_WIDTH = 8
_STEPS = numpy.arange(1, _WIDTH + 1)
_DOT = ord(".")
# stands for letters that are in no abbreviation, and for what joins words
_JOINS = 255


def _folded() -> numpy.ndarray:
    """Byte -> small letter, digit, `.`, or 0 where a word ends."""
    table = numpy.zeros(256, numpy.uint8)
    table[0x80:] = _JOINS
    for sign in "'_-@/\\":
        table[ord(sign)] = _JOINS
    for sign in ".0123456789abcdefghijklmnopqrstuvwxyz":
        table[ord(sign)] = table[ord(sign.upper())] = ord(sign)
    return table


def _keys(words: list[str]) -> list[int]:
    """Words as the eight bytes before their full stop, the nearest one first."""
    rows = [word.encode()[::-1].ljust(_WIDTH, b"\0") for word in words]
    return numpy.frombuffer(b"".join(rows), numpy.uint64).tolist()


_FOLDED = _folded()
# the last one is no word: what is behind all others finds it
_KEYS = numpy.array(sorted({*_keys(_TITLES), *_keys(_BEFORE_NUMBERS), 2**64 - 1}), numpy.uint64)
_IS_TITLE = numpy.isin(_KEYS, _keys(_TITLES))


def is_abbreviation(
    codes: numpy.ndarray, dots: numpy.ndarray, next_words: numpy.ndarray
) -> numpy.ndarray:
    """Which of the full stops belong to a word.

    Args:
        codes: code point of each character.
        dots: places of single full stops.
        next_words: place of the first character of the word behind each.
    """
    places = dots[:, None] - _STEPS
    signs = codes.take(places, mode="clip")
    letters = _FOLDED.take(signs, mode="clip")
    if len(dots) and dots[0] < _WIDTH:
        letters[places < 0] = 0
    nearest, second = letters[:, 0], letters[:, 1]
    # initials are capitals; in `e.g.` and `p.m.` small letters follow a full stop
    is_initial = (second == 0) & _is_within(signs[:, 0], "A", "Z")
    is_initial |= (second == _DOT) & _is_within(nearest, "a", "z")
    letters *= numpy.logical_and.accumulate(letters, axis=1)
    keys = letters.view(numpy.uint64).ravel()
    found = _KEYS.searchsorted(keys)
    is_word = _IS_TITLE.take(found) | _is_within(codes.take(next_words), "0", "9")
    return is_initial | (is_word & (_KEYS.take(found) == keys))


def _is_within(codes: numpy.ndarray, first: str, last: str) -> numpy.ndarray:
    # unsigned: what is below the first wraps round to far above the last
    return codes - codes.dtype.type(ord(first)) <= ord(last) - ord(first)
