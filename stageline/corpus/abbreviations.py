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
_KEYS = numpy.array(sorted({*_keys(_TITLES), *_keys(_BEFORE_NUMBERS)}), numpy.uint64)
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
    places = dots[:, None] - numpy.arange(1, _WIDTH + 1)
    letters = _FOLDED[numpy.minimum(codes[numpy.maximum(places, 0)], 255)]
    if len(dots) and dots[0] < _WIDTH:
        letters[places < 0] = 0
    nearest, second = letters[:, 0], letters[:, 1]
    first_codes = codes[numpy.maximum(dots - 1, 0)]
    is_capital = (first_codes >= ord("A")) & (first_codes <= ord("Z"))
    is_letter = (nearest >= ord("a")) & (nearest <= ord("z"))
    # initials are capitals; in `e.g.` and `p.m.` small letters follow a full stop
    is_initial = (is_capital & (second == 0)) | (is_letter & (second == _DOT))
    letters *= numpy.logical_and.accumulate(letters != 0, axis=1)
    keys = letters.view(numpy.uint64).ravel()
    found = numpy.minimum(_KEYS.searchsorted(keys), len(_KEYS) - 1)
    behind = codes[next_words]
    is_number = (behind >= ord("0")) & (behind <= ord("9"))
    return is_initial | ((_KEYS[found] == keys) & (_IS_TITLE[found] | is_number))
