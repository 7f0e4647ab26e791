"""Write a small InternVL for the scenes: config, random weights, tokenizer and image processor.

Every word of the questions is a token; other text is read byte by byte. The weights follow from the
seed, so that runs of several kinds can start from the same ones.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.spatial.scene_questions import ANSWERS
from examples.spatial.scenes import GROUND, Scenes
from scripts.make_digits_model import train_internvl_tokenizer
from stageline.data.text.processor import compose_processor, save_processor

# a word with the space before it, a mark, or a line break
WORD = r" ?[\w']+|[^\w\s]|\s"


@dataclass(frozen=True)
class Size:
    """Widths, depths and pixels of a model; `shuffle`: patches a side that make one token."""

    image: int
    patch: int
    shuffle: int
    width: int
    heads: int
    vision_layers: int
    text_layers: int

    @property
    def image_tokens(self) -> int:
        return (self.image // self.patch // self.shuffle) ** 2


SIZES = {
    "small": Size(48, 16, 1, 96, 4, 2, 3),
    "large": Size(96, 8, 2, 384, 6, 6, 8),
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of the words of questions and answers, and of bytes for other text."""
    scenes = Scenes(num_train=4000)
    texts = [f"\n{scenes.question(index).text}\n" for index in range(len(scenes))]
    texts += [answer for answers in ANSWERS.values() for answer in answers] * 9
    cuts = [
        pre_tokenizers.Split(Regex(WORD), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return train_internvl_tokenizer(
        texts, pre_tokenizer=pre_tokenizers.Sequence(cuts), vocab_size=1024
    )


def make_config(
    tokenizer: transformers.PreTrainedTokenizerFast, size: Size
) -> transformers.InternVLConfig:
    """Return the configuration of a vision encoder and a language model of one width."""
    common = {
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_attention_heads": size.heads,
        # the usual 0.02 is for wide models: this narrow one would stay on a plateau
        "initializer_range": 0.8 * size.width**-0.5,
    }
    vision = {
        **common,
        "num_hidden_layers": size.vision_layers,
        "image_size": [size.image, size.image],
        "patch_size": [size.patch, size.patch],
        "hidden_dropout_prob": 0.0,
        "projection_dropout": 0.0,
        "layer_scale_init_value": 1.0,
        "use_mean_pooling": True,
    }
    text = {
        **common,
        "model_type": "qwen2",
        "vocab_size": len(tokenizer),
        "num_hidden_layers": size.text_layers,
        "num_key_value_heads": size.heads,
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
        image_seq_length=size.image_tokens,
        downsample_ratio=1 / size.shuffle,
        tie_word_embeddings=False,
    )


def make_processor(tokenizer: transformers.PreTrainedTokenizerFast, size: Size) -> object:
    """Image processor and tokenizer as one; one tile per picture."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    image_processor = GotOcr2ImageProcessorPil(
        size={"height": size.image, "width": size.image},
        # empty ground becomes 0: what stands on it is then all that the model sees
        image_mean=[value / 255 for value in GROUND],
        image_std=[0.3] * 3,
        crop_to_patches=False,
    )
    return compose_processor(
        "InternVLProcessor",
        image_processor=image_processor,
        tokenizer=tokenizer,
        image_seq_length=size.image_tokens,
    )


def make_model(
    config: transformers.InternVLConfig, seed: int
) -> transformers.InternVLForConditionalGeneration:
    """Make random weights, and positions: with those of transformers, 0, patches look the same."""
    torch.manual_seed(seed)
    model = transformers.InternVLForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.vision_tower.embeddings.position_embeddings, std=0.3)
    return model


def main(folder: str, size: str, seed: int) -> None:
    tokenizer = make_tokenizer()
    make_model(make_config(tokenizer, SIZES[size]), seed).save_pretrained(folder)
    save_processor(make_processor(tokenizer, SIZES[size]), folder)
    print(f"model, tokenizer and image processor are in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder of the model")
    parser.add_argument("size", nargs="?", choices=SIZES, default="small", help="(%(default)s)")
    parser.add_argument("seed", nargs="?", type=int, default=0, help="of the weights (%(default)s)")
    main(**vars(parser.parse_args()))
