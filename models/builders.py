"""The builder parts: a folder -> (model, processor, device_map)."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel

from models.devices import make_device_map, plan_text
from register import builder_register
from stageline.checkpoint.adapter import attach_adapter, find_base
from stageline.checkpoint.adapter_config import config_folder, processor_folder, refuse_two_ways
from stageline.checkpoint.adapter_start import Adapters
from stageline.checkpoint.whole import check_weights, load_whole
from stageline.data.processor import load_processor
from stageline.errors import UserError
from stageline.inference.meta_model import auto_class_of
from stageline.inference.model_cutter import Wanted
from stageline.inference.quantised_base import quantization_config
from stageline.model_folder import find_folder, load_config


@builder_register("auto")
def auto(
    model_path: str,
    *,
    visual_gpu_ratio: float | None = None,
    dtype: torch.dtype = torch.float32,
    num_devices: int | None = None,
    device: str = "auto",
    adapter_path: str | list[str] | None = None,
    adapter_weights: list[float] | None = None,
    trust_remote_code: bool = False,
    placement: Wanted | None = None,
    attn_implementation: str | None = None,
    quantization: Literal["nf4", "int8"] | None = None,
) -> tuple[PreTrainedModel, object, dict[str, object]]:
    """Any model of transformers, text or vision-language, over all devices; with a LoRA adapter.

    Args:
        model_path: a model folder, or an adapter folder that names its base.
        adapter_path: one is put on; several are merged into the weights in their order.
        adapter_weights: how much of each is added; None: all of it.
        attn_implementation: eager, sdpa or another of the library's.
        quantization: keeps linear layers in 4 or 8 bits, by bitsandbytes.
    """
    source = _find(model_path, adapter_path, trust_remote_code=trust_remote_code)
    if quantization and (len(source.adapters) > 1 or adapter_weights is not None):
        raise UserError(
            f"--builder.quantization {quantization} came with adapters that are merged. Weights "
            "that stay as they are were expected below them, because few bits cannot take up what "
            "is added: merge them first (export.py), or give one adapter and no weights."
        )
    check_weights(source.folder)
    options = _options(source, trust_remote_code, attn_implementation)
    device_map = make_device_map(
        source.config,
        device=device,
        num_devices=num_devices,
        visual_gpu_ratio=visual_gpu_ratio,
        placement=placement,
        dtype=dtype,
        quantization=quantization,
        **options,
    )
    if quantization:
        options["quantization_config"] = quantization_config(quantization, dtype)
    with warnings.catch_warnings():
        # names of lone parameters (the line end of LLaVA-NeXT) belong into the map all the same
        warnings.filterwarnings("ignore", message="The following device_map keys do not match")
        model = load_whole(
            auto_class_of(source.config),
            source.folder,
            source.config,
            dtype=dtype,
            # accelerate's hooks cost time and buy nothing on one CPU
            device_map=None if device_map == {"": "cpu"} else device_map,
            is_changed=source.has_own,
            **options,
        )
    _add_adapters(model, source.adapters, adapter_weights)
    processor = load_processor(source.processor_folder, trust_remote_code=trust_remote_code)
    return model.eval(), processor, device_map


def _plan(
    model_path: str,
    *,
    adapter_path: str | list[str] | None = None,
    adapter_weights: list[float] | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    **given: Any,
) -> str:
    """What `auto` would place where, as a table; loads nothing."""
    source = _find(model_path, adapter_path, trust_remote_code=trust_remote_code)
    options = _options(source, trust_remote_code, attn_implementation)
    return plan_text(source.config, **given, **options)


auto.plan = _plan


@dataclass(frozen=True)
class _Source:
    """Where a model comes from; `has_own`: an adapter has a configuration of its own."""

    folder: Path
    processor_folder: Path
    adapters: list[str]
    config: PretrainedConfig
    has_own: bool


def _find(
    model_path: str, adapter_path: str | list[str] | None, *, trust_remote_code: bool
) -> _Source:
    folder = find_folder(model_path)
    adapters = [adapter_path] if isinstance(adapter_path, str) else list(adapter_path or ())
    if (folder / "adapter_config.json").is_file():
        refuse_two_ways(folder, adapters)
        adapters, folder = [str(folder)], find_base(folder)
    own_processor = processor_folder(Path([folder, *adapters][-1]), folder)
    own_config = config_folder(folder, adapters)
    config = load_config(own_config, trust_remote_code=trust_remote_code)
    return _Source(folder, own_processor, adapters, config, has_own=own_config != folder)


def _options(
    source: _Source, trust_remote_code: bool, attn_implementation: str | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    return options | ({"attn_implementation": attn_implementation} if attn_implementation else {})


def _add_adapters(model: PreTrainedModel, adapters: list[str], weights: list[float] | None) -> None:
    """Puts one adapter on; merges several, or what is weighted, into the weights."""
    if len(adapters) == 1 and weights is None:
        attach_adapter(model, adapters[0])
    else:
        own = None if weights is None else tuple(weights)
        Adapters(tuple(map(Path, adapters)), own).merge(model)
