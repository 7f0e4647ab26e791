"""What the builder part `auto` does: finds a model, cuts it over the devices and loads it."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from stageline.checkpoint.adapter import (
    attach_adapter,
    config_folder,
    find_base,
    merge_adapters,
    processor_folder,
    refuse_two_ways,
)
from stageline.checkpoint.plain_model import load_whole
from stageline.data.text.processor import load_processor
from stageline.device import VISIBLE, accelerators
from stageline.errors import UserError
from stageline.inference.meta_model import (
    auto_class_of,
    model_on_meta,
    quantization_config,
    quantization_settings,
)
from stageline.inference.model_cutter import (
    ModelCutter,
    Wanted,
    check_fit,
    format_table,
)
from stageline.model_folder import find_folder, load_config
from stageline.pipeline.topology import no_tower


def build(
    model_path: str,
    *,
    dtype: torch.dtype | None,
    adapter_path: str | list[str] | None,
    adapter_weights: list[float] | None,
    trust_remote_code: bool,
    attn_implementation: str | None,
    quantization: str | None,
    **where: Any,
) -> tuple[PreTrainedModel, object, dict[str, object]]:
    """What the builder part `auto` makes; its arguments are explained there."""
    dtype, ratio = dtype or torch.float32, where["visual_gpu_ratio"]
    source = _find(model_path, adapter_path, ratio, trust_remote_code=trust_remote_code)
    if quantization and (len(source.adapters) > 1 or adapter_weights is not None):
        raise UserError(
            f"--builder.quantization {quantization} came with adapters that are merged. Weights "
            "that stay as they are were expected below them, because few bits cannot take up what "
            "is added: merge them first (export.py), or give one adapter and no weights."
        )
    options = _options(trust_remote_code, attn_implementation)
    device_map = make_device_map(
        source.config, dtype=dtype, quantization=quantization, **where, **options
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


def plan(
    model_path: str,
    *,
    placement: Wanted,
    dtype: torch.dtype,
    device: str,
    num_devices: int | None,
    adapter_path: str | list[str] | None = None,
    adapter_weights: list[float] | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    quantization: str | None = None,
    **given: Any,
) -> str:
    """What `auto` would place where, as a table; loads nothing, and needs no device to be there.

    Raises:
        UserError: the model does not fit, or nothing is known of the devices.
    """
    ratio = given["visual_gpu_ratio"]
    source = _find(model_path, adapter_path, ratio, trust_remote_code=trust_remote_code)
    found = [] if placement.memory else accelerators(device)
    if placement.memory is None and not found:
        raise UserError(
            "--plan came without --device-memory, and no accelerator is to be seen here. Their "
            "memory was expected, because layers are dealt out by it: give --device-memory 24GiB "
            "--num-devices 2, or 24GiB,48GiB for devices that differ."
        )
    cutter = make_cutter(
        source.config,
        memory=placement.memory or free_memory(found[:num_devices]),
        placement=placement,
        dtype=dtype,
        quantization=quantization,
        **given,
        **_options(trust_remote_code, attn_implementation),
    )
    found, load = cutter.devices(), str(cutter.load)
    check_fit(found, asked=load)
    kinds = f"{str(dtype).removeprefix('torch.')}{f', {quantization}' if quantization else ''}"
    return f"GiB for {load}, {kinds}:\n{format_table(found)}"


@dataclass(frozen=True)
class _Source:
    """Where a model comes from; `has_own`: an adapter has a configuration of its own."""

    folder: Path
    processor_folder: Path
    adapters: list[str]
    config: PretrainedConfig
    has_own: bool


def _find(
    model_path: str,
    adapter_path: str | list[str] | None,
    visual_gpu_ratio: float | None,
    *,
    trust_remote_code: bool,
) -> _Source:
    folder = find_folder(model_path)
    adapters = [adapter_path] if isinstance(adapter_path, str) else list(adapter_path or ())
    if (folder / "adapter_config.json").is_file():
        refuse_two_ways(folder, adapters)
        adapters, folder = [str(folder)], find_base(folder)
    own_processor = processor_folder(Path([folder, *adapters][-1]), folder)
    own_config = config_folder(folder, adapters)
    config = load_config(own_config, trust_remote_code=trust_remote_code)
    if visual_gpu_ratio and getattr(config, "vision_config", None) is None:
        raise no_tower("visual_gpu_ratio", visual_gpu_ratio, config.model_type)
    return _Source(folder, own_processor, adapters, config, has_own=own_config != folder)


def _options(trust_remote_code: bool, attn_implementation: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    return options | ({"attn_implementation": attn_implementation} if attn_implementation else {})


def _add_adapters(model: PreTrainedModel, adapters: list[str], weights: list[float] | None) -> None:
    """Puts one adapter on; merges several, or what is weighted, into the weights."""
    if len(adapters) == 1 and weights is None:
        attach_adapter(model, adapters[0])
    else:
        merge_adapters(model, list(map(Path, adapters)), weights)


def make_device_map(
    config: PretrainedConfig,
    *,
    device: str,
    num_devices: int | None,
    visual_gpu_ratio: float | None,
    placement: Wanted | None = None,
    **options: Any,
) -> dict[str, object]:
    """Cuts the model over the accelerators, or refuses; without any it all lies on the CPU."""
    found = accelerators(device)
    if not found:
        if (num_devices or 1) > 1:
            raise UserError(
                f"--num-devices {num_devices} came, and the model would lie on the CPU (--device "
                f"{device}, no accelerator here). One device was expected, because a CPU is one: "
                "leave --num-devices out, or run on as many accelerators."
            )
        return {"": "cpu"}
    placement = placement or Wanted()
    given = placement.memory or ()
    wanted = num_devices or (len(given) if len(given) > 1 else len(found))
    if wanted > len(found):
        raise UserError(
            f"--num-devices {wanted}, and this machine shows {len(found)} devices of the kind "
            f"{found[0].type}: lower it, look at {VISIBLE.get(found[0].type, 'what hides some')}, "
            "or take --device cpu."
        )
    if wanted == 1:
        return {"": 0}
    cutter = make_cutter(
        config,
        memory=(given if len(given) == wanted else given * wanted) or free_memory(found[:wanted]),
        visual_gpu_ratio=visual_gpu_ratio,
        placement=placement,
        **options,
    )
    if visual_gpu_ratio is None:
        _tell(cutter, is_certain=bool(given))
    return dict(cutter.device_map())


def make_cutter(
    config: PretrainedConfig,
    *,
    memory: tuple[int, ...],
    visual_gpu_ratio: float | None,
    placement: Wanted,
    dtype: torch.dtype | None = None,
    quantization: str | None = None,
    **options: Any,
) -> ModelCutter:
    """A cutter of the model on the meta device."""
    whole = model_on_meta(config, dtype=dtype, **options)
    if quantization:
        whole.config.quantization_config = quantization_settings(quantization)
    is_blind = getattr(config, "vision_config", None) is None
    return ModelCutter(
        whole,
        num_devices=len(memory),
        visual_gpu_ratio=visual_gpu_ratio,
        memory=memory,
        load=replace(placement.load, images=0) if is_blind else placement.load,
    )


def free_memory(devices: Sequence[torch.device]) -> tuple[int, ...]:
    """Bytes that are free on each, with what this process holds and does not use."""
    module = torch.get_device_module(devices[0])
    return tuple(
        module.mem_get_info(device)[0]
        + module.memory_reserved(device)
        - module.memory_allocated(device)
        for device in devices
    )


def _tell(cutter: ModelCutter, *, is_certain: bool) -> None:
    """Refuses what cannot be, warns of what may not go well: how long answers get is a guess."""
    found, load = cutter.devices(), str(cutter.load)
    check_fit(found, asked=load, without_passes=True)
    try:
        check_fit(found, asked=load)
    except UserError as error:
        if is_certain:
            raise
        warnings.warn(f"memory may not suffice. {error}", stacklevel=2)
