"""Write a small InternVL without weights: config, tokenizer and image processor for the digits.

The tokenizer is a byte-level BPE trained on the task's own text. Training then starts at random.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset import DIGIT_QUESTIONS
from stageline.data.text.processor import compose_processor, save_processor

IMAGE_SIZE = 16
PATCH_SIZE = 4
WIDTH = 96
# the special tokens of InternVL's tokenizer -> how they are written here
_SPECIAL = {
    "pad_token": "<|pad|>",
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with tokens for the questions; other text is split into bytes."""
    return train_internvl_tokenizer(
        [f"\n{question}\nAnswer: {digit}" for question in DIGIT_QUESTIONS for digit in range(10)],
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        vocab_size=384,
    )


def train_internvl_tokenizer(
    texts: Iterable[str], *, pre_tokenizer: Any, vocab_size: int
) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE for a small InternVL, trained on the text of its task.

    It has the special tokens of InternVL's processor; other text is split into bytes.

    Args:
        pre_tokenizer: cuts a text into words, and these into bytes.
        vocab_size: largest number of tokens.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    plain = {name: _SPECIAL[name] for name in ("pad_token", "bos_token", "eos_token")}
    extra = {name: text for name, text in _SPECIAL.items() if name not in plain}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **plain, extra_special_tokens=extra
    )


def make_config(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.InternVLConfig:
    """Return a config of three vision layers and four language model layers."""
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": [IMAGE_SIZE, IMAGE_SIZE],
        "patch_size": [PATCH_SIZE, PATCH_SIZE],
        "hidden_dropout_prob": 0.0,
        "projection_dropout": 0.0,
        "layer_scale_init_value": 1.0,
        "use_mean_pooling": True,
    }
    text = {
        "model_type": "qwen2",
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    return transformers.InternVLConfig(
        architectures=["InternVLForConditionalGeneration"],
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=num_image_tokens(),
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )


def num_image_tokens() -> int:
    """Return the tokens of an image: a pixel shuffle by 2 makes one of four patches."""
    return (IMAGE_SIZE // PATCH_SIZE // 2) ** 2


def make_processor(tokenizer: transformers.PreTrainedTokenizerFast) -> object:
    """Return image processor and tokenizer as one, with one tile per picture."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    # InternVL's processor cuts images into tiles even with crop_to_patches=False
    image_processor = GotOcr2ImageProcessorPil(
        size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3, max_patches=1
    )
    return compose_processor(
        "InternVLProcessor",
        image_processor=image_processor,
        tokenizer=tokenizer,
        image_seq_length=num_image_tokens(),
    )


def main(folder: str) -> None:
    tokenizer = make_tokenizer()
    make_config(tokenizer).save_pretrained(folder)
    save_processor(make_processor(tokenizer), folder)
    print(f"model configuration, tokenizer and image processor are in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder of the model")
    main(parser.parse_args().folder)
