"""Where a sentence that is too long for a segment may be cut, the best places first.

All functions take the UTF-8 bytes of a text and give byte offsets, rising.
"""

import numpy

from stageline.corpus.rising import union

_NEWLINE = ord("\n")
_SPACES = numpy.zeros(256, bool)
_SPACES[list(b" \t\n\v\f\r")] = True
_CLAUSE_ENDS = numpy.zeros(256, bool)
_CLAUSE_ENDS[list(b",;:.!?")] = True
# last byte of each sign, under the bytes before it
_WIDE_CLAUSE_ENDS = ((0xEF, 0xBC, b"\x8c\x9b\x9a\x81\x9f"), (0xE3, 0x80, b"\x81\x82"))


def before_newlines(data: numpy.ndarray) -> numpy.ndarray:
    """Before each run of white space that begins with a newline."""
    return numpy.flatnonzero(data == _NEWLINE)


def after_clauses(data: numpy.ndarray) -> numpy.ndarray:
    """Behind `, ; : . ! ?` before white space, and behind `， ； ： 、 。 ！ ？`."""
    is_end = _CLAUSE_ENDS[data[:-1]] & _SPACES[data[1:]]
    places = [numpy.flatnonzero(is_end) + 1]
    for first, second, lasts in _WIDE_CLAUSE_ENDS:
        found = numpy.flatnonzero((data[:-2] == first) & (data[1:-1] == second)) + 2
        places.append(found[numpy.isin(data[found], list(lasts))] + 1)
    return union(*places)


def before_spaces(data: numpy.ndarray) -> numpy.ndarray:
    """Before each run of white space."""
    is_space = _SPACES[data]
    return numpy.flatnonzero(is_space[1:] & ~is_space[:-1]) + 1


LEVELS = (before_newlines, after_clauses, before_spaces)
