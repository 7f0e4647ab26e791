"""Frozen linear layers whose weights are kept in 8 or 4 bits: the base below LoRA (QLoRA, Dettmers
et al. 2023, arXiv 2305.14314).

A stage that was filled is quantised layer by layer: of one layer at a time both forms exist. `nf4`
and `int8` are layers of bitsandbytes; for `torchao_int8` and `torchao_int4` torchao makes the
numbers, which lie here as plain tensors and are made floats again in each pass. Left as they are:
embedding, head, norms, routers, fused experts and a vision tower.
"""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from stageline.errors import UserError

Kind = Literal["nf4", "int8", "torchao_int8", "torchao_int4"]
NF4_BLOCK, SCALE_BLOCK = 64, 256  # weights that share a scale of nf4; such scales, with another
GROUP = 32  # weights of torchao_int4 that share a scale
OUTLIERS = 6.0  # of int8: activations above it are multiplied in half precision, as the library's
_ROUTERS = ("gate", "router", "shared_expert_gate")
_BITS = {"nf4": 4, "int8": 8, "torchao_int8": 8, "torchao_int4": 4}


@dataclass(frozen=True)
class Quantization:
    """How the base is quantised.

    Attributes:
        compute_dtype: of nf4, in which layers multiply, or its name; None: that of the run.
        double: of nf4, the scales are quantised too.
    """

    kind: Kind
    compute_dtype: torch.dtype | str | None = None
    double: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.compute_dtype, str):
            object.__setattr__(self, "compute_dtype", getattr(torch, self.compute_dtype))

    @property
    def package(self) -> str:
        """The package that makes the numbers."""
        return "torchao" if self.kind.startswith("torchao") else "bitsandbytes"


def quantise_layers(
    layers: Iterable[nn.Module],
    quantization: Quantization,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> int:
    """Quantises the linear layers below `layers`, in place, one after the other.

    Args:
        dtype: in which the model computes.
        device: where the quantised weights are to lie.

    Returns:
        How many layers were quantised.

    Raises:
        UserError: the package is missing, or cannot do it here.
    """
    device = torch.device(device)
    count = 0
    for layer in layers:
        for parent, leaf, linear in _linears(layer):
            is_meta = linear.weight.is_meta
            make = _outline if is_meta else _MAKERS[quantization.kind]
            made = make(linear, quantization, dtype=dtype, device=device)
            stored = [one for name, one in made.named_parameters(recurse=False) if name != "bias"]
            for place, one in enumerate(stored):  # the weight; after it its scales, if they lie so
                one.num_weights = 0 if place else linear.weight.numel()  # type: ignore[attr-defined]
            parent._modules[leaf] = made
            count += 1
    return count


def num_weights(parameter: torch.Tensor) -> int:
    """The numbers that a parameter stands for: of a quantised weight those that it was made of."""
    return getattr(parameter, "num_weights", parameter.numel())


def _linears(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name in it, linear layer), below adapters; the list is made first."""
    found = [
        (parent, leaf, child)
        for name, parent in layer.named_modules()
        for leaf, child in parent.named_children()
        if type(child) is nn.Linear and _is_base(name, leaf)
    ]
    yield from found


def _is_base(parent: str, leaf: str) -> bool:
    path = {*parent.split("."), leaf}
    return "lora" not in path and not path.intersection(_ROUTERS)  # adapters train


def base_bytes(layers: Iterable[nn.Module]) -> int:
    """Bytes of what quantised and plain linear layers below `layers` keep, without adapters."""
    total = 0
    for layer in layers:
        for name, module in layer.named_modules():
            if "lora" in name.split("."):
                continue
            if getattr(module, "is_quantised", False) or type(module) is nn.Linear:
                total += sum(tensor.untyped_storage().nbytes() for tensor in _stored(module))
    return total


def _stored(module: nn.Module) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = [*module.parameters(recurse=False)]
    weight = module._parameters.get("weight")
    state = getattr(weight, "quant_state", None)
    while state is not None:
        tensors += [value for value in (state.absmax, state.offset) if value is not None]
        state = state.state2
    scale = getattr(weight, "SCB", None)
    scale = getattr(getattr(module, "state", None), "SCB", None) if scale is None else scale
    return tensors if scale is None else [*tensors, scale]


def _nf4(
    linear: nn.Linear, quantization: Quantization, *, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    library = _import("bitsandbytes", quantization.kind)
    made = library.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=quantization.compute_dtype or dtype,
        compress_statistics=quantization.double,
        quant_type="nf4",
        device="meta",
    )
    # else an evaluation on such a CPU packs the weight anew, for kernels without a backward pass
    made.support_avx512bf16_for_cpu = False
    made.weight = library.nn.Params4bit(
        linear.weight.detach(),
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=quantization.double,
    ).to(device)
    return _finish(made, linear, device)


def _int8(
    linear: nn.Linear, quantization: Quantization, *, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    library = _import("bitsandbytes", quantization.kind)
    made = library.nn.Linear8bitLt(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        has_fp16_weights=False,
        threshold=OUTLIERS,
        device="meta",
    )
    made.weight = library.nn.Int8Params(
        linear.weight.detach(), requires_grad=False, has_fp16_weights=False
    ).to(device)
    return _finish(made, linear, device)


def _finish(made: nn.Module, linear: nn.Linear, device: torch.device) -> nn.Module:
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach().to(device), requires_grad=False)
    made.__dict__["is_quantised"] = True
    return made.train(linear.training)


class _Multiply(torch.autograd.Function):
    """x times a frozen weight; the float weight lives during the product alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: "IntegerLinear") -> torch.Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ ctx.layer.weight.to(grad.dtype), None


class IntegerLinear(nn.Module):
    """A linear layer with a frozen weight of integers and a scale for each row or group of a row.

    Args:
        values_OI: integers, as torchao rounded them.
        scale_OG: of each row, or of each group of 32 in it.
        packs: two values of 4 bits lie in a byte.
    """

    is_quantised = True

    def __init__(
        self,
        values_OI: torch.Tensor,
        scale_OG: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        packs: bool,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = values_OI.shape
        self.packs = packs
        stored = _pack(values_OI) if packs else values_OI
        # parameters, so that plans, tables and checksums count them
        self.values = nn.Parameter(stored, requires_grad=False)
        self.scale = nn.Parameter(scale_OG, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as floats, made anew at each call."""
        values_OI = _unpack(self.values) if self.packs else self.values
        scale_OG = self.scale
        groups = values_OI.unflatten(1, (scale_OG.shape[1], -1)).to(scale_OG.dtype)
        return (groups * scale_OG.unsqueeze(-1)).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = _Multiply.apply(x, self)
        return output if self.bias is None else output + self.bias


def _pack(values_OI: torch.Tensor) -> torch.Tensor:
    low, high = (values_OI + 8).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    return pairs.to(torch.int8) - 8


def _torchao(
    linear: nn.Linear, quantization: Quantization, *, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    library = _import("torchao.quantization", quantization.kind)
    is_int4 = quantization.kind == "torchao_int4"
    if is_int4 and linear.in_features % GROUP:
        raise UserError(
            f"`quantization` torchao_int4 came with a linear layer of {linear.in_features} inputs; "
            f"a multiple of {GROUP} was expected: so many weights share a scale. Use torchao_int8."
        )
    holder = nn.Sequential(nn.Linear(1, 1, bias=False))
    holder[0].weight = nn.Parameter(linear.weight.detach().to(device), requires_grad=False)
    library.quantize_(holder, _config(library, is_int4))
    made: Any = holder[0].weight  # now a tensor of torchao's
    values_OI, scale_OG = made.qdata, made.scale.reshape(linear.out_features, -1)
    if is_int4 and bool(made.zero_point.any()):
        raise AssertionError("torchao gave zero points where symmetric numbers were asked for")
    bias = None if linear.bias is None else linear.bias.detach().to(device)
    return IntegerLinear(values_OI, scale_OG, bias, packs=is_int4)


def _config(library: ModuleType, is_int4: bool) -> object:
    if not is_int4:
        return library.Int8WeightOnlyConfig()
    granularity = importlib.import_module("torchao.quantization.granularity")
    # the layout that torchao has for every device; packing is ours
    return library.IntxWeightOnlyConfig(
        # torch has int4 since 2.6, its stubs do not
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        granularity=granularity.PerGroup(GROUP),
    )


class _Outline(nn.Module):
    """Stands for a quantised layer on the meta device, where only bytes are counted."""

    is_quantised = True

    def __init__(self, linear: nn.Linear, num_bytes: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(
            torch.empty(num_bytes, dtype=torch.uint8, device="meta"), requires_grad=False
        )
        self.bias = linear.bias


def _outline(
    linear: nn.Linear, quantization: Quantization, *, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    numbers = linear.weight.numel()
    scales = {"int8": 4 * linear.out_features, "nf4": 4 * numbers // NF4_BLOCK}
    if quantization.double:  # a byte each, a float32 for a block of these, and their mean
        scales["nf4"] = numbers // NF4_BLOCK + 4 * -(-numbers // (NF4_BLOCK * SCALE_BLOCK)) + 4
    size = numbers * _BITS[quantization.kind] // 8
    return _Outline(linear, size + scales.get(quantization.kind, 0))


def _import(name: str, kind: str) -> ModuleType:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"`quantization` {kind} came, and {package} cannot be imported ({error}); it was "
            "expected, because it makes the numbers. Install it (bash scripts/setup.sh "
            f"quantization, or pip install {package}), or choose another kind."
        ) from error


_MAKERS = {"nf4": _nf4, "int8": _int8, "torchao_int8": _torchao, "torchao_int4": _torchao}
