"""Builder components: a folder -> (model, processor, device_map)."""

import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from register import builder_register
from stageline.errors import UserError


def _plan(model_path: str, **given: Any) -> str:
    from models.devices import plan

    return plan(model_path, **given)


@builder_register("auto", plan=_plan)
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
    placement: Any = None,
    attn_implementation: str | None = None,
    quantization: Literal["nf4", "int8"] | None = None,
) -> tuple[Any, Any, dict[str, object]]:
    """Any model of transformers, text or vision-language, over all devices; with a LoRA adapter.

    Args:
        model_path: a model folder, or an adapter folder that names its base.
        adapter_path: a single one is attached; several are merged into the weights in order.
        adapter_weights: share of each adapter; default: 1.
        attn_implementation: attention of transformers: eager, sdpa or another name.
        quantization: bitsandbytes type of linear layers: nf4 = 4 bits, int8 = 8 bits.
    """
    from models.devices import find_source, make_device_map, quantization_config
    from stageline.checkpoint.adapter import attach_adapter, merge_adapters
    from stageline.checkpoint.plain_model import load_whole
    from stageline.data.text.processor import load_processor
    from stageline.planner.estimate import auto_class_of

    dtype = dtype or torch.float32
    source = find_source(
        model_path, adapter_path, visual_gpu_ratio, trust_remote_code=trust_remote_code
    )
    if quantization and (len(source.adapters) > 1 or adapter_weights is not None):
        raise UserError(
            f"--builder.quantization {quantization} excludes adapters that are merged. Merge them "
            "first (export.py), or give one adapter and no weights."
        )
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
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
        # the map must also contain single parameters (the line end of LLaVA-NeXT)
        warnings.filterwarnings("ignore", message="The following device_map keys do not match")
        model = load_whole(
            auto_class_of(source.config),
            source.folder,
            source.config,
            dtype=dtype,
            # accelerate's hooks cost time and buy nothing on one CPU
            device_map=None if device_map == {"": "cpu"} else device_map,
            is_changed=source.has_own,
            keeps_bits=True,
            **options,
        )
    if len(source.adapters) == 1 and adapter_weights is None:
        attach_adapter(model, source.adapters[0])
    else:  # several or weighted adapters are merged into the weights
        merge_adapters(model, list(map(Path, source.adapters)), adapter_weights)
    processor = load_processor(source.processor_folder, trust_remote_code=trust_remote_code)
    return model.eval(), processor, device_map
