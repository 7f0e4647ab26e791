"""Which kinds of pieces each token of a text touches, all tokens at once."""

from collections.abc import Callable, Sequence

import numpy

from stageline.data.rendered import Piece

_KINDS: tuple[Callable[[Piece], bool], ...] = (
    lambda piece: piece.is_user,
    lambda piece: not piece.is_user,
    lambda piece: piece.is_target,
    lambda piece: piece.is_marked,
    lambda piece: piece.is_target or piece.is_answer,
    lambda piece: piece.is_image,
)


class TokenMarks:
    """Marks of tokens that cover the characters from `starts` to `ends`.

    A token across a border touches the pieces on both sides.

    Args:
        spans: (start, end, piece), one behind the other.
        starts, ends: of each token, in characters.

    Attributes:
        is_user, is_target, is_marked, is_answer, is_image: it touches such a piece.
        is_text: it touches text from the data alone.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, int, Piece]],
        starts: numpy.ndarray,
        ends: numpy.ndarray,
    ) -> None:
        full = [span for span in spans if span[0] < span[1]]
        kinds = numpy.array(
            [[kind(piece) for kind in _KINDS] for _, _, piece in full], dtype=numpy.int64
        ).reshape(len(full), len(_KINDS))
        before = numpy.zeros((len(full) + 1, len(_KINDS)), dtype=numpy.int64)
        numpy.cumsum(kinds, axis=0, out=before[1:])
        first = numpy.searchsorted([span[1] for span in full], starts, side="right")
        behind = numpy.searchsorted([span[0] for span in full], ends, side="left")
        behind = numpy.where(ends > starts, behind, first)  # a token of no characters has no marks
        touches = before[numpy.maximum(behind, first)] > before[first]
        user, fixed, target, marked, answer, image = touches.T
        self.is_user, self.is_target, self.is_marked = user, target, marked
        self.is_answer, self.is_image = answer, image
        self.is_text = user & ~fixed
