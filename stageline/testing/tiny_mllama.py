"""A tiny Mllama (Llama 3.2 Vision): config, processor, micro-batches. Its layers see the images.

Five layers, two of which look at images, and none of these is the last: of four stages the last one
has nothing to do with images. Shapes: B rows, T tokens, M images of the fullest row.
"""

from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from stageline.testing.tiny_tokenizers import SPECIAL_TOKENS, tiny_tokenizer

IMAGE_TOKEN_ID = 5
VOCAB_SIZE = 64
FIRST_TEXT_ID = 9  # below it are special tokens
NUM_TILES = 4
CROSS_LAYERS = (1, 3)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_mllama_config(*, tied: bool = False, **overrides: object) -> PretrainedConfig:
    """A tiny configuration; the image token has a row of the embeddings and no place in the head.

    Args:
        tied: refused by the library's class, which has no tied weights.
        overrides: fields of the text configuration.
    """
    assert not tied, "Mllama has no tied weights"
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "cross_attention_layers": list(CROSS_LAYERS),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "max_num_tiles": NUM_TILES,
        "intermediate_layers_indices": [0, 1],
        "vision_output_dim": 48,
    }
    return transformers.MllamaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN_ID
    )


def tiny_mllama_processor(image_size: int = 16) -> Any:
    """A processor that cuts an image into at most four tiles.

    Args:
        image_size: width and height of a tile.
    """
    tokenizer = tiny_tokenizer(
        special_tokens=(*SPECIAL_TOKENS, "<|image|>", "<|python_tag|>"),
        chat_template=CHAT_TEMPLATE,
        adds_bos=True,
    )
    images = transformers.MllamaImageProcessorPil(
        size={"height": image_size, "width": image_size},
        max_image_tiles=NUM_TILES,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return transformers.MllamaProcessor(
        image_processor=images, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE
    )


def mllama_micro_batch(
    num_images: tuple[int, ...],
    *,
    length: int = 14,
    seed: int = 7,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """One micro-batch with pixels; the last row is padded.

    Args:
        num_images: of each row; images of one to four tiles.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(num_images), length)
    ids_BT = torch.randint(FIRST_TEXT_ID, VOCAB_SIZE, shape, generator=generator)
    for row, count in enumerate(num_images):
        for image in range(count):
            ids_BT[row, 1 + 3 * image] = IMAGE_TOKEN_ID
    mask_BT = torch.ones(shape, dtype=torch.long)
    mask_BT[-1, length - 3 :] = 0
    is_target_BT = torch.rand(shape, generator=generator) < 0.5
    is_target_BT[:, length // 2] = True
    is_target_BT &= mask_BT.bool() & (ids_BT >= FIRST_TEXT_ID)
    batch = {
        "input_ids": ids_BT.masked_fill(mask_BT == 0, 0),
        "attention_mask": mask_BT,
        "labels": torch.where(is_target_BT, ids_BT, -100),
    }
    if any(num_images):
        batch.update(_images(num_images, length, generator, dtype))
    return batch


def _images(
    num_images: tuple[int, ...], length: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """What the processor gives for images of drawn shapes, written down by hand."""
    shape = (len(num_images), max(num_images))
    tiles_of_id = (0, 1, 2, 3, 4, 2, 4, 3, 4)
    ids_BM = torch.zeros(shape, dtype=torch.long)
    tiles_BMN = torch.zeros(*shape, NUM_TILES, dtype=torch.long)
    tiles_BMN[:, :, 0] = 1
    pixels = torch.zeros(*shape, NUM_TILES, 3, 16, 16, dtype=dtype)
    seen_BTMN = torch.zeros(shape[0], length, shape[1], NUM_TILES, dtype=torch.long)
    for row, count in enumerate(num_images):
        for image in range(count):
            ratio = int(torch.randint(1, 9, (), generator=generator))
            tiles = tiles_of_id[ratio]
            ids_BM[row, image] = ratio
            tiles_BMN[row, image, :tiles] = 1
            drawn = torch.randn(tiles, 3, 16, 16, generator=generator)
            pixels[row, image, :tiles] = drawn.to(dtype)
            end = length if image == count - 1 else 4 + 3 * image
            seen_BTMN[row, 1 + 3 * image : end, image, :tiles] = 1
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": ids_BM,
        "aspect_ratio_mask": tiles_BMN,
        "cross_attention_mask": seen_BTMN,
    }
