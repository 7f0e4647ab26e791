"""Which devices a builder part has, how a model is cut over them, and what that looks like."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from stageline.errors import UserError
from stageline.inference.meta_model import model_on_meta
from stageline.inference.model_cutter import ModelCutter, Wanted
from stageline.inference.placement import check_fit, check_weights_fit, format_table
from stageline.inference.quantised_base import quantization_settings


def make_device_map(
    config: PretrainedConfig,
    *,
    device: str,
    num_devices: int | None,
    visual_gpu_ratio: float | None,
    placement: Wanted | None = None,
    dtype: torch.dtype | None = None,
    quantization: str | None = None,
    **options: Any,
) -> dict[str, object]:
    """Cuts the model over the GPUs; everything on the CPU where there is none.

    Raises:
        UserError: fewer GPUs than asked for, or the model does not fit them.
    """
    num_gpus = _num_gpus()
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        return {"": "cpu"}
    placement = placement or Wanted()
    given = placement.memory or ()
    wanted = num_devices or (len(given) if len(given) > 1 else num_gpus)
    if wanted > num_gpus or num_gpus == 0:
        raise UserError(
            f"--num-devices {wanted}, and this machine shows {num_gpus} GPUs: lower it, look at "
            "CUDA_VISIBLE_DEVICES, or take --device cpu."
        )
    if wanted == 1:
        return {"": 0}
    cutter = make_cutter(
        config,
        memory=(given if len(given) == wanted else given * wanted) or free_memory(wanted),
        visual_gpu_ratio=visual_gpu_ratio,
        placement=placement,
        dtype=dtype,
        quantization=quantization,
        **options,
    )
    device_map = cutter.device_map()
    if visual_gpu_ratio is None:
        _tell(cutter, is_certain=bool(given))
    return dict(device_map)


def plan_text(
    config: PretrainedConfig,
    *,
    device: str,
    num_devices: int | None,
    visual_gpu_ratio: float | None,
    placement: Wanted,
    dtype: torch.dtype,
    quantization: str | None = None,
    **options: Any,
) -> str:
    """The table of what would lie where; no device is needed if their memory is given.

    Raises:
        UserError: the model does not fit, or nothing is known of the devices.
    """
    memory = placement.memory
    if memory is None:
        if _num_gpus() == 0 or device == "cpu":
            raise UserError(
                "--plan came without --device-memory, and no GPU is to be seen here. Their memory "
                "was expected, because layers are dealt out by it: give --device-memory 24GiB "
                "--num-devices 2, or 24GiB,48GiB for devices that differ."
            )
        memory = free_memory(num_devices or _num_gpus())
    cutter = make_cutter(
        config,
        memory=memory,
        visual_gpu_ratio=visual_gpu_ratio,
        placement=placement,
        dtype=dtype,
        quantization=quantization,
        **options,
    )
    found, load = cutter.devices(), str(cutter.load)
    check_fit(found, asked=load)
    kinds = f"{str(dtype).removeprefix('torch.')}{f', {quantization}' if quantization else ''}"
    return f"GiB for {load}, {kinds}:\n{format_table(found)}"


def make_cutter(
    config: PretrainedConfig,
    *,
    memory: tuple[int, ...],
    visual_gpu_ratio: float | None,
    placement: Wanted,
    dtype: torch.dtype | None,
    quantization: str | None,
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


def free_memory(num_devices: int) -> tuple[int, ...]:
    """Bytes that are free on the first GPUs, with what this process holds and does not use."""
    return tuple(
        torch.cuda.mem_get_info(device)[0]
        + torch.cuda.memory_reserved(device)
        - torch.cuda.memory_allocated(device)
        for device in range(num_devices)
    )


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _tell(cutter: ModelCutter, *, is_certain: bool) -> None:
    """Refuses what cannot be, warns of what may not go well: how long answers get is a guess."""
    found, load = cutter.devices(), str(cutter.load)
    check_weights_fit(found, asked=load)
    try:
        check_fit(found, asked=load)
    except UserError as error:
        if is_certain:
            raise
        warnings.warn(f"memory may not suffice. {error}", stacklevel=2)
