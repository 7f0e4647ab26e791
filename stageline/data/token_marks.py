"""Which kinds of pieces each token of a text touches, all tokens at once."""

from collections.abc import Sequence

import numpy

from stageline.data.rendered import Piece

_USER, _FIXED, _TARGET, _MARKED, _ANSWER, _IMAGE = (1 << place for place in range(6))


class TokenMarks:
    """Marks of tokens that cover the characters from `starts` to `ends`.

    A token across a border touches the pieces on both sides, one of no characters none.

    Args:
        spans: (start, end, piece), one behind the other.
        starts, ends: of each token, in characters.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, int, Piece]],
        starts: numpy.ndarray,
        ends: numpy.ndarray,
    ) -> None:
        full = [span for span in spans if span[0] < span[1]]
        kinds = [_kinds(piece) for _, _, piece in full]
        span_ends = numpy.array([end for _, end, _ in full], dtype=numpy.int64)
        first = span_ends.searchsorted(starts, side="right")
        last = span_ends.searchsorted(ends, side="left")
        # behind the last piece, and for tokens of no characters, there is nothing
        touched = numpy.array([*kinds, 0], dtype=numpy.int64)[first]
        for place in (last > first).nonzero()[0]:  # few: tokens across a border
            for kind in kinds[first[place] + 1 : last[place] + 1]:
                touched[place] |= kind
        touched[ends <= starts] = 0
        self._touched = touched

    @property
    def is_user(self) -> numpy.ndarray:
        """It touches text from the data."""
        return self._touched & _USER != 0

    @property
    def is_text(self) -> numpy.ndarray:
        """It touches text from the data alone."""
        return self._touched & (_USER | _FIXED) == _USER

    @property
    def is_cuttable(self) -> numpy.ndarray:
        """It touches text from the data alone, none that is supervised."""
        return self._touched & (_USER | _FIXED | _TARGET) == _USER

    @property
    def is_target(self) -> numpy.ndarray:
        """It touches what is supervised."""
        return self._touched & _TARGET != 0

    @property
    def is_marked(self) -> numpy.ndarray:
        """It touches what a loss is interested in."""
        return self._touched & _MARKED != 0

    @property
    def is_answer(self) -> numpy.ndarray:
        """It touches an answer, supervised or not."""
        return self._touched & _ANSWER != 0

    @property
    def is_image(self) -> numpy.ndarray:
        """It touches an image."""
        return self._touched & _IMAGE != 0


def _kinds(piece: Piece) -> int:
    return (
        (_USER if piece.is_user else _FIXED)
        | (_TARGET | _ANSWER if piece.is_target else 0)
        | (_MARKED if piece.is_marked else 0)
        | (_ANSWER if piece.is_answer else 0)
        | (_IMAGE if piece.is_image else 0)
    )
