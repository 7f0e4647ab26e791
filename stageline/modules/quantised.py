"""Frozen linear layers whose weights are kept in 8 or 4 bits: the base below LoRA (QLoRA, Dettmers
et al. 2023, arXiv 2305.14314).

A filled stage is quantised one linear layer after the other, so both forms exist of one layer only.
`nf4` and `int8` are layers of bitsandbytes; fused weights of experts are quantised expert by expert
and dequantized for a product, as are `fp8` and `mxfp4` of a checkpoint. Embedding, head, norms,
routers and a vision tower stay as they are.
"""

import copy
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn

from stageline.errors import package
from stageline.modules.expert_weight import ExpertWeight, PackedWeight, expert_parameters

Kind = Literal["nf4", "int8", "released", "fp8", "mxfp4"]
KEPT = ("fp8", "mxfp4")
NF4_BLOCK, SCALE_BLOCK = 64, 256  # nf4: weights that share a scale; scales that share a scale
OUTLIERS = 6.0  # int8: activations above it are multiplied in half precision, as in bitsandbytes
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Quantization:
    """Quantization of the frozen base.

    Attributes:
        kind: "released" becomes the checkpoint's own kind, one of KEPT, when a stage is built.
        compute_dtype: of nf4, in which layers multiply, or its name; None: that of the run.
        double: of nf4, the scales are quantised too.
        block: of fp8, rows and columns that share a scale.
        skipped: of fp8, modules of a layer with full weights: ends of names, or expressions.
    """

    kind: Kind
    compute_dtype: torch.dtype | str | None = None
    double: bool = False
    block: tuple[int, int] = (1, 1)
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.compute_dtype, str):
            object.__setattr__(self, "compute_dtype", getattr(torch, self.compute_dtype))


def quantise_layers(
    layers: Iterable[nn.Module],
    quantization: Quantization,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> int:
    """Quantise linear layers and weights of experts below `layers`, in place, one after another.

    Args:
        dtype: in which the model computes.

    Returns:
        Number of layers that were quantised.
    """
    device = torch.device(device)
    count = 0
    for layer in layers:
        if quantization.kind in KEPT:
            for module, leaf, weight in kept_weights(layer, quantization):  # for a plan
                hold(module, leaf, empty_bits(weight, quantization), quantization, weight)
            count += sum(getattr(module, "is_quantised", False) for module in layer.modules())
            continue
        linears = [  # below adapters, which train
            (parent, leaf, child)
            for name, parent in layer.named_modules()
            for leaf, child in parent.named_children()
            if type(child) is nn.Linear and {"lora", *_ROUTERS}.isdisjoint({*name.split("."), leaf})
        ]
        for parent, leaf, linear in linears:
            if linear.weight.is_meta:
                made: nn.Module = _Outline(linear, quantization)
            else:
                made = _quantised(linear, quantization, dtype=dtype, device=device)
            made.weight.plain_shape = linear.weight.shape  # type: ignore[union-attr]
            parent._modules[leaf] = made
            count += 1
        for experts in [module for module in layer.modules() if expert_parameters(module)]:
            _quantise_experts(experts, quantization, dtype=dtype, device=device)
            count += 1
    return count


def _quantise_experts(
    experts: nn.Module, quantization: Quantization, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Put bytes [E, bytes of one] in the place of fused weights; what reads them dequantizes."""
    is_nf4, own = quantization.kind == "nf4", quantization.compute_dtype or dtype
    assert isinstance(own, torch.dtype)  # a name was looked up
    for leaf in expert_parameters(experts):
        weight = experts._parameters[leaf]
        assert weight is not None  # it was found there
        # int8 has a scale for each output
        turns = not is_nf4 and getattr(experts, "is_transposed", False)
        num_experts, num_rows, num_columns = weight.mT.shape if turns else weight.shape
        size = num_rows, num_columns
        if weight.is_meta:
            shape = (-(-num_rows * num_columns // NF4_BLOCK), NF4_BLOCK) if is_nf4 else size
            num_bytes = num_experts * _num_bytes(*shape, quantization)
            packed = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
            parameter = nn.Parameter(packed, requires_grad=False)
        else:
            parts: list[nn.Parameter] = []
            for place, one in enumerate(weight.detach()):
                made, codes = _packed((one.mT if turns else one).to(device), quantization)
                # filled one by one: a list of all and their stack would be there at once
                parts = parts or [
                    nn.Parameter(each.new_empty(num_experts, *each.shape), requires_grad=False)
                    for each in made
                ]
                for part, each in zip(parts, made, strict=True):
                    part.data[place] = each
            unpack = partial(_dequantised, size=size, dtype=own)
            base = PackedWeight(tuple(parts), codes, unpack, size, own)
            experts.__dict__[leaf] = ExpertWeight(base.mT if turns else base)
            parameter = parts[0]
        parameter.plain_shape = weight.shape  # type: ignore[attr-defined]
        experts._parameters[leaf] = parameter
    for other in experts._parameters.values():
        if other is not None and not other.is_meta:
            other.data = other.data.to(device)
    experts.__dict__["is_quantised"] = True


Tensors = tuple[torch.Tensor, ...]


def _packed(matrix: torch.Tensor, quantization: Quantization) -> tuple[Tensors, Tensors]:
    """Return the bits of a matrix with their scales, and the tables that all matrices share."""
    library = _bitsandbytes(quantization.kind).functional
    if quantization.kind == "int8":
        return library.int8_vectorwise_quant(matrix.to(torch.float16).contiguous())[:2], ()
    # a row a block: on a CPU bitsandbytes 0.50 reads blocks that span rows at other places
    flat = matrix.flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % NF4_BLOCK)).view(-1, NF4_BLOCK)
    double = quantization.double
    values, state = library.quantize_4bit(blocks, quant_type="nf4", compress_statistics=double)
    codes = (state.code, state.state2.code) if double else (state.code,)
    return (values, *_scales(state)), codes


def _dequantised(
    parts: Sequence[torch.Tensor],
    codes: Sequence[torch.Tensor],
    *,
    size: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return matrices [n, rows, columns] of the stacked parts of what `_packed` took apart."""
    values, scales, *others = parts
    if not codes:
        return (values.to(torch.float32) * (scales / 127).unsqueeze(-1)).to(dtype)
    library = importlib.import_module("bitsandbytes").functional
    if others:  # the scales are quantised too; a block of them belongs to one matrix
        offset, nested = others
        num_blocks = scales.shape[1]
        padded = nn.functional.pad(scales, (0, -num_blocks % SCALE_BLOCK))
        state = library.QuantState(
            nested.flatten(), code=codes[1], blocksize=SCALE_BLOCK, dtype=torch.float32
        )
        wide = library.dequantize_blockwise(padded.flatten(), state).view(padded.shape)
        scales = (wide[:, :num_blocks] + offset.view(-1, 1)).contiguous()
    state = library.QuantState(
        scales.flatten(),
        code=codes[0],
        blocksize=NF4_BLOCK,
        shape=(scales.numel(), NF4_BLOCK),
        quant_type="nf4",
        dtype=dtype,
    )
    blocks = library.dequantize_4bit(values.reshape(-1, 1), state)
    return blocks.view(len(scales), -1)[:, : size[0] * size[1]].view(-1, *size)


def _scales(state: Any) -> list[torch.Tensor]:
    """Return the tensors of a scale, or of a state of nf4 and of the states in it."""
    if isinstance(state, torch.Tensor):
        return [state]
    found = []
    while state is not None:
        found += [value for value in (state.absmax, state.offset) if value is not None]
        state = state.state2
    return found


def _num_bytes(num_rows: int, num_columns: int, quantization: Quantization) -> int:
    """Return the bytes of a matrix in few bits, with its scales."""
    numbers = num_rows * num_columns
    if quantization.kind == "int8":
        return numbers + 4 * num_rows
    num_blocks = -(-numbers // NF4_BLOCK)
    if quantization.double:  # a byte each, a float32 for a block of these, and their mean
        return -(-numbers // 2) + num_blocks + 4 * -(-num_blocks // SCALE_BLOCK) + 4
    return -(-numbers // 2) + 4 * num_blocks


def kept_weights(
    root: nn.Module, quantization: Quantization
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield module, last name and full weight of what a checkpoint has in few bits."""
    for name, module in root.named_modules():
        own = re.sub(r".*\.layers\.\d+\.", "", name)
        if any(re.fullmatch(rf"(.*\.)?({one})(\..*)?", own) for one in quantization.skipped):
            continue
        is_kept = type(module) is nn.Linear and "lora" not in name.split(".")
        leaves = ["weight"] if is_kept and quantization.kind == "fp8" else []
        for leaf in leaves or expert_parameters(module):
            if leaf not in vars(module):
                yield module, leaf, module.get_parameter(leaf)


def empty_bits(weight: torch.Tensor, quantization: Quantization) -> list[torch.Tensor]:
    """Return bits and scales for a weight [..., rows, columns], without their values."""
    *lead, rows, columns = weight.shape
    if quantization.kind == "mxfp4":  # gpt-oss multiplies from the right
        bits = weight.new_zeros(*lead, columns, rows // 32, 16, dtype=torch.uint8)
        return [bits, bits[..., 0] + 127]
    grid = [-(-n // b) for n, b in zip((rows, columns), quantization.block, strict=True)]
    return [weight.to(torch.float8_e4m3fn), weight.new_ones(*lead, *grid, dtype=torch.float32)]


def hold(
    module: nn.Module,
    leaf: str,
    parts: Sequence[torch.Tensor],
    quantization: Quantization,
    weight: torch.Tensor,
) -> None:
    """Put bits and scales in the place of a weight; what reads it dequantizes."""

    def unpack(parts: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> torch.Tensor:
        if quantization.kind == "mxfp4":
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors

            return convert_moe_packed_tensors(*parts, dtype=dtype)
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        return Fp8Dequantize(None)._dequantize_one(parts[0], parts[1], dtype)

    is_one, dtype = weight.ndim == 2, weight.dtype
    held = tuple(nn.Parameter(one[None] if is_one else one, False) for one in parts)
    held[0].plain_shape = weight.shape  # type: ignore[attr-defined]
    module._parameters[leaf] = held[0]
    base = PackedWeight(held, (), unpack, (weight.shape[-2], weight.shape[-1]), dtype)
    module.__dict__ |= {leaf: ExpertWeight(base[0] if is_one else base), "is_quantised": True}


def plain_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a weight; of a quantised one that of the weight that it was made of."""
    return getattr(parameter, "plain_shape", parameter.shape)


def base_bytes(layers: Iterable[nn.Module]) -> int:
    """Bytes that linear layers and experts below `layers` keep, quantised or not, no adapters."""
    total = 0
    for layer in layers:
        for name, module in layer.named_modules():
            if "lora" in name.split("."):
                continue
            is_plain = type(module) is nn.Linear or bool(expert_parameters(module))
            if getattr(module, "is_quantised", False) or is_plain:
                total += sum(tensor.untyped_storage().nbytes() for tensor in _stored(module))
    return total


def make_scales_parameters(
    module: nn.Module, codes: dict[bytes, nn.Parameter]
) -> list[nn.Parameter]:
    """Make the tensors that are kept next to packed weights parameters, in place.

    These scales and code books then move with the other parameters; no module registers them.

    Args:
        codes: code books by their contents, which layers then share.
    """
    made: list[nn.Parameter] = []

    def shared(code: torch.Tensor) -> nn.Parameter:
        key = code.cpu().numpy().tobytes()
        return codes.setdefault(key, nn.Parameter(code, requires_grad=False))

    for child in module.modules():
        for leaf, packed in _packed_weights(child).items():
            own = replace(packed, codes=tuple(map(shared, packed.codes)))
            child.__dict__[leaf] = ExpertWeight(own)
            made += cast(Any, (*own.parts[1:], *own.codes))
        for weight in child._parameters.values():
            holder: Any = getattr(weight, "quant_state", None)
            if hasattr(weight, "CB"):
                holder, state = weight, cast(Any, child).state
                # a first pass moves these two from the weight to the layer
                holder.SCB = state.SCB if holder.SCB is None else holder.SCB
                holder.CB, state.CB, state.SCB = holder.data, None, None
            while holder is not None:
                for name in ("absmax", "offset", "code", "SCB"):
                    value = holder.__dict__.get(name)
                    if isinstance(value, torch.Tensor):
                        is_code = name == "code"
                        parameter = (
                            shared(value) if is_code else nn.Parameter(value, requires_grad=False)
                        )
                        setattr(holder, name, parameter)
                        made.append(parameter)
                holder = getattr(holder, "state2", None)
    return made


def placed(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Return a weight, or what a quantised layer keeps, on another device.

    Args:
        tensors: what is there already, by the id of the parameter here.
    """
    if isinstance(value, torch.Tensor):
        there = tensors.get(id(value), value)
        if type(value) in (torch.Tensor, nn.Parameter) or there is value:
            return there
        weight = torch.Tensor._make_subclass(type(value), there, False)
        weight.__dict__.update({name: placed(own, tensors) for name, own in vars(value).items()})
        if getattr(value, "CB", None) is not None:
            weight.__dict__["CB"] = there
        return weight
    if isinstance(value, ExpertWeight) and isinstance(packed := value.base, PackedWeight):
        parts, codes = (
            [placed(one, tensors) for one in own] for own in (packed.parts, packed.codes)
        )
        return ExpertWeight(replace(packed, parts=tuple(parts), codes=tuple(codes)))
    if not type(value).__module__.startswith("bitsandbytes.") or isinstance(value, nn.Module):
        return value
    twin = copy.copy(value)
    twin.__dict__.update({name: placed(own, tensors) for name, own in vars(value).items()})
    return twin


def _packed_weights(module: nn.Module) -> dict[str, PackedWeight]:
    """Return the weights of experts in few bits that are a module's own."""
    found = ((leaf, getattr(value, "base", None)) for leaf, value in vars(module).items())
    return {leaf: base for leaf, base in found if isinstance(base, PackedWeight)}


def _stored(module: nn.Module) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = [*module.parameters(recurse=False)]
    for packed in _packed_weights(module).values():
        tensors += packed.parts[1:]
    weight = module._parameters.get("weight")
    state = getattr(weight, "quant_state", None)
    tensors += [] if state is None else _scales(state)
    scale = getattr(weight, "SCB", None)
    scale = getattr(getattr(module, "state", None), "SCB", None) if scale is None else scale
    return tensors if scale is None else [*tensors, scale]


def _bitsandbytes(kind: str) -> Any:
    user, other = f"`quantization` {kind}", "drop `quantization`"
    return package("bitsandbytes", user, extra="quantization", instead=other)


def _quantised(
    linear: nn.Linear, quantization: Quantization, *, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    library = _bitsandbytes(quantization.kind)
    sizes, weight = (linear.in_features, linear.out_features), linear.weight.detach()
    plain: dict[str, Any] = {"bias": linear.bias is not None, "device": "meta"}
    if quantization.kind == "nf4":
        double = quantization.double
        made = library.nn.Linear4bit(
            *sizes,
            compute_dtype=quantization.compute_dtype or dtype,
            compress_statistics=double,
            quant_type="nf4",
            **plain,
        )
        # else an evaluation on such a CPU packs the weight again, for kernels without a backward
        made.support_avx512bf16_for_cpu = False
        made.weight = library.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=double
        ).to(device)
    else:
        made = library.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=OUTLIERS, **plain)
        made.weight = library.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(
            device
        )
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach().to(device), requires_grad=False)
    made.__dict__["is_quantised"] = True
    return made.train(linear.training)


class _Outline(nn.Module):
    """Stands for a quantised layer on the meta device, where only bytes are counted."""

    is_quantised = True

    def __init__(self, linear: nn.Linear, quantization: Quantization) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        num_bytes = _num_bytes(linear.out_features, linear.in_features, quantization)
        self.weight = nn.Parameter(
            torch.empty(num_bytes, dtype=torch.uint8, device="meta"), requires_grad=False
        )
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], self.out_features))
