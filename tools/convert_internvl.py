"""Make a native folder of an InternVL2 checkpoint of the remote-code class, file by file.

`python tools/convert_internvl.py InternVL2-8B InternVL2-8B-native`.
Names, configuration and the two fused matrices of InternVLChatModel (`model_type` "internvl_chat"),
with which InternVL2, 2.5 and 3 were first published, become those of transformers' class. Source:
the class's own code (github.com/OpenGVLab/InternVL). No code of the old folder runs.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoTokenizer,
    GenerationConfig,
    InternVLConfig,
    PretrainedConfig,
)
from transformers.core_model_loading import revert_weight_conversion

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stageline.checkpoint.files import find_checkpoint, misfits, other_shape, weight_files
from stageline.data.text.processor import compose_processor, save_processor
from stageline.distributed.failure import run_entry
from stageline.errors import CheckpointError, UserError
from stageline.hub import local_folder
from stageline.model_folder import find_folder, read_json
from tools.weight_files import new_folder, rewrite_weights

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
_TABLES = {"vision_model": _TOWER, "mlp1": _PROJECTOR, "language_model": _INTERNLM2}
# the tower's old fields -> its new ones; others have the same name
_TOWER_FIELDS = {
    "qkv_bias": "attention_bias",
    "qk_normalization": "use_qk_norm",
    "dropout": "hidden_dropout_prob",
}
_NO_SETTINGS = {"architectures", "transformers_version", "dtype", "id2label", "label2id"}


def new_name(name: str) -> str:
    """Return the native name, as on disk, of a tensor; fused ones keep `qkv` and `wqkv` in it.

    Raises:
        CheckpointError: the class has no such tensor.
    """
    beginning = name.partition(".")[0]
    new = name
    for pattern, replacement in _TABLES.get(beginning, {}).items():
        new = re.sub(pattern, replacement, new)
    if beginning not in _TABLES or (beginning == "mlp1" and new == name):
        raise CheckpointError(
            f"the tensor {name} does not belong to InternVLChatModel, whose names begin with "
            "vision_model, mlp1 or language_model. Give a checkpoint of that class, with LoRA "
            "merged."
        )
    return new


def new_tensors(name: str, tensor: torch.Tensor, config: InternVLConfig) -> dict[str, torch.Tensor]:
    """Return the new tensors that an old one becomes: itself by another name, or three of it."""
    new = new_name(name)
    if ".attention.qkv." in new:
        pieces = tensor.chunk(3)
    elif ".self_attn.wqkv." in new:
        pieces = _split_wqkv(tensor, config.get_text_config(decoder=True), name=name)
    elif new == HEAD and config.tie_word_embeddings:
        return {}  # the embedding is what runs
    else:
        return {new: tensor}
    names = [re.sub(r"\.w?qkv\.", f".{part}.", new) for part in ("q_proj", "k_proj", "v_proj")]
    return dict(zip(names, pieces, strict=True))


def _split_wqkv(
    fused: torch.Tensor, text: PretrainedConfig, *, name: str
) -> tuple[torch.Tensor, ...]:
    """Split InternLM2's rows, ordered by key-value head: its queries, then its key, then its value.

    `fused` is [kv_heads * (queries a kv_head + 2) * head_dim, ...].
    """
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    group = heads // kv_heads + 2
    head_dim = text.hidden_size // heads
    if fused.shape[0] != kv_heads * group * head_dim:
        raise CheckpointError(
            f"{name} has {fused.shape[0]} rows, but config.json requires "
            f"{kv_heads * group * head_dim} ({heads} heads, {kv_heads} of them with keys, of "
            f"{head_dim}). Take the config.json that belongs to these weights."
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
    """Return the native configuration of the old config.json; without a head, weights are tied.

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
            f"config.json has ps_version {settings['ps_version']!r}, not v2: older checkpoints "
            "transpose the order of image tokens, which transformers' class does not support. Use "
            "InternVL2 or later."
        )
    for name in ("use_backbone_lora", "use_llm_lora"):
        if settings.get(name):
            raise UserError(
                f"config.json has {name} {settings[name]}: its LoRA is not merged. "
                "Merge it first, with the program that trained it."
            )
    kind = settings["llm_config"].get("model_type")
    if kind != "internlm2" and kind not in CONFIG_MAPPING:
        raise UserError(
            f"config.json has a language model of type {kind!r}, which transformers "
            f"{transformers.__version__} does not have. Use a checkpoint with internlm2 or a type "
            "of transformers, or a later transformers."
        )


def _tower_fields(old: Mapping[str, Any]) -> dict[str, Any]:
    fields = {_TOWER_FIELDS.get(name, name): value for name, value in old.items()}
    fields["projection_dropout"] = old.get("dropout", 0.0)
    return _known_fields(CONFIG_MAPPING["internvl_vision"], fields)


def _text_config(old: Mapping[str, Any]) -> PretrainedConfig:
    kind = str(old["model_type"])
    own = CONFIG_MAPPING["llama" if kind == "internlm2" else kind]
    fields = _known_fields(own, old)
    # transformers moves these into rope_parameters
    fields |= {name: old[name] for name in ("rope_theta", "rope_scaling") if old.get(name)}
    if kind == "internlm2":
        fields["attention_bias"] = bool(old.get("bias", False))
    return own(**fields)


def _known_fields(
    config_class: type[PretrainedConfig], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Keep fields that the class has: old files hold every setting of generation of their time."""
    known = set(config_class.__dataclass_fields__) - _NO_SETTINGS
    return {name: value for name, value in fields.items() if name in known and value is not None}


_IMAGE_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_PROBE = "The cat, 2 dogs (left of it): 猫在左边"
# the old code has these values of ImageNet
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_CONTENT = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\\n' }}{% elif part['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
# the old `template` -> (chat template, what ends a turn); the others are ChatML
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    + _CONTENT
    + "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "<|im_end|>",
)
_PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    + _CONTENT
    + "{{ '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    "<|end|>",
)
_TEMPLATES = {"phi3-chat": _PHI3}


def convert_internvl(source: str | Path, target: str | Path) -> Path:
    """Write a native folder with the weights of an old one, bit by bit, in their own dtype.

    Holds one file of weights in memory at a time.
    """
    folder, target = find_folder(source), Path(target).expanduser().absolute()
    settings = _old_settings(folder)
    files = weight_files(find_checkpoint(folder))
    tokenizer = _tokenizer(folder, settings)
    config = new_config(
        settings,
        image_token_id=_id_of(tokenizer, _IMAGE_TOKENS["context_image_token"], folder),
        has_head=HEAD in map(new_name, files),
    )
    with new_folder(target) as draft:
        written = rewrite_weights(
            files, draft, lambda name, tensor: new_tensors(name, tensor, config)
        )
        _check_names({name: shape for name, (shape, _) in written.items()}, config, folder)
        dtypes = {dtype for _, dtype in written.values()}
        config.dtype = dtypes.pop() if len(dtypes) == 1 else None
        config.save_pretrained(draft)
        _write_processor(tokenizer, config, settings, draft)
    return target


def _old_settings(folder: Path) -> dict[str, Any]:
    settings = read_json(folder / "config.json")
    kind = settings.get("model_type")
    if kind != OLD_TYPE:
        raise UserError(
            f"{folder} holds a model of type {kind!r}, and only {OLD_TYPE!r} is converted here. "
            "Load other folders as they are."
        )
    missing = [name for name in ("vision_config", "llm_config") if name not in settings]
    if missing:
        raise CheckpointError(
            f"{folder / 'config.json'} has no {' and no '.join(missing)}, which has sizes of "
            "the model. Copy the file again."
        )
    return settings


def _check_names(written: dict[str, tuple[int, ...]], config: InternVLConfig, folder: Path) -> None:
    """Compare with the names that transformers would save of the native model."""
    with torch.device("meta"):
        model = transformers.InternVLForConditionalGeneration(config)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    expected = {
        name: tuple(value.shape) for name, value in revert_weight_conversion(model, state).items()
    }
    wrong = [
        other_shape(name, written[name], expected[name])
        for name in written.keys() & expected.keys()
        if written[name] != expected[name]
    ]
    why = misfits(expected.keys() - written.keys(), written.keys() - expected.keys(), wrong)
    if why:
        raise CheckpointError(
            f"{folder} does not fit its config.json after the conversion: {why}. Take the "
            "config.json that belongs to these weights."
        )


def _tokenizer(folder: Path, settings: dict[str, Any]) -> Any:
    """Load transformers' fast tokenizer, from the old folder's files without their code."""
    own = read_json(folder / "tokenizer_config.json")
    own.pop("auto_map", None)
    if not hasattr(transformers, str(own.get("tokenizer_class"))):
        own["tokenizer_class"] = "LlamaTokenizer"  # InternLM2's are sentencepiece models
    with tempfile.TemporaryDirectory() as scratch:
        for path in folder.iterdir():
            if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja"):
                shutil.copyfile(path, Path(scratch) / path.name)
        (Path(scratch) / "config.json").unlink(missing_ok=True)
        (Path(scratch) / "tokenizer_config.json").write_text(json.dumps(own))
        try:
            plain = AutoTokenizer.from_pretrained(scratch, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(
                scratch,
                local_files_only=True,
                extra_special_tokens=_image_tokens(plain, settings),
                **_space_option(plain, Path(scratch)),
            )
        except Exception as error:
            raise UserError(
                f"the tokenizer in {folder} cannot be loaded without its own code "
                f"({type(error).__name__}: {str(error)[:300]}). Put a tokenizer.json of this model "
                "there, or vocab.json with merges.txt, or tokenizer.model (with the package "
                "sentencepiece)."
            ) from error
    _check_ids(tokenizer, own, folder)
    return tokenizer


def _space_option(tokenizer: Any, folder: Path) -> dict[str, bool]:
    """Return options that keep transformers from adding a space where sentencepiece adds none."""
    model = folder / "tokenizer.model"
    if (folder / "tokenizer.json").exists() or not model.exists():
        return {}
    import sentencepiece

    expected = sentencepiece.SentencePieceProcessor(str(model)).encode(_PROBE)
    for option in ({}, {"add_prefix_space": False}, {"add_prefix_space": False, "legacy": False}):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **option)
        if tokenizer(_PROBE, add_special_tokens=False)["input_ids"] == expected:
            return option
    raise UserError("it reads a text differently from sentencepiece")


def _image_tokens(tokenizer: Any, settings: dict[str, Any]) -> dict[str, str]:
    """Return the image tokens of the processor, except for one that has no row in the model."""
    tokens, known = dict(_IMAGE_TOKENS), tokenizer.get_vocab()
    has_room = settings["llm_config"].get("vocab_size", 0) > len(tokenizer)
    if tokens["video_token"] not in known and not has_room:
        tokens["video_token"] = tokens["context_image_token"]  # never found: images come first
    return tokens


def _check_ids(tokenizer: Any, own: dict[str, Any], folder: Path) -> None:
    """Check that added tokens keep their ids: each has its row in the embedding."""
    for number, entry in (own.get("added_tokens_decoder") or {}).items():
        found = tokenizer.convert_tokens_to_ids(entry["content"])
        if found != int(number):
            raise CheckpointError(
                f"{folder}: the converted tokenizer gives {entry['content']!r} the id {found}, "
                f"but tokenizer_config.json has {number}. Put a tokenizer.json of this model into "
                "the folder."
            )


def _id_of(tokenizer: Any, token: str, folder: Path) -> int:
    number = tokenizer.get_vocab().get(token)
    if number is None:
        raise CheckpointError(
            f"{folder}: the tokenizer has no {token}, the placeholder of images in a prompt. Copy "
            "the tokenizer's files again."
        )
    return int(number)


def _write_processor(
    tokenizer: Any, config: InternVLConfig, settings: dict[str, Any], draft: Path
) -> None:
    """Make a processor with the old tiling, and the settings that end an answer."""
    template, end_of_turn = _TEMPLATES.get(str(settings.get("template")), _CHATML)
    size = cast(PretrainedConfig, config.vision_config).image_size
    is_tiled = bool(settings.get("dynamic_image_size", True))
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": size[0], "width": size[1]},
        crop_to_patches=is_tiled,
        min_patches=settings.get("min_dynamic_patch", 1),
        max_patches=settings.get("max_dynamic_patch", 12),
        image_mean=_MEAN,
        image_std=_STD,
    )
    tokenizer.chat_template = template
    processor = compose_processor(
        "InternVLProcessor",
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=template,
        image_seq_length=config.image_seq_length,
    )
    save_processor(processor, draft)
    vocabulary = tokenizer.get_vocab()
    ends = {vocabulary.get(end_of_turn), tokenizer.eos_token_id} - {None}
    GenerationConfig(
        eos_token_id=sorted(ends), pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(draft)


def main() -> None:
    """Read the command line, and convert."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "old", type=Path, help="folder or hub name of InternVL2-*, InternVL2_5-*, InternVL3-*"
    )
    parser.add_argument("new", type=Path, help="a new folder")
    options = parser.parse_args()
    made = convert_internvl(local_folder(options.old, option="OLD"), options.new)
    print(f"converted {options.old} to {made}")


if __name__ == "__main__":
    run_entry(main)
