"""The builder parts: a folder -> (model, processor, device_map)."""

import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from register import builder_register
from stageline.checkpoint.adapter import attach_adapter, find_base
from stageline.checkpoint.adapter_start import Adapters
from stageline.checkpoint.whole import check_weights, load_whole
from stageline.data.processor import load_processor
from stageline.errors import UserError
from stageline.inference.model_cutter import ModelCutter
from stageline.model_folder import find_folder, load_config


@builder_register("auto")
def auto(
    model_path: str,
    *,
    visual_gpu_ratio: float = 0.0,
    dtype: torch.dtype = torch.float32,
    num_devices: int | None = None,
    device: str = "auto",
    adapter_path: str | list[str] | None = None,
    adapter_weights: list[float] | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, object, dict[str, object]]:
    """Any model of transformers, text or vision-language, over all devices; with a LoRA adapter.

    Args:
        model_path: a model folder, or an adapter folder that names its base.
        adapter_path: one is put on; several are merged into the weights in their order.
        adapter_weights: how much of each is added; None: all of it.
        attn_implementation: eager, sdpa or another of the library's.
    """
    folder = processor_folder = find_folder(model_path)
    adapters = [adapter_path] if isinstance(adapter_path, str) else list(adapter_path or ())
    if (folder / "adapter_config.json").is_file():
        adapters, folder = adapters or [str(folder)], find_base(folder)
    processor_folder = _processor_folder([processor_folder, *adapters][-1], folder)
    # an adapter has a configuration of its own where its run changed the base's
    has_own = bool(adapters) and (Path(adapters[-1]) / "config.json").is_file()
    config = load_config(adapters[-1] if has_own else folder, trust_remote_code=trust_remote_code)
    check_weights(folder)
    auto_class = _auto_class(config)
    options: dict[str, object] = {"trust_remote_code": trust_remote_code}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    device_map = make_device_map(
        config,
        auto_class,
        device=device,
        num_devices=num_devices,
        visual_gpu_ratio=visual_gpu_ratio,
        **options,
    )
    with warnings.catch_warnings():
        # names of lone parameters (the line end of LLaVA-NeXT) belong into the map all the same
        warnings.filterwarnings("ignore", message="The following device_map keys do not match")
        model = load_whole(
            auto_class,
            folder,
            config,
            dtype=dtype,
            # accelerate's hooks cost time and buy nothing on one CPU
            device_map=None if device_map == {"": "cpu"} else device_map,
            is_changed=has_own,
            **options,
        )
    _add_adapters(model, adapters, adapter_weights)
    processor = load_processor(processor_folder, trust_remote_code=trust_remote_code)
    return model.eval(), processor, device_map


def _add_adapters(model: PreTrainedModel, adapters: list[str], weights: list[float] | None) -> None:
    """Puts one adapter on; merges several, or what is weighted, into the weights."""
    if len(adapters) == 1 and weights is None:
        attach_adapter(model, adapters[0])
    else:
        own = None if weights is None else tuple(weights)
        Adapters(tuple(map(Path, adapters)), own).merge(model)


def _processor_folder(adapter: str | Path, base: Path) -> Path:
    """An adapter's own folder, which may know new tokens, if all is there that its base has."""
    names = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
    needed = {name for name in names if (base / name).is_file()} | {names[0]}
    return Path(adapter) if all((Path(adapter) / name).is_file() for name in needed) else base


def make_device_map(
    config: object,
    auto_class: type,
    *,
    device: str,
    num_devices: int | None,
    visual_gpu_ratio: float,
    **options: object,
) -> dict[str, object]:
    """Cuts the model over the GPUs; everything on the CPU where there is none.

    Raises:
        UserError: fewer GPUs than asked for.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        return {"": "cpu"}
    wanted = num_devices or num_gpus
    if wanted > num_gpus or num_gpus == 0:
        raise UserError(
            f"--num-devices {wanted}, and this machine shows {num_gpus} GPUs: lower it, look at "
            "CUDA_VISIBLE_DEVICES, or take --device cpu."
        )
    if wanted == 1:
        return {"": 0}
    with torch.device("meta"):
        whole = auto_class.from_config(config, **options)
    cutter = ModelCutter(whole, num_devices=wanted, visual_gpu_ratio=visual_gpu_ratio)
    return dict(cutter.device_map())


def _auto_class(config: object) -> type:
    is_visual = getattr(config, "vision_config", None) is not None
    return AutoModelForImageTextToText if is_visual else AutoModelForCausalLM
