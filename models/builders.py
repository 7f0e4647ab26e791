"""The builder parts: a folder -> (model, processor, device_map)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from register import builder_register

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from stageline.inference.model_cutter import Wanted


@builder_register("auto", plan="models.devices:plan")
def auto(
    model_path: str,
    *,
    visual_gpu_ratio: float | None = None,
    dtype: torch.dtype | None = None,
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
    from models.devices import build

    return build(
        model_path,
        visual_gpu_ratio=visual_gpu_ratio,
        dtype=dtype,
        num_devices=num_devices,
        device=device,
        adapter_path=adapter_path,
        adapter_weights=adapter_weights,
        trust_remote_code=trust_remote_code,
        placement=placement,
        attn_implementation=attn_implementation,
        quantization=quantization,
    )
