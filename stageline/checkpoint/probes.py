"""Inputs that an export is tried with: random token ids, and a random image where there can be one.

Shapes: B rows, T tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from stageline.data.processor import get_image_processor, get_pad_token_id, load_processor
from stageline.errors import UserError

Inputs = dict[str, torch.Tensor]
ROWS, TOKENS = 2, 12
IMAGE_SIZE = 112
QUESTION = "What is in this picture?"


def make_probes(
    config: PretrainedConfig,
    folder: Path,
    *,
    new_ids: Sequence[int] = (),
    trust_remote_code: bool = False,
) -> tuple[dict[str, Inputs], str | None]:
    """Name -> inputs of a forward pass, and why there is no image among them where one belongs.

    Args:
        folder: where the processor lies, if there is one.
        new_ids: of tokens whose rows the model got in training.
    """
    probes = {"text": text_probe(config, new_ids)}
    if getattr(config, "vision_config", None) is None:
        return probes, None
    try:
        processor = load_processor(folder, trust_remote_code=trust_remote_code)
        if get_image_processor(processor) is None:
            return probes, "the processor knows no images"
        probes["image"] = _image_probe(config, processor)
    except (UserError, OSError, ValueError, RuntimeError, AttributeError, ImportError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return probes, f"no image could be prepared ({type(error).__name__}: {first})"
    return probes, None


def text_probe(config: PretrainedConfig, new_ids: Sequence[int] = ()) -> Inputs:
    """Fixed random ids [B, T] that stand for nothing special; the first row begins with new ids."""
    text = config.get_text_config(decoder=True)
    special = set()
    for one in (config, text):
        for name, value in vars(one).items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(value if isinstance(value, list) else [value])
    plain = torch.tensor([i for i in range(text.vocab_size) if i not in special])
    longest = getattr(text, "max_position_embeddings", None) or 2 * TOKENS
    shape = (ROWS, max(1, min(TOKENS, longest // 2)))
    chosen = torch.randint(len(plain), shape, generator=torch.Generator().manual_seed(0))
    ids = plain[chosen]
    shown = torch.tensor(new_ids[: shape[1]], dtype=ids.dtype)
    ids[0, : len(shown)] = shown
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image_probe(config: PretrainedConfig, processor: Any) -> Inputs:
    """One random image with a question, as training gives it to a model."""
    from PIL import Image  # with it come the readers of images, which a text model does not need

    from stageline.data.batch import add_image_inputs, encode_sample, pad_rows
    from stageline.data.image_text import plain_image_text
    from stageline.data.rendered import Piece, Rendered

    size = getattr(config.vision_config, "image_size", None) or IMAGE_SIZE
    size = max(size) if isinstance(size, list | tuple) else size
    pixels = torch.randint(
        256, (size, size, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    image = Image.fromarray(pixels.numpy())
    pieces = (Piece(plain_image_text(processor), is_image=True), Piece(QUESTION, is_user=True))
    row = encode_sample(Rendered(pieces), [image], processor=processor, name="the image")
    batch = pad_rows([row], pad_token_id=get_pad_token_id(processor), with_labels=False)
    add_image_inputs(batch, [[image]], processor=processor, names=["the image"], with_pixels=True)
    return batch
