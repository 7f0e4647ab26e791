"""A sample as text whose origin is known: what came from the data, what is learnt, where images go.

Pure strings: knows neither tokenizers nor templates. Character spans follow from the pieces, so
nothing is ever searched for in the text.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Piece:
    """A stretch of text of one origin.

    Attributes:
        text: the characters; may be empty.
        is_user: it came from the data and stays plain text: special tokens in it are not parsed.
        is_target: it is supervised.
        is_image: it stands for one image; image_token parts put the model's own text here.
        is_marked: its tokens are of special interest to a loss.
        is_answer: it is an answer that is not supervised.
    """

    text: str
    is_user: bool = False
    is_target: bool = False
    is_image: bool = False
    is_marked: bool = False
    is_answer: bool = False


@dataclass(frozen=True)
class Rendered:
    """One sample as a sequence of pieces.

    Attributes:
        pieces: in reading order.
        is_chat: made by a chat template, which holds its own first and last tokens. If False, the
            tokenizer adds its first tokens, and in training an end-of-sequence token is learnt
            after the text.
        for_generation: the answer and all after it are left out.
        name: what errors call the sample.
    """

    pieces: tuple[Piece, ...]
    is_chat: bool = False
    for_generation: bool = False
    name: str = ""

    @property
    def text(self) -> str:
        """The whole string."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def num_images(self) -> int:
        """How many image pieces there are."""
        return sum(piece.is_image for piece in self.pieces)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def spans(self) -> Iterator[tuple[int, int, Piece]]:
        """(start, end, piece) in characters of `text`."""
        start = 0
        for piece in self.pieces:
            yield start, start + len(piece.text), piece
            start += len(piece.text)

    def target_spans(self) -> list[tuple[int, int]]:
        """Character spans that are supervised."""
        return [(start, end) for start, end, piece in self.spans() if piece.is_target]

    def with_pieces(self, pieces: Iterable[Piece]) -> "Rendered":
        """The same kind of text with other pieces."""
        return replace(self, pieces=tuple(pieces))

    def with_image_texts(self, texts: Iterable[str]) -> "Rendered":
        """Replaces the text of each image piece, in order; there must be one text for each."""
        remaining = iter(texts)
        return self.with_pieces(
            replace(piece, text=next(remaining)) if piece.is_image else piece
            for piece in self.pieces
        )
