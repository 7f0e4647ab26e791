"""Checkpoints whose weights have few bits: which ones can be read as full weights, and how.

`from_pretrained` does the work, one parameter after the other: a converter of the quantizer
collects the tensors that make one weight, and dequantizes them. transformers has no such converter
for the packed integers of GPTQ and AWQ, which one of its own packages runs: it is made here.
"""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightRenaming, WeightTransform
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from stageline.checkpoint.adapter import base_of
from stageline.checkpoint.files import find_checkpoint
from stageline.errors import UserError
from stageline.model_folder import read_json
from stageline.modules.quantised import KEPT, Quantization, empty_bits, hold, kept_weights

PACKED, KEPT_BITS = "packed-integers", "kept-bits"  # the keys of the quantizers of this file


def stored_settings(checkpoint: Path) -> dict[str, Any] | None:
    """Return `quantization_config` of the config.json next to some weights; None: there is none."""
    file = (checkpoint.parent if checkpoint.is_file() else checkpoint) / "config.json"
    config = read_json(file) if file.exists() else {}
    parts = (config, *(config.get(name) for name in ("text_config", "llm_config")))
    found = (part.get("quantization_config") for part in parts if isinstance(part, dict))
    return next((one for one in found if isinstance(one, dict)), None)


def method_of(settings: dict[str, Any]) -> str:
    """Return transformers' key of a way to quantize."""
    bits = next((bits for bits in ("4bit", "8bit") if settings.get(f"load_in_{bits}")), None)
    key = settings.get("packed_by") or settings.get("quant_method")
    return f"bitsandbytes_{bits}" if bits else str(key)


def dequantizing_settings(
    checkpoint: Path, names: Iterable[str], kept: Quantization | None = None
) -> dict[str, Any] | None:
    """Return settings by which weights are dequantized; None: they are not quantized.

    Args:
        names: the names in the files.
        kept: bits that stay as they are, from `released`; others: the weights get few bits later.

    Raises:
        UserError: no quantizer of transformers can do it.
    """
    settings = stored_settings(checkpoint)
    if settings is None:
        return None
    method = method_of(settings)
    if kept is not None and kept.kind in KEPT:
        return {"quant_method": KEPT_BITS, "packed_by": method, "bits": kept}
    ends = ("weight_global_scale", "weight_zero_point")
    lost = [name for name in names if ".experts." in name and name.endswith(ends)]
    if method == "compressed-tensors" and lost:
        raise UserError(
            f"{checkpoint} has {lost[0]}, which transformers 5.23 ignores for experts: their "
            "weights would be wrong. Use the checkpoint that it was made of."
        )
    if method in ("gptq", "awq"):
        return _packed_settings(checkpoint, method, settings)
    if _is_told(method):
        return {**settings, "dequantize": True}
    if _dequantizes_loaded(method):
        return settings
    able = sorted(
        name for name in AUTO_QUANTIZER_MAPPING if _is_told(name) or _dequantizes_loaded(name)
    )
    raise UserError(
        f"{checkpoint} is quantized by {method}, which transformers cannot dequantize. Use the "
        "checkpoint that it was made of, or one that is quantized by gptq, awq, "
        f"{', '.join(name for name in able if name not in (PACKED, KEPT_BITS, 'gguf'))}."
    )


def released(path: str | Path) -> Quantization:
    """Return the bits that stages of a folder, or of its base, keep; UserError if they cannot."""
    settings = stored_settings(base_of(find_checkpoint(path))) or {}
    kind, block = method_of(settings), settings.get("weight_block_size")
    is_plain = settings.get("activation_scheme") != "static" and not settings.get("expert_dtype")
    if kind == "mxfp4":
        return Quantization("mxfp4")
    if kind == "fp8" and block and is_plain:
        skipped = settings.get("modules_to_not_convert") or ["lm_head"]
        tails = sorted({re.sub(r".*\.layers\.\d+\.", "", name) for name in skipped})
        return Quantization("fp8", block=tuple(block), skipped=tuple(tails))
    raise UserError(
        "`quantization` released keeps MXFP4, and FP8 with a scale of each block; "
        f"{path} is {f'quantized by {kind}' if settings else 'not quantized'}. Drop `quantization`."
    )


def _is_told(method: str) -> bool:
    """Whether transformers dequantizes while it reads, if it is told to."""
    config = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    return config is not None and "dequantize" in inspect.signature(config).parameters


def _dequantizes_loaded(method: str) -> bool:
    """Whether transformers can dequantize a model that was loaded."""
    quantizer: Any = AUTO_QUANTIZER_MAPPING.get(method, HfQuantizer)
    return quantizer._dequantize is not HfQuantizer._dequantize


def finish_dequantized(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Dequantize what `from_pretrained` left, and make the model save full weights.

    transformers would quantize weights to FP8 again, next to a configuration without FP8.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        model.dequantize(dtype)
    told: list[WeightTransform] = model.__dict__.get("_weight_conversions") or []
    used = {tuple(one._original_target_patterns) for one in told}
    own = get_model_conversion_mapping(model)
    kept = [one for one in own if tuple(one._original_target_patterns) in used]
    model.__dict__["_weight_conversions"] = kept or None


# -- packed integers: GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) -------------------------


def _packed_settings(checkpoint: Path, method: str, settings: dict[str, Any]) -> dict[str, Any]:
    bits = settings.get("bits", settings.get("w_bit", 4))
    layout = settings.get("checkpoint_format") or settings.get("format") or settings.get("version")
    layout = str(layout or {"gptq": "gptq", "awq": "gemm"}[method]).lower()
    known = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}[method]
    if bits not in (2, 4, 8) or layout not in known:
        raise UserError(
            f"{checkpoint} is quantized by {method} to {bits} bits in the layout {layout}; 2, 4 "
            f"and 8 bits in {' or '.join(known)} are read. Use the checkpoint that it was made of."
        )
    return {
        "quant_method": PACKED,
        "packed_by": method,
        "bits": bits,
        # the first layout of GPTQ stores zero points less one
        "zero_offset": int(layout == "gptq"),
    }


class Unpack(ConversionOps):
    """Makes weights of the integers, zero points and scales of their groups."""

    def __init__(self, hf_quantizer: "PackedQuantizer") -> None:
        self.hf_quantizer = hf_quantizer  # also tells transformers not to cast what is read

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: PreTrainedModel, **_: Any
    ) -> dict[str, Any]:
        """Return the weight of one layer, or those of experts by their patterns."""
        dtype = model.get_parameter(full_layer_name).dtype
        made: dict[str, Any] = {}
        for pattern, found in input_dict.items():
            stem = pattern.removesuffix("qweight")
            if stem != pattern:
                # act-order: the group of each input, which is its place in order otherwise
                groups = input_dict.get(f"{stem}g_idx") or [None] * len(found)
                zeros, scales = input_dict[f"{stem}qzeros"], input_dict[f"{stem}scales"]
                parts = zip(found, zeros, scales, groups, strict=True)
                made[f"{stem}weight"] = [self._weight(*one).to(dtype) for one in parts]
            elif pattern.endswith("weight"):  # not quantized
                made[pattern] = [one.to(dtype) for one in found]
        return {full_layer_name: made["weight"][0]} if "weight" in made else made

    def _weight(
        self,
        qweight: torch.Tensor,
        qzeros: torch.Tensor,
        scales: torch.Tensor,
        group_of: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return a weight [O, I] in the dtype of the scales [G, O]."""
        is_awq = self.hf_quantizer.quantization_config.packed_by == "awq"
        integers_OI = self._integers(qweight).T if is_awq else self._integers(qweight.T)
        zeros_GO = self._integers(qzeros)
        if offset := self.hf_quantizer.quantization_config.zero_offset:
            zeros_GO = (zeros_GO + offset) % 2**self.hf_quantizer.quantization_config.bits
        if group_of is None:
            num_inputs = integers_OI.shape[1]
            group_of = torch.arange(num_inputs, device=scales.device)
            group_of = group_of // (num_inputs // len(scales))
        group_of = group_of.long()
        return (integers_OI - zeros_GO[group_of].T) * scales[group_of].T

    def _integers(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the integers of the words along the last axis."""
        config = self.hf_quantizer.quantization_config
        shifts = torch.arange(0, 32, config.bits, device=packed.device)
        if config.packed_by == "awq":  # all even ones, then all odd ones
            shifts = shifts.view(2, -1).T.flatten()
        return (packed[..., None] >> shifts & 2**config.bits - 1).flatten(-2)

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("weights are saved in full")


@register_quantization_config(PACKED)
@register_quantization_config(KEPT_BITS)
class FewBitConfig(QuantizationConfigMixin):
    """Settings of a quantizer of this file."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings, dequantize=True)


@register_quantizer(PACKED)
class PackedQuantizer(HfQuantizer):
    """Reads GPTQ and AWQ checkpoints as full weights; for its settings see `_packed_settings`."""

    quantization_config: Any
    is_trainable = True
    serialized_names = {"weight": ["weight", "qweight", "qzeros", "scales", "g_idx"]}  # noqa: RUF012

    def is_serializable(self) -> bool:
        return True

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"dequantize": Unpack}


@register_quantizer(KEPT_BITS)
class KeptQuantizer(PackedQuantizer):
    """Reads bits and scales as a model's converters do weights; settings: `released` as "bits"."""

    serialized_names = {"weight": ["weight", "weight_scale_inv"]}  # noqa: RUF012 - as above

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {}

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        names = [(r"^(.+)\.scale$", r"\1.weight_scale_inv"), (r"_proj_blocks$", "_proj")]
        return [WeightRenaming(*one) for one in names] + super().update_weight_conversions(
            weight_conversions, model
        )

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        bits = self.quantization_config.bits
        end = "_scales" if bits.kind == "mxfp4" else "_scale_inv"
        self.kept = [(*found, found[1] + end) for found in kept_weights(model, bits)]
        for module, leaf, weight, scales in self.kept:
            for name, value in zip((leaf, scales), empty_bits(weight, bits), strict=True):
                module._parameters[name] = torch.nn.Parameter(value, False)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        for module, leaf, weight, scales in self.kept:
            parts: Any = [module.get_parameter(leaf), module._parameters.pop(scales)]
            hold(module, leaf, parts, self.quantization_config.bits, weight)
