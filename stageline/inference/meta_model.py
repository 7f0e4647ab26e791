"""Models on the meta device: where their layers lie, and layers per stage for pipelined decoding.

A decode step reads each weight once for a few rows, so what it costs is bytes of weights. A lookup
of embeddings and a tower, which ran before the first step, cost nothing; the head costs its bytes,
also where a tied one is a second copy of the embeddings. Of experts only those are read that some
row chose. The slowest stage is to be as quick as can be.
"""

import importlib
import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from stageline.errors import UserError
from stageline.model_folder import attention_options, called_alike
from stageline.planner.placement import smallest_maximum


def auto_class_of(config: PretrainedConfig) -> Any:
    """The library's class that builds the model of a config."""
    is_visual = getattr(config, "vision_config", None) is not None
    return AutoModelForImageTextToText if is_visual else AutoModelForCausalLM


def model_on_meta(
    config: PretrainedConfig, *, dtype: torch.dtype | None = None, **options: Any
) -> PreTrainedModel:
    """The model of a config, without weights; `options` are those of `from_config`."""
    given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    given |= attention_options(config, options.pop("attn_implementation", None))
    with torch.device("meta"):
        return called_alike(auto_class_of(config).from_config(config, **given, **options).eval())


def module_list(model: nn.Module, path: str) -> nn.ModuleList:
    """The module at a path that `layers_path` or `blocks_path` gave."""
    return cast(nn.ModuleList, model.get_submodule(path))


def layers_path(model: PreTrainedModel) -> str:
    """Where the one list of decoder layers lies, beside the token embeddings."""
    text_model = text_model_path(model)
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        f"{text_model}.{name}".lstrip(".")
        for name, child in model.get_submodule(text_model).named_children()
        if isinstance(child, nn.ModuleList) and len(child) == wanted
    ]
    if len(found) != 1:
        raise UserError(
            f"{type(model).__name__} has {len(found)} lists of {wanted} layers beside "
            "its embeddings, one was expected: use `num_devices` 1, or a builder part of your "
            "own that makes the device_map."
        )
    return found[0]


def text_model_path(model: PreTrainedModel) -> str:
    """The module that has the token embeddings as its child."""
    names = {id(module): name for name, module in model.named_modules()}
    return names[id(model.get_input_embeddings())].rpartition(".")[0]


def blocks_path(model: PreTrainedModel) -> str | None:
    """Where the list of blocks of a vision tower lies; None where they must stay together.

    Towers that join what several blocks made, Mllama's for instance, do so on one device.
    """
    config = model.config
    joins = isinstance(getattr(config, "vision_feature_layer", None), list | tuple)
    looks = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None)
    if getattr(config, "vision_config", None) is None or joins or looks:
        return None
    text_model = text_model_path(model)
    found = {
        name: sum(parameter.numel() for parameter in blocks.parameters())
        for name, blocks in model.named_modules()
        if isinstance(blocks, nn.ModuleList) and not name.startswith(f"{text_model}.")
    }
    return max(found, key=found.__getitem__) if found else None


ROWS = 8  # that decode together, where nobody says how many: it matters for experts alone


def stage_partition_by_bytes(
    layer_costs: Sequence[float], num_stages: int, *, back_cost: float = 0.0
) -> list[int]:
    """The split whose dearest stage is cheapest, exactly; at least one layer a stage.

    Args:
        back_cost: what the last stage has besides its layers.

    Raises:
        UserError: more stages than layers.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise UserError(
            f"{num_layers} layers on {num_stages} stages: a number from 1 to {num_layers} was "
            "expected, because each stage needs a layer. Use fewer stages."
        )
    sums = [0.0, *itertools.accumulate(layer_costs)]

    def cost(stage: int, start: int, end: int) -> float:
        back = back_cost if stage == num_stages - 1 else 0.0
        return sums[end] - sums[start] + back

    found = smallest_maximum(num_layers, num_stages, cost)
    assert found is not None, "costs are finite"
    return found


def decode_partition(
    config: PretrainedConfig,
    num_stages: int,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    num_rows: int = ROWS,
) -> list[int] | None:
    """Layers per stage, from the bytes that a decode step of `num_rows` reads; loads nothing.

    None: the model's layers do not lie where they are looked for, as those of BERT and LongCat.
    """
    try:
        model = model_on_meta(config, dtype=dtype, trust_remote_code=trust_remote_code)
        layers, back = decode_bytes(model, num_rows=num_rows)
    except (ValueError, AttributeError):  # what is no model at all is refused where it is built
        return None
    return stage_partition_by_bytes(layers, num_stages, back_cost=back)


def decode_bytes(model: PreTrainedModel, *, num_rows: int = ROWS) -> tuple[list[float], float]:
    """Bytes of weights that a decode step reads: in each layer, and behind the layers."""
    path = layers_path(model)
    share = _expert_share(model.config.get_text_config(decoder=True), num_rows)
    layers = [_read_bytes(layer, share) for layer in module_list(model, path)]
    text_model = model.get_submodule(text_model_path(model))
    list_name = path.rpartition(".")[2]
    beside = [child for name, child in text_model.named_children() if name != list_name]
    back = sum(_read_bytes(child, share) for child in beside)
    head = model.get_output_embeddings()
    if head is not None:  # its weight may be that of the embeddings: here it is read
        back += sum(parameter.nbytes for parameter in head.parameters())
    return layers, back


def _read_bytes(module: nn.Module, expert_share: float) -> float:
    """Of all parameters but those that are looked up by row."""
    total = 0.0
    for name, child in module.named_modules():
        if not isinstance(child, nn.Embedding):
            share = expert_share if "experts" in name.split(".") else 1.0
            total += sum(p.nbytes * share for p in child._parameters.values() if p is not None)
    return total


def _expert_share(config: PretrainedConfig, num_rows: int) -> float:
    """The share of experts that at least one row chooses, if rows choose evenly."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    counts = [getattr(config, name, None) for name in names]
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_k", None)
    total = next((count for count in counts if isinstance(count, int) and count > 1), None)
    if total is None or not isinstance(chosen, int):
        return 1.0
    return 1.0 - (1.0 - min(chosen, total) / total) ** num_rows


def quantization_settings(kind: str) -> dict[str, Any]:
    """What config.json would say of it: enough to count bytes, without the package."""
    bits = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True}
    return {"quant_method": "bitsandbytes", **bits}


def quantization_config(kind: str, dtype: torch.dtype | None) -> Any:
    """What `from_pretrained` takes; `dtype` is that in which layers multiply."""
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise UserError(
            f"`builder.quantization` {kind} came, and bitsandbytes cannot be imported ({error}); "
            "it was expected, because it makes the numbers. Install it (bash scripts/setup.sh "
            "quantization, or pip install bitsandbytes), or leave the option out."
        ) from error
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
