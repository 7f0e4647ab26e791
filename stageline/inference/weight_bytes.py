"""Bytes of the weights of a model on the meta device, as they will lie in memory."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.quantizers.base import get_keys_to_not_convert

BLOCK, NESTED_BLOCK = 64, 256  # weights below one scale, scales below one of theirs: bitsandbytes
_CODE_BYTES = 16 * 4  # the sixteen values of 4 bits
_NESTED_CODE_BYTES = 256 * 4 + 4  # those of scales in 8 bits, and their offset


@dataclass(frozen=True)
class Stored:
    """How the linear layers of a model lie in memory.

    Attributes:
        bits: of a weight; 16 and 32 are floats.
        group: weights that share a scale; 0: those of a row.
        scale_bytes: of one scale.
        is_nested: scales are quantised as well.
        skipped: names of modules that stay as they are.
        kind: for people.
    """

    bits: int
    group: int = 0
    scale_bytes: float = 4
    is_nested: bool = False
    skipped: tuple[str, ...] = ()
    kind: str = ""

    def weight_bytes(self, shape: Iterable[int]) -> int:
        """Of one matrix with all that belongs to it."""
        rows, columns = shape
        numel = rows * columns
        num_scales = math.ceil(numel / self.group) if self.group else rows
        scales = num_scales * self.scale_bytes
        if self.kind == "bitsandbytes" and self.bits == 4:
            scales += _CODE_BYTES
        if self.is_nested:
            scales = num_scales + math.ceil(num_scales / NESTED_BLOCK) * 4
            scales += _CODE_BYTES + _NESTED_CODE_BYTES
        return math.ceil(numel * self.bits / 8 + scales)


def stored_of(config: PretrainedConfig) -> Stored | None:
    """What a config says of quantised weights; None: nothing, or nothing that is known here."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    given: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")))
    skipped = given.get("llm_int8_skip_modules") or given.get("modules_to_not_convert") or ()
    if method.startswith("bitsandbytes") or "load_in_4bit" in given:
        if not given.get("load_in_4bit"):
            return Stored(8, skipped=tuple(skipped), kind="bitsandbytes")
        is_nested = bool(given.get("bnb_4bit_use_double_quant"))
        return Stored(4, BLOCK, 4, is_nested, tuple(skipped), "bitsandbytes")
    if method in ("gptq", "awq", "auto-round"):  # a half scale and a packed zero point a group
        group = max(0, int(given.get("group_size") or 0))
        bits = int(given.get("bits") or 4)
        return Stored(bits, group, 2 + bits / 8, skipped=tuple(skipped), kind=method)
    if method == "fp8":
        block = given.get("weight_block_size") or (128, 128)
        return Stored(8, math.prod(block), skipped=tuple(skipped), kind=method)
    return None


def tensor_sizes(model: nn.Module, stored: Stored | None) -> dict[str, int]:
    """Name -> bytes of each parameter and buffer; one that several modules share has one name.

    Args:
        stored: of the linear layers; None: all as it is on the meta device.
    """
    sizes = {name: tensor.nbytes for name, tensor in model.named_parameters()}
    sizes |= {name: tensor.nbytes for name, tensor in model.named_buffers()}
    if stored is None:
        return sizes
    skipped = {*stored.skipped, *(get_keys_to_not_convert(model) if not stored.skipped else ())}
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if isinstance(module, nn.Linear) and weight in sizes and not _is_skipped(name, skipped):
            sizes[weight] = stored.weight_bytes(module.weight.shape)
    return sizes


def _is_skipped(name: str, skipped: set[str]) -> bool:
    """As the library reads such a list: whole names, and their beginnings or ends."""
    return any(
        name == one or name.startswith(f"{one}.") or name.endswith(f".{one}") or f".{one}." in name
        for one in skipped
    )
