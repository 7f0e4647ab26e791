"""A sample as text whose origin is known: what came from the data, what is learnt, where images go.

Pure strings: knows neither tokenizers nor templates. Character spans follow from the pieces, so
nothing is ever searched for in the text.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from stageline.data.text.processor import get_image_token
from stageline.errors import UserError


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
        return "".join([piece.text for piece in self.pieces])

    @property
    def num_images(self) -> int:
        """How many image pieces there are."""
        return sum([piece.is_image for piece in self.pieces])

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


def place_image_text(rendered: Rendered, text: str) -> Rendered:
    """Puts `text` into each image piece that is still empty.

    A chat template has put its own image text there already; that stays.
    """
    if not rendered.num_images:
        return rendered
    return rendered.with_pieces(
        replace(piece, text=text) if piece.is_image and not piece.text else piece
        for piece in rendered
    )


def plain_image_text(processor: Any) -> str:
    """What a plain template writes for one image of this processor's model.

    Raises:
        UserError: the processor is of a text model.
    """
    token = get_image_token(processor)
    if token is None:
        raise UserError(
            f"the samples have images, but {type(processor).__name__} has no image token. A "
            "processor of a vision-language model was expected: point `processor_path` to one, "
            "or use a dataset without images (`image_token` none leaves them out of the text)."
        )
    vocabulary = processor.tokenizer.get_vocab()
    before, after = "<|vision_start|>", "<|vision_end|>"
    if token == "<|image_pad|>" and before in vocabulary and after in vocabulary:
        return f"{before}{token}{after}"  # Qwen-VL finds its images by these
    return token
