"""Find the model of the builder component `auto`, its device_map, and the plan of `--plan`."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig

from stageline.checkpoint.adapter import config_folder, find_base, processor_folder, refuse_two_ways
from stageline.device import VISIBLE, accelerators
from stageline.errors import UserError, package
from stageline.inference.model_cutter import (
    Wanted,
    check_fit,
    format_table,
    free_memory,
    make_cutter,
)
from stageline.model_folder import find_folder, load_config
from stageline.pipeline.topology import no_tower


def plan(
    model_path: str,
    *,
    placement: Wanted,
    device: str,
    num_devices: int | None,
    adapter_path: str | list[str] | None = None,
    adapter_weights: list[float] | None = None,
    **options: Any,
) -> str:
    """Return a table of what `auto` would place on each device; loads nothing, needs no device.

    Raises:
        UserError: the model does not fit, or nothing is known of the devices.
    """
    ratio, trusts = options["visual_gpu_ratio"], options.get("trust_remote_code", False)
    source = find_source(model_path, adapter_path, ratio, trust_remote_code=trusts)
    found = [] if placement.memory else accelerators(device)
    if placement.memory is None and not found:
        raise UserError(
            "--plan requires --device-memory where no accelerator is found. Add --device-memory "
            "24GiB --num-devices 2, or 24GiB,48GiB for devices that differ."
        )
    cutter = make_cutter(
        source.config,
        memory=placement.memory or free_memory(found[:num_devices]),
        placement=placement,
        **options,
    )
    found, load = cutter.devices(), str(cutter.load)
    check_fit(found, asked=load)
    kinds = str(options["dtype"]).removeprefix("torch."), options.get("quantization")
    return f"GiB for {load}, {', '.join(filter(None, kinds))}:\n{format_table(found)}"


@dataclass(frozen=True)
class Source:
    """Source of a model; `has_own`: an adapter has a configuration of its own."""

    folder: Path
    processor_folder: Path
    adapters: list[str]
    config: PretrainedConfig
    has_own: bool


def find_source(
    model_path: str,
    adapter_path: str | list[str] | None,
    visual_gpu_ratio: float | None,
    *,
    trust_remote_code: bool,
) -> Source:
    """Find the folders of a model, of its adapters and of its processor."""
    folder = find_folder(model_path)
    adapters = [adapter_path] if isinstance(adapter_path, str) else list(adapter_path or ())
    if (folder / "adapter_config.json").is_file():
        refuse_two_ways(folder, adapters)
        adapters, folder = [str(folder)], find_base(folder)
    own_processor = processor_folder(Path([folder, *adapters][-1]), folder)
    own_config = config_folder(folder, adapters)
    config = load_config(own_config, trust_remote_code=trust_remote_code, keeps_bits=True)
    if visual_gpu_ratio and getattr(config, "vision_config", None) is None:
        raise no_tower("visual_gpu_ratio", visual_gpu_ratio, config.model_type)
    return Source(folder, own_processor, adapters, config, has_own=own_config != folder)


def make_device_map(
    config: PretrainedConfig,
    *,
    device: str,
    num_devices: int | None,
    visual_gpu_ratio: float | None,
    placement: Wanted | None = None,
    **options: Any,
) -> dict[str, object]:
    """Return the device_map over the accelerators, or all on the CPU where there is none."""
    found = accelerators(device)
    if not found:
        if (num_devices or 1) > 1:
            raise UserError(
                f"--num-devices {num_devices} requires as many accelerators, and --device {device} "
                "finds none here. Leave --num-devices out."
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
        devices, load = cutter.devices(), str(cutter.load)
        check_fit(devices, asked=load, without_passes=True)
        try:
            check_fit(devices, asked=load)
        except UserError as error:
            if given:
                raise
            # the length of answers is a guess
            warnings.warn(f"memory may not suffice. {error}", stacklevel=2)
    return dict(cutter.device_map())


def quantization_config(kind: str, dtype: torch.dtype | None) -> Any:
    """Return the argument for `from_pretrained`; `dtype` is the type that layers multiply in."""
    user, other = f"`builder.quantization` {kind}", "leave the option out"
    package("bitsandbytes", user, extra="quantization", instead=other)
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
