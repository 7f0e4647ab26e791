"""Tiny models of real architectures, for parity tests: seconds on a CPU, all of the code.

A configuration has 4 layers, so that 1 to 4 stages can be tried, and no dropout. A processor or
tokenizer that fits it is made here, too. The image token has the id `IMAGE_TOKEN_ID`; an image of
at most one tile (16 x 16 pixels) has 4 tokens.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from stageline.data.text.processor import compose_processor

VOCAB_SIZE = 64
IMAGE_TOKEN_ID = 5
Fields = dict[str, Any]


# -- configurations ------------------------------------------------------------------------------

TEXT: Fields = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_TOWER: Fields = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
_CLIP: Fields = {
    **_TOWER,
    "model_type": "clip_vision_model",
    "num_hidden_layers": 3,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 16,
}
_SIGLIP: Fields = {**_TOWER, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
_QWEN_PATCHES: Fields = {
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TOWER: Fields = {
    **_QWEN_PATCHES,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 16,
}
_QWEN_TEXT: Fields = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
    }
}
_QWEN_TOKENS: Fields = {
    "image_token_id": IMAGE_TOKEN_ID,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
_GEMMA: Fields = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
_GEMMA3: Fields = {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}


@dataclass(frozen=True)
class _TinyFamily:
    """The fields of a family's configuration beyond the sizes that all share.

    Attributes:
        vision: of the tower; None: the family reads only text.
        text: of the language model.
        own: of the whole model of a vision-language family.
    """

    class_name: str
    text: Fields = field(default_factory=dict)
    vision: Fields | None = None
    own: Fields = field(default_factory=dict)


_FAMILIES = {
    "llama": _TinyFamily("LlamaConfig"),
    "mistral": _TinyFamily("MistralConfig", {"sliding_window": 8}),
    "qwen2": _TinyFamily("Qwen2Config"),
    "qwen3": _TinyFamily("Qwen3Config", {"head_dim": 8}),
    "gemma2": _TinyFamily("Gemma2Config", _GEMMA),
    "gemma3": _TinyFamily("Gemma3TextConfig", _GEMMA3),
    "phi3": _TinyFamily(
        "Phi3Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "sliding_window": None}
    ),
    "gpt2": _TinyFamily(
        "GPT2Config",
        {
            "n_embd": 16,
            "n_layer": 4,
            "n_head": 2,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gpt_neox": _TinyFamily("GPTNeoXConfig", {"hidden_dropout": 0.0}),
    "mixtral": _TinyFamily(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": _TinyFamily(
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    ),
    "internvl": _TinyFamily(
        "InternVLConfig",
        text={"model_type": "qwen2"},
        vision={
            **_TOWER,
            "num_hidden_layers": 2,
            "image_size": [16, 16],
            "patch_size": [4, 4],
            "hidden_dropout_prob": 0.0,
            "projection_dropout": 0.0,
            "layer_scale_init_value": 0.1,
            "use_mean_pooling": True,
        },
        own={"image_token_id": IMAGE_TOKEN_ID, "image_seq_length": 4},
    ),
    "llava": _TinyFamily(
        "LlavaConfig",
        text={"model_type": "llama"},
        vision=_CLIP,
        own={"image_token_index": IMAGE_TOKEN_ID},
    ),
    "llava_next": _TinyFamily(
        "LlavaNextConfig",
        text={"model_type": "llama"},
        vision=_CLIP,
        own={
            "image_token_index": IMAGE_TOKEN_ID,
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        },
    ),
    "qwen2_vl": _TinyFamily(
        "Qwen2VLConfig",
        text=_QWEN_TEXT,
        # hidden_size is that of the text model here
        vision={**_QWEN_PATCHES, "depth": 2, "embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2},
        own=_QWEN_TOKENS,
    ),
    "qwen2_5_vl": _TinyFamily(
        "Qwen2_5_VLConfig",
        text=_QWEN_TEXT,
        vision={**_QWEN_TOWER, "depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        own=_QWEN_TOKENS,
    ),
    "qwen3_vl": _TinyFamily(
        "Qwen3VLConfig",
        text={**_QWEN_TEXT, "head_dim": 8},
        vision={
            **_QWEN_TOWER,
            "depth": 3,
            "num_position_embeddings": 16,
            # the first 3 of 4 text layers add these features, which cross 2 boundaries
            "deepstack_visual_indexes": [0, 1, 2],
        },
        own=_QWEN_TOKENS,
    ),
    **{
        family: _TinyFamily(
            class_name,
            text={"model_type": "llama"},
            vision=_SIGLIP,
            own={"image_token_id": IMAGE_TOKEN_ID, "scale_factor": 2, "pad_token_id": 0},
        )
        for family, class_name in (("idefics3", "Idefics3Config"), ("smolvlm", "SmolVLMConfig"))
    },
    "gemma3_vl": _TinyFamily(
        "Gemma3Config",
        text=_GEMMA3,
        vision={**_SIGLIP, "vision_use_head": False},
        own={
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE_TOKEN_ID,
            "boi_token_index": 6,
            "eoi_token_index": 7,
        },
    ),
}
DECODERS = tuple(name for name, family in _FAMILIES.items() if family.vision is None)
VISION_LANGUAGE = tuple(name for name, family in _FAMILIES.items() if family.vision is not None)
# One of each kind of code around the layers. Every family is split, packed and answers in tests of
# that; what works on modules, names and files is tested with these.
TYPICAL_VISION = ("internvl", "qwen2_5_vl", "gemma3_vl")
TYPICAL = ("llama", "gpt2", "gpt_neox", "phi3", "gemma2", "mixtral", *TYPICAL_VISION)


def tiny_config(family: str, *, tied: bool = False, **overrides: object) -> PretrainedConfig:
    """Return a tiny configuration of `family` (one of `DECODERS` or `VISION_LANGUAGE`).

    Args:
        tied: whether the head shares the weight of the embeddings.
        overrides: fields of the (text) configuration.
    """
    made = _FAMILIES[family]
    config_class = getattr(transformers, made.class_name)
    text = {**TEXT, **made.text, "tie_word_embeddings": tied, **overrides}
    if made.vision is None:
        # the sdpa that transformers 5.17 selects for Gemma 2 ignores the cap of its scores
        own = {"attn_implementation": "eager"} if family == "gemma2" else {}
        return config_class(**text, **own)
    return config_class(
        vision_config=made.vision, text_config=text, tie_word_embeddings=tied, **made.own
    )


# Mllama (Llama 3.2 Vision), whose layers see the images: five layers, two of which look at images.
# None of these is the last: of four stages the last one has nothing to do with images.
CROSS_LAYERS = (1, 3)
NUM_TILES = 4


def tiny_mllama_config(*, tied: bool = False, **overrides: object) -> PretrainedConfig:
    """A tiny configuration; the image token has a row of the embeddings and no place in the head.

    Args:
        tied: refused by transformers' class, which has no tied weights.
        overrides: fields of the text configuration.
    """
    assert not tied, "Mllama has no tied weights"
    text = {name: value for name, value in TEXT.items() if name != "attention_dropout"}
    text |= {
        "num_hidden_layers": 5,
        "max_position_embeddings": 512,
        "cross_attention_layers": list(CROSS_LAYERS),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
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


# -- tokenizers ----------------------------------------------------------------------------------

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
    return wrap_tokenizer(
        backend, adds_bos=adds_bos, eos_token=eos_token, chat_template=chat_template, **options
    )


def wrap_tokenizer(
    backend: Tokenizer, *, adds_bos: bool, eos_token: str, chat_template: str | None, **options: Any
) -> PreTrainedTokenizerFast:
    """A trained backend as a tokenizer of transformers, with the special tokens of this file."""
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
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


# -- processors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TinyProcessor:
    """The parts of a family's processor.

    Attributes:
        images: transformers' class of the image processor, and its arguments for a tile's size.
        image_text: what the chat template writes for an image.
        tokens: of images, special tokens from id 5 on.
        names: those tokens that the tokenizer knows by a name.
        own: arguments of the processor for a tile's size.
    """

    class_name: str
    images: str
    sizes: Any
    image_text: str
    tokens: tuple[str, ...]
    names: dict[str, str] = field(default_factory=dict)
    own: Any = lambda tile: {}


def _square(tile: int) -> Fields:
    return {"height": tile, "width": tile}


def _shortest_and_crop(tile: int) -> Fields:
    return {"size": {"shortest_edge": tile}, "crop_size": _square(tile)}


def _pinpoints(tile: int) -> Fields:
    two = 2 * tile
    return {
        **_shortest_and_crop(tile),
        "image_grid_pinpoints": [[tile, two], [two, tile], [two, two]],
    }


def _longest_edges(tile: int) -> Fields:
    return {"size": {"longest_edge": 2 * tile}, "max_image_size": {"longest_edge": tile}}


def _pixels_in_all(least: int, most: int, **patches: int) -> Any:
    """Bounds of the number of pixels, in tiles."""
    return lambda tile: {
        **patches,
        "size": {"shortest_edge": least * tile**2, "longest_edge": most * tile**2},
    }


def _tokens_of_tile(name: str) -> Any:
    return lambda tile: {name: (tile // 8) ** 2}


def _llava_processor(class_name: str, images: str, sizes: Any) -> _TinyProcessor:
    own = {
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return _TinyProcessor(
        class_name, images, sizes, "<image>\\n", ("<image>",), own=lambda tile: own
    )


def _qwen_processor(class_name: str) -> _TinyProcessor:
    return _TinyProcessor(
        class_name,
        "Qwen2VLImageProcessorPil",
        _pixels_in_all(1, 4, patch_size=4, temporal_patch_size=2, merge_size=2),
        "<|vision_start|><|image_pad|><|vision_end|>",
        ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    )


def _idefics_processor(name: str) -> _TinyProcessor:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    others = ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    return _TinyProcessor(
        f"{name}Processor",
        f"{name}ImageProcessorPil",
        _longest_edges,
        "<image>",
        ("<image>", *others, *places),
        own=_tokens_of_tile("image_seq_len"),
    )


_PROCESSORS = {
    "internvl": _TinyProcessor(
        "InternVLProcessor",
        "GotOcr2ImageProcessorPil",
        lambda tile: {"size": _square(tile), "min_patches": 1, "max_patches": 4},
        "<IMG_CONTEXT>\\n",
        ("<IMG_CONTEXT>", "<video>", "<img>", "</img>"),
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        own=_tokens_of_tile("image_seq_length"),
    ),
    "llava": _llava_processor("LlavaProcessor", "CLIPImageProcessorPil", _shortest_and_crop),
    "qwen2_vl": _qwen_processor("Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen_processor("Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen_processor("Qwen3VLProcessor"),
    "glm4v": _TinyProcessor(
        "Glm4vProcessor",
        "Glm4vImageProcessorPil",
        _pixels_in_all(2, 8, patch_size=4),
        "<|begin_of_image|><|image|><|end_of_image|>",
        tuple(
            f"<|{begin}{kind}|>"
            for kind in ("image", "video")
            for begin in ("", "begin_of_", "end_of_")
        ),
    ),
    "idefics3": _idefics_processor("Idefics3"),
    "smolvlm": _idefics_processor("SmolVLM"),
    "llava_next": _llava_processor("LlavaNextProcessor", "LlavaNextImageProcessorPil", _pinpoints),
    "gemma3_vl": _TinyProcessor(
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        lambda tile: {"size": _square(tile)},
        "<start_of_image>",
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        own=lambda tile: {"image_seq_length": 4},
    ),
}
PROCESSOR_FAMILIES = tuple(_PROCESSORS)
_MEAN_STD: Fields = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def tiny_processor(family: str, *, image_size: int = 16) -> Any:
    """Return a processor of one of `PROCESSOR_FAMILIES`.

    Args:
        image_size: width and height of a tile; of what the vision tower takes.
    """
    made = _PROCESSORS[family]
    template = _chat_template(made.image_text)
    specials = (*SPECIAL_TOKENS, *made.tokens)
    assert specials[IMAGE_TOKEN_ID] == made.tokens[0]
    processor_class = getattr(transformers, made.class_name)
    if "video_processor" in processor_class.get_attributes():
        processor_class = functools.partial(compose_processor, made.class_name)
    return processor_class(
        image_processor=getattr(transformers, made.images)(**made.sizes(image_size), **_MEAN_STD),
        tokenizer=tiny_tokenizer(
            special_tokens=specials, chat_template=template, extra_special_tokens=made.names
        ),
        chat_template=template,
        **made.own(image_size),
    )


def tiny_mllama_processor(image_size: int = 16) -> Any:
    """Return a processor that cuts an image into at most four tiles.

    Args:
        image_size: width and height of a tile.
    """
    template = "{{ bos_token }}" + _chat_template("<|image|>")
    return transformers.MllamaProcessor(
        image_processor=transformers.MllamaImageProcessorPil(
            size=_square(image_size), max_image_tiles=NUM_TILES, **_MEAN_STD
        ),
        tokenizer=tiny_tokenizer(
            special_tokens=(*SPECIAL_TOKENS, "<|image|>", "<|python_tag|>"),
            chat_template=template,
            adds_bos=True,
        ),
        chat_template=template,
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
