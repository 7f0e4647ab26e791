"""The text that stands for an image in a prompt; how often its tokens repeat is in images.py."""

from dataclasses import replace
from typing import Any

from stageline.data.processor import get_image_token
from stageline.data.rendered import Rendered
from stageline.errors import UserError


def place_image_text(rendered: Rendered, text: str) -> Rendered:
    """Puts `text` into each image piece that is still empty.

    A chat template has put its own image text there already; that stays.
    """
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
            "processor of a vision-language model was expected: point --processor-path to one, "
            "or use a dataset without images (--image-token none leaves them out of the text)."
        )
    vocabulary = processor.tokenizer.get_vocab()
    before, after = "<|vision_start|>", "<|vision_end|>"
    if token == "<|image_pad|>" and before in vocabulary and after in vocabulary:
        return f"{before}{token}{after}"  # Qwen-VL finds its images by these
    return token
