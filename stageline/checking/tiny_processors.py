"""Small processors of the vision-language families, made here; they fit tiny_models.py.

The image token has the id `IMAGE_TOKEN_ID`, an image of at most one tile has 4 tokens.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from stageline.checking.tiny_models import IMAGE_TOKEN_ID
from stageline.data.text.processor import compose_processor

# -- small tokenizers made here, of the kinds that real models have: byte-level BPE and Metaspace -

TEXTS = (
    "Which digit is this? What digit do you see? Which number is written here? Answer: 7",
    "Is the statement true or false? The cat is left of the dog. Question: yes, no and not",
    "system\nYou are a helpful assistant.\nuser\nassistant\n",
)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] | trim }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_tokenizer(
    texts: Sequence[str] = TEXTS,
    *,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    vocab_size: int = 400,
    adds_bos: bool = False,
    chat_template: str | None = CHATML,
    eos_token: str = "</s>",
    **options: Any,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, as GPT-2, Llama 3 and Qwen have; special tokens get ids 0, 1, ...

    Args:
        texts: what it learns its merges from.
        adds_bos: put "<s>" before each text.
        options: more arguments of the class.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if adds_bos:
        _add_bos(backend)
    return _wrap(backend, eos_token=eos_token, chat_template=chat_template, **options)


def tiny_metaspace_tokenizer(
    texts: Sequence[str] = TEXTS,
    *,
    prepend_scheme: Literal["always", "first", "never"] = "first",
    kind: Literal["bpe", "unigram"] = "bpe",
    adds_bos: bool = True,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    chat_template: str | None = CHATML,
    **options: Any,
) -> PreTrainedTokenizerFast:
    """A tokenizer that writes spaces as a low line, as Llama 2, Mistral and Gemma have.

    Args:
        prepend_scheme: which sections of the text begin with a low line.
        options: more arguments of the class.
    """
    specials = ["<unk>", *special_tokens]
    if kind == "bpe":
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
        trainer: Any = trainers.BpeTrainer(
            vocab_size=300, special_tokens=specials, show_progress=False
        )
    else:
        backend = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=specials, unk_token="<unk>", show_progress=False
        )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    backend.train_from_iterator(texts, trainer)
    if adds_bos:
        _add_bos(backend)
    options["unk_token"] = "<unk>"
    return _wrap(backend, eos_token="</s>", chat_template=chat_template, **options)


def _add_bos(backend: Tokenizer) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )


def _wrap(
    backend: Tokenizer, *, eos_token: str, chat_template: str | None, **options: Any
) -> PreTrainedTokenizerFast:
    options.setdefault("model_input_names", ["input_ids", "attention_mask"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token=eos_token,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        **options,
    )


# -------------------------------------------------------------------------------------------------

PROCESSOR_FAMILIES = (
    "internvl",
    "llava",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
    "idefics3",
    "smolvlm",
    "llava_next",
    "gemma3_vl",
)
_MEAN_STD: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


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


def _glm4v(image_size: int) -> Any:
    template = _chat_template("<|begin_of_image|><|image|><|end_of_image|>")
    # annotated with the options of every processor, it takes those of its own class, too
    images = transformers.Glm4vImageProcessorPil(  # type: ignore[call-arg]
        patch_size=4,
        size={"shortest_edge": 2 * image_size**2, "longest_edge": 8 * image_size**2},
        **_MEAN_STD,
    )
    names = ("image", "begin_of_image", "end_of_image", "video", "begin_of_video", "end_of_video")
    tokenizer = _tokenizer(*(f"<|{name}|>" for name in names), template=template)
    return compose_processor(
        "Glm4vProcessor", image_processor=images, tokenizer=tokenizer, chat_template=template
    )


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
    "glm4v": _glm4v,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "llava_next": _llava_next,
    "gemma3_vl": _gemma3_vl,
}


# -- a tiny Mllama (Llama 3.2 Vision): config, processor, micro-batches. Its layers see the images
# Five layers, two of which look at images, and none of these is the last: of four stages the last
# one has nothing to do with images. Shapes: B rows, T tokens, M images of the fullest row.

MLLAMA_IMAGE_TOKEN_ID = 5
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
        vision_config=vision, text_config=text, image_token_index=MLLAMA_IMAGE_TOKEN_ID
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
            ids_BT[row, 1 + 3 * image] = MLLAMA_IMAGE_TOKEN_ID
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
