"""What InternVL2 checkpoints of the remote-code class InternVLChatModel are called natively.

Names, configuration and the two fused matrices of the class that InternVL2, 2.5 and 3 were first
published with (`model_type` "internvl_chat"), for `InternVLForConditionalGeneration`. Source: the
class's own code (github.com/OpenGVLab/InternVL). Reads and writes no file.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, InternVLConfig, PretrainedConfig

from stageline.errors import CheckpointError, UserError

OLD_TYPE = "internvl_chat"
HEAD = "language_model.lm_head.weight"
_TOWER = {
    r"^vision_model\.": "vision_tower.",
    r"\.encoder\.layers\.": ".encoder.layer.",
    r"\.class_embedding$": ".cls_token",
    r"\.position_embedding$": ".position_embeddings",
    r"\.patch_embedding\.": ".patch_embeddings.projection.",
    r"\.ls([12])$": r".lambda_\1",
    r"\.attn\.proj\.": ".attention.projection_layer.",
    r"\.attn\.": ".attention.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
}
_PROJECTOR = {
    r"^mlp1\.0\.": "multi_modal_projector.layer_norm.",
    r"^mlp1\.1\.": "multi_modal_projector.linear_1.",
    r"^mlp1\.3\.": "multi_modal_projector.linear_2.",
}
# InternLM2 computes what Llama does, under other names
_INTERNLM2 = {
    r"^language_model\.output\.": "language_model.lm_head.",
    r"\.tok_embeddings\.": ".embed_tokens.",
    r"\.attention\.wo\.": ".self_attn.o_proj.",
    r"\.attention\.wqkv\.": ".self_attn.wqkv.",
    r"\.feed_forward\.w1\.": ".mlp.gate_proj.",
    r"\.feed_forward\.w2\.": ".mlp.down_proj.",
    r"\.feed_forward\.w3\.": ".mlp.up_proj.",
    r"\.attention_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
}
# of the old configuration of the tower -> of the new one; others have the same name
_TOWER_FIELDS = {
    "qkv_bias": "attention_bias",
    "qk_normalization": "use_qk_norm",
    "dropout": "hidden_dropout_prob",
}
_NO_SETTINGS = {"architectures", "transformers_version", "dtype", "id2label", "label2id"}


def new_name(name: str) -> str:
    """The native name, as on disk, of a tensor; fused ones keep `qkv` and `wqkv` in it.

    Raises:
        CheckpointError: the class has no such tensor.
    """
    if name.startswith("vision_model."):
        table = _TOWER
    elif name.startswith("mlp1."):
        table = _PROJECTOR
    elif name.startswith("language_model."):
        table = _INTERNLM2
    else:
        table = {}
    new = name
    for pattern, replacement in table.items():
        new = re.sub(pattern, replacement, new)
    if not table or (table is _PROJECTOR and new == name):
        raise CheckpointError(
            f"the tensor {name} is none of InternVLChatModel's. Names that begin with "
            "vision_model, mlp1 or language_model were expected, because these are its parts: "
            "is it another model's checkpoint, or one with LoRA that was not merged?"
        )
    return new


def new_tensors(name: str, tensor: torch.Tensor, config: InternVLConfig) -> dict[str, torch.Tensor]:
    """What a tensor of the old checkpoint becomes: itself by another name, or three of it."""
    new = new_name(name)
    if ".attention.qkv." in new:
        return _named(new, "qkv", ("q_proj", "k_proj", "v_proj"), tensor.chunk(3))
    if ".self_attn.wqkv." in new:
        pieces = _split_wqkv(tensor, config.get_text_config(decoder=True), name=name)
        return _named(new, "wqkv", ("q_proj", "k_proj", "v_proj"), pieces)
    return {new: tensor}


def _named(
    name: str, old: str, parts: tuple[str, ...], tensors: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    names = [name.replace(f".{old}.", f".{part}.") for part in parts]
    return dict(zip(names, tensors, strict=True))


def _split_wqkv(
    fused: torch.Tensor, text: PretrainedConfig, *, name: str
) -> tuple[torch.Tensor, ...]:
    """InternLM2's rows lie by key-value head: its queries, then its key, then its value.

    Args:
        fused: [kv_heads * (queries a kv_head + 2) * head_dim, ...]
    """
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    group = heads // kv_heads + 2
    head_dim = text.hidden_size // heads
    if fused.shape[0] != kv_heads * group * head_dim:
        raise CheckpointError(
            f"{name} has {fused.shape[0]} rows, {kv_heads * group * head_dim} were expected: "
            f"config.json says {heads} heads, {kv_heads} of them with keys, of {head_dim}. Take "
            "the config.json that belongs to these weights."
        )
    by_head = fused.unflatten(0, (kv_heads, group, head_dim))
    return (
        by_head[:, :-2].flatten(0, 2),
        by_head[:, -2].flatten(0, 1),
        by_head[:, -1].flatten(0, 1),
    )


def new_config(
    settings: Mapping[str, Any], *, image_token_id: int, has_head: bool
) -> InternVLConfig:
    """The native configuration.

    Args:
        settings: config.json of the old folder.
        has_head: whether the checkpoint has an output layer; without one it is the embedding.

    Raises:
        UserError: a variant that the native class does not compute.
    """
    _refuse_variants(settings)
    tower = dict(settings["vision_config"])
    image_size = settings.get("force_image_size") or tower["image_size"]
    ratio = settings.get("downsample_ratio", 0.5)
    text = _text_config(settings["llm_config"])
    is_tied = not has_head or bool(settings["llm_config"].get("tie_word_embeddings", False))
    text.tie_word_embeddings = is_tied
    return InternVLConfig(
        vision_config=_tower_fields(tower),
        text_config=text,
        image_token_id=image_token_id,
        image_seq_length=int((image_size // tower["patch_size"]) ** 2 * ratio**2),
        downsample_ratio=ratio,
        vision_feature_layer=settings.get("select_layer", -1),
        tie_word_embeddings=is_tied,
        architectures=["InternVLForConditionalGeneration"],
    )


def _refuse_variants(settings: Mapping[str, Any]) -> None:
    if settings.get("ps_version", "v2") != "v2":
        raise UserError(
            f"config.json has ps_version {settings['ps_version']!r}, v2 was expected: older "
            "checkpoints have their image tokens in a transposed order, which the library's class "
            "does not know. Use InternVL2 or later."
        )
    for name in ("use_backbone_lora", "use_llm_lora"):
        if settings.get(name):
            raise UserError(
                f"config.json has {name} {settings[name]}, 0 was expected: the weights hold LoRA "
                "beside the layers. Merge it first, with the program that trained it."
            )
    kind = settings["llm_config"].get("model_type")
    if kind != "internlm2" and kind not in CONFIG_MAPPING:
        raise UserError(
            f"config.json has a language model of type {kind!r}, internlm2 or a type that the "
            "library has was expected: its layers are the library's after the conversion."
        )


def _tower_fields(old: Mapping[str, Any]) -> dict[str, Any]:
    fields = {_TOWER_FIELDS.get(name, name): value for name, value in old.items()}
    fields["projection_dropout"] = old.get("dropout", 0.0)
    own = CONFIG_MAPPING["internvl_vision"]
    return _known_fields(own, fields)


def _text_config(old: Mapping[str, Any]) -> PretrainedConfig:
    kind = str(old["model_type"])
    own = CONFIG_MAPPING["llama" if kind == "internlm2" else kind]
    fields = _known_fields(own, old)
    # the library moves these into rope_parameters
    fields |= {name: old[name] for name in ("rope_theta", "rope_scaling") if old.get(name)}
    if kind == "internlm2":
        fields["attention_bias"] = bool(old.get("bias", False))
    return own(**fields)


def _known_fields(config_class: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Old files hold every setting of generation that their library had."""
    known = set(config_class.__dataclass_fields__) - _NO_SETTINGS
    return {name: value for name, value in fields.items() if name in known and value is not None}
