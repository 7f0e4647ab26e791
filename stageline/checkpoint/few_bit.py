"""Checkpoints whose weights have few bits: which ones transformers can dequantize, and how.

`from_pretrained` does the arithmetic, one parameter after the other: a converter of the quantizer
collects the tensors that make one weight. Here it is told to dequantize, or the folder is refused.
"""

import inspect
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from stageline.errors import UserError
from stageline.model_folder import read_json


def stored_settings(checkpoint: Path) -> dict[str, Any] | None:
    """Return `quantization_config` of the config.json next to some weights; None: there is none."""
    file = (checkpoint.parent if checkpoint.is_file() else checkpoint) / "config.json"
    config = read_json(file) if file.exists() else {}
    parts = (config, *(config.get(name) for name in ("text_config", "llm_config")))
    found = (part.get("quantization_config") for part in parts if isinstance(part, dict))
    return next((one for one in found if isinstance(one, dict)), None)


def method_of(settings: dict[str, Any]) -> str:
    """Return the key of the quantizer of transformers."""
    bits = next((bits for bits in ("4bit", "8bit") if settings.get(f"load_in_{bits}")), None)
    return f"bitsandbytes_{bits}" if bits else str(settings.get("quant_method"))


def dequantizing_settings(checkpoint: Path) -> dict[str, Any] | None:
    """Return settings by which `from_pretrained` dequantizes; None: the weights are not quantized.

    Raises:
        UserError: transformers has no such quantizer, or one that cannot dequantize.
    """
    settings = stored_settings(checkpoint)
    if settings is None:
        return None
    method = method_of(settings)
    of_method = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if of_method is None or "dequantize" not in inspect.signature(of_method.__init__).parameters:
        able = sorted(
            name
            for name, kind in AUTO_QUANTIZATION_CONFIG_MAPPING.items()
            if "dequantize" in inspect.signature(kind.__init__).parameters and name != "gguf"
        )
        raise UserError(
            f"{checkpoint} is quantized by {method}, which transformers cannot dequantize. Use the "
            f"checkpoint that it was made of, or one of {', '.join(able)}."
        )
    return {**settings, "dequantize": True}


def drop_quantizer(model: PreTrainedModel) -> list[WeightTransform] | None:
    """Make a dequantized model save full weights; return what saving reverses.

    transformers would quantize the weights of FP8 again, below a configuration without FP8.
    """
    used = {tuple(one._original_target_patterns) for one in model._weight_conversions or ()}
    own = get_model_conversion_mapping(model)
    kept = [one for one in own if tuple(one._original_target_patterns) in used] or None
    model._weight_conversions = kept
    return kept
