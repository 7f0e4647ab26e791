"""Lines that begin with the sign of a list item: `- `, `* `, `1. `, `a) `, `12) `, `(a) `."""

import numpy

_BULLETS = "-*+#>|•·◦–—"
_LABEL_ENDS = ".)"
_SPACES = " \t\n\v\f\r"
_DIGITS = "0123456789"
_ANY = None
# what stands in the first four places of each kind of item
_KINDS = (
    (_BULLETS, _SPACES, _ANY, _ANY),
    (_ANY, _LABEL_ENDS, _SPACES, _ANY),
    (_ANY, _DIGITS, _LABEL_ENDS, _SPACES),
    ("(", _ANY, _LABEL_ENDS, _SPACES),
)
# beyond the bullets no sign differs from another
_SIZE = 0x2600
_STEPS = numpy.arange(4)
_SPACE = ord(" ")


def _table() -> numpy.ndarray:
    """[place, code]: a bit for each kind that has this code in this place."""
    table = numpy.zeros((4, _SIZE), numpy.uint8)
    for bit, kind in enumerate(_KINDS):
        for place, signs in enumerate(kind):
            codes = slice(None) if signs is None else [ord(sign) for sign in signs]
            table[place, codes] |= 1 << bit
    return table


_TABLE = _table()


def is_item(codes: numpy.ndarray, words: numpy.ndarray) -> numpy.ndarray:
    """Which of the words begin a list item.

    Args:
        codes: code point of each character of the text.
        words: places of the first words of lines.
    """
    places = words[:, None] + _STEPS
    near = codes.take(places, mode="clip")
    if len(words) and words[-1] + len(_STEPS) > len(codes):
        near[places >= len(codes)] = _SPACE  # as if a blank line followed the text
    if codes.itemsize > 1:
        near = numpy.minimum(near, _SIZE - 1)
    kinds = _TABLE.take(near + _STEPS * _SIZE)
    return numpy.bitwise_and.reduce(kinds, axis=1) != 0
