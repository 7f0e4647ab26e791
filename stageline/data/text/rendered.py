"""Samples as text in pieces, which record the origin of text, the loss and the images.

Pure strings: no tokenizers, no templates. Character spans follow from the pieces, so nothing is
ever searched for in the text.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from stageline.data.text.processor import get_image_token
from stageline.errors import UserError


@dataclass(frozen=True)
class Piece:
    """A stretch of text of one origin."""

    text: str
    is_user: bool = False  # it is from the data: special tokens in it are not parsed
    is_target: bool = False  # it is supervised
    is_image: bool = False  # it stands for one image, whose text an image_token part puts here
    is_marked: bool = False  # its tokens are of special interest to a loss
    is_answer: bool = False  # it is an answer that is not supervised


@dataclass(frozen=True)
class Rendered:
    """One sample as a sequence of pieces.

    A chat template (`is_chat`) writes its own first and last tokens. Else the tokenizer adds its
    first tokens, and in training an end-of-sequence token that is in the loss.
    """

    pieces: tuple[Piece, ...]
    is_chat: bool = False
    for_generation: bool = False  # the answer and all after it are left out
    name: str = ""  # names the sample in errors

    @property
    def text(self) -> str:
        """The whole string."""
        return "".join([piece.text for piece in self.pieces])

    @property
    def num_images(self) -> int:
        """The number of image pieces."""
        return sum([piece.is_image for piece in self.pieces])

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def spans(self) -> Iterator[tuple[int, int, Piece]]:
        """Yield (start, end, piece) in characters of `text`."""
        start = 0
        for piece in self.pieces:
            yield start, start + len(piece.text), piece
            start += len(piece.text)

    def target_spans(self) -> list[tuple[int, int]]:
        """Return the character spans that are supervised."""
        return [(start, end) for start, end, piece in self.spans() if piece.is_target]

    def with_pieces(self, pieces: Iterable[Piece]) -> "Rendered":
        """Return the same kind of text with other pieces."""
        return replace(self, pieces=tuple(pieces))


def place_image_text(rendered: Rendered, text: str) -> Rendered:
    """Put `text` into each image piece that is empty; a chat template has filled its own."""
    return rendered.with_pieces(
        replace(piece, text=text) if piece.is_image and not piece.text else piece
        for piece in rendered
    )


def plain_image_text(processor: Any) -> str:
    """Return the text of a plain template for one image of this processor's model."""
    token = get_image_token(processor)
    if token is None:
        raise UserError(
            f"the samples have images, but {type(processor).__name__} has no image token. Point "
            "`processor_path` to the processor of a vision-language model, or use `image_token` "
            "none, which leaves images out of the text."
        )
    vision = ("<|vision_start|>", "<|vision_end|>")  # Qwen-VL finds its images by these
    if token == "<|image_pad|>" and set(vision) <= processor.tokenizer.get_vocab().keys():
        return token.join(vision)
    return token
