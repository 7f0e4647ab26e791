"""Small processors of the vision-language families, made here; they fit tiny_models.py.

The image token has the id `IMAGE_TOKEN_ID`, an image of at most one tile has 4 tokens.
"""

from typing import Any

import transformers

from stageline.data.processor import compose_processor
from stageline.testing.tiny_models import IMAGE_TOKEN_ID
from stageline.testing.tiny_tokenizers import SPECIAL_TOKENS, tiny_tokenizer

PROCESSOR_FAMILIES = (
    "internvl",
    "llava",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "idefics3",
    "smolvlm",
    "llava_next",
    "gemma3_vl",
)
_MEAN_STD = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def tiny_processor(family: str, *, image_size: int = 16) -> Any:
    """A processor of one of `PROCESSOR_FAMILIES`.

    Args:
        image_size: width and height of a tile; of what the vision tower takes.
    """
    return _FAMILIES[family](image_size)


def _tokenizer(*image_tokens: str, template: str, **names: str) -> Any:
    """A tokenizer whose special tokens from id 5 on are those of images."""
    specials = (*SPECIAL_TOKENS, *image_tokens)
    assert specials[IMAGE_TOKEN_ID] == image_tokens[0]
    return tiny_tokenizer(
        special_tokens=specials, chat_template=template, extra_special_tokens=names
    )


def _chat_template(image_text: str) -> str:
    """ChatML whose contents are lists of texts and images."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '" + image_text + "' }}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def _internvl(image_size: int) -> Any:
    template = _chat_template("<IMG_CONTEXT>\\n")
    tokenizer = _tokenizer(
        "<IMG_CONTEXT>",
        "<video>",
        "<img>",
        "</img>",
        template=template,
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": image_size, "width": image_size}, min_patches=1, max_patches=4, **_MEAN_STD
    )
    return compose_processor(
        "InternVLProcessor",
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=template,
        image_seq_length=(image_size // 8) ** 2,
    )


def _llava(image_size: int) -> Any:
    template = _chat_template("<image>\\n")
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": image_size},
        crop_size={"height": image_size, "width": image_size},
        **_MEAN_STD,
    )
    return transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=_tokenizer("<image>", template=template),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def _llava_next(image_size: int) -> Any:
    template = _chat_template("<image>\\n")
    two = 2 * image_size
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": image_size},
        crop_size={"height": image_size, "width": image_size},
        image_grid_pinpoints=[[image_size, two], [two, image_size], [two, two]],
        **_MEAN_STD,
    )
    return transformers.LlavaNextProcessor(
        image_processor=images,
        tokenizer=_tokenizer("<image>", template=template),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def _qwen2_vl(image_size: int) -> Any:
    return _qwen("Qwen2VLProcessor", image_size)


def _qwen2_5_vl(image_size: int) -> Any:
    return _qwen("Qwen2_5_VLProcessor", image_size)


def _qwen3_vl(image_size: int) -> Any:
    return _qwen("Qwen3VLProcessor", image_size)


def _qwen(class_name: str, image_size: int) -> Any:
    template = _chat_template("<|vision_start|><|image_pad|><|vision_end|>")
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": image_size**2, "longest_edge": 4 * image_size**2},
        **_MEAN_STD,
    )
    return compose_processor(
        class_name,
        image_processor=images,
        tokenizer=_tokenizer(
            "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
            template=template,
        ),
        chat_template=template,
    )  # fmt: skip


def _idefics3(image_size: int) -> Any:
    return transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * image_size},
            max_image_size={"longest_edge": image_size},
            **_MEAN_STD,
        ),
        tokenizer=_idefics3_tokenizer(),
        image_seq_len=(image_size // 8) ** 2,
        chat_template=_chat_template("<image>"),
    )


def _smolvlm(image_size: int) -> Any:
    return compose_processor(
        "SmolVLMProcessor",
        image_processor=transformers.SmolVLMImageProcessorPil(
            size={"longest_edge": 2 * image_size},
            max_image_size={"longest_edge": image_size},
            **_MEAN_STD,
        ),
        tokenizer=_idefics3_tokenizer(),
        chat_template=_chat_template("<image>"),
        image_seq_len=(image_size // 8) ** 2,
    )


def _idefics3_tokenizer() -> Any:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    return _tokenizer(
        "<image>",
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        *rows,
        template=_chat_template("<image>"),
    )


def _gemma3_vl(image_size: int) -> Any:
    template = _chat_template("<start_of_image>")
    return transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(
            size={"height": image_size, "width": image_size}, **_MEAN_STD
        ),
        tokenizer=_tokenizer(
            "<image_soft_token>",
            "<start_of_image>",
            "<end_of_image>",
            template=template,
            image_token="<image_soft_token>",
            boi_token="<start_of_image>",
            eoi_token="<end_of_image>",
        ),
        image_seq_length=4,
        chat_template=template,
    )


_FAMILIES = {
    "internvl": _internvl,
    "llava": _llava,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "llava_next": _llava_next,
    "gemma3_vl": _gemma3_vl,
}
