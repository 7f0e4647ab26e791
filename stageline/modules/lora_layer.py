"""The adapter of one linear layer, or of one fused weight of experts.

Plain LoRA, or DoRA with a magnitude for each output of a linear layer.

DoRA (arXiv 2402.09353) turns W + s B A into m (W + s B A) / |W + s B A|, a norm for each output,
through which no gradient goes. Not here: what wraps a layer (`lora.py`).
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from stageline.device import generators_kept, is_accelerator
from stageline.errors import UserError

MAGNITUDE = "lora_magnitude_vector"
PLAIN: tuple[type, ...] = (torch.Tensor, nn.Parameter)  # a quantised weight has another type
Linear = nn.Linear | Conv1D  # a quantised layer has another class with the same attributes


class LoRALayer(nn.Module):
    """An adapter without its layer: scale * B(A(dropout(x))).

    Args:
        scale: alpha / rank, or alpha / sqrt(rank).
        use_dora: a magnitude for each output, too.

    Attributes:
        start: how it begins, see `init_lora_layer`.
        use_rslora: how files tell the scale.
        num_experts: above 1, A and B of a fused weight, see `ExpertLoRALayer`.
        taken: (A, B) whose product was taken out of the layer's weight at the start; None: nothing.
    """

    lora_magnitude_vector: nn.Parameter | None
    start = "default"
    use_rslora = False
    num_experts = 1
    taken: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        use_dora: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.lora_A = nn.Linear(in_features, rank, bias=False, **kwargs)
        self.lora_B = nn.Linear(rank, out_features, bias=False, **kwargs)
        magnitude = nn.Parameter(torch.ones(out_features, **kwargs)) if use_dora else None
        self.register_parameter(MAGNITUDE, magnitude)
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else nn.Identity()
        self.scale = scale

    @property
    def rank(self) -> int:
        return self.lora_A.out_features // self.num_experts

    @property
    def use_dora(self) -> bool:
        return self.lora_magnitude_vector is not None

    @torch.no_grad()
    def load(
        self,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
        magnitude: torch.Tensor | None = None,
    ) -> None:
        """Take weights of another adapter, whatever the rank was before."""
        for linear, value in ((self.lora_A, down), (self.lora_B, up)):
            old = linear.weight
            linear.out_features, linear.in_features = value.shape
            value = value.to(device=old.device, dtype=old.dtype)
            linear.weight = nn.Parameter(value, requires_grad=old.requires_grad)
        self.scale = scale
        if magnitude is not None:
            assert self.lora_magnitude_vector is not None  # both adapters are of one kind
            self.lora_magnitude_vector.copy_(magnitude)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.lora_A.weight.dtype)
        return self.lora_B(self.lora_A(self.dropout(x))) * self.scale

    def added_to(self, result: torch.Tensor, x: torch.Tensor, base: Linear) -> torch.Tensor:
        """Add the adapter's output for `x` to the output of the layer that it adapts."""
        if self.use_dora:
            return result + self.forward_dora(x, result, base).to(result.dtype)
        if self.lora_A.weight.dtype != result.dtype or not is_accelerator(result.device):
            return result + self(x).to(result.dtype)
        # scale and sum become part of the product: alone, each would read and write all outputs
        low, up = self.lora_A(self.dropout(x)).flatten(0, -2), self.lora_B.weight.T
        return torch.addmm(result.flatten(0, -2), low, up, alpha=self.scale).view(result.shape)

    def forward_dora(self, x: torch.Tensor, result: torch.Tensor, base: Linear) -> torch.Tensor:
        """Return what DoRA adds to the output `result` of the layer `base`, as `peft` does.

        With dropout the whole direction, and not only the low rank, sees the thinned input.
        """
        x = x.to(self.lora_A.weight.dtype)
        weight = dense_weight(base).to(x.dtype)
        if self.training and isinstance(self.dropout, nn.Dropout):
            x = self.dropout(x)
            plain = F.linear(x, weight)
        else:
            plain = result if base.bias is None else result - base.bias
        assert self.lora_magnitude_vector is not None  # `use_dora` says so
        share = self.lora_magnitude_vector / self.norm(weight)
        return (share - 1) * plain + share * self.lora_B(self.lora_A(x)) * self.scale

    @torch.no_grad()
    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the length of each output's row of a weight [out, in] with the adapter added."""
        low = self.lora_B.weight @ self.lora_A.weight
        return torch.linalg.norm(weight + self.scale * low.to(weight), dim=1)

    def delta(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return what the low rank adds to a weight [out, in]."""
        return self.scale * (self.lora_B.weight.to(dtype) @ self.lora_A.weight.to(dtype))

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight [out, in] with the adapter in it, summed in at least float32."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        total = weight.to(dtype) + self.delta(dtype)
        if self.lora_magnitude_vector is not None:
            length = torch.linalg.norm(total, dim=1)
            total = total * (self.lora_magnitude_vector.to(dtype) / length).unsqueeze(1)
        return total


class ExpertLoRALayer(LoRALayer):
    """The adapters of a fused weight of E experts, laid out as peft's `target_parameters`.

    A is [E * rank, in], expert by expert; B is [out, rank * E], the experts of a rank together.

    Args:
        weight: [E, out, in], or [E, in, out] if `is_transposed`.
        options: of `LoRALayer`.
    """

    def __init__(
        self, weight: torch.Tensor, *, rank: int, is_transposed: bool, **options: Any
    ) -> None:
        num_experts, out_features, in_features = weight.shape
        if is_transposed:
            out_features, in_features = in_features, out_features
        super().__init__(in_features, out_features, rank=rank * num_experts, **options)
        self.num_experts, self.is_transposed = num_experts, is_transposed

    def factors(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two matrices for each expert whose product, scaled, is added to the weight."""
        down_ERI = self.lora_A.weight.to(dtype).unflatten(0, (self.num_experts, -1))
        up_EOR = self.lora_B.weight.to(dtype).unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        return (down_ERI.mT, up_EOR.mT) if self.is_transposed else (up_EOR, down_ERI)

    def delta(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return what the low rank adds to the fused weight, in its layout."""
        left, right = self.factors(dtype)
        return self.scale * (left @ right)


@dataclass(frozen=True)
class ExpertParameter:
    """A fused weight of experts in the role of a linear layer."""

    module: nn.Module
    leaf: str

    @property
    def weight(self) -> nn.Parameter:
        parameter = self.module._parameters[self.leaf]
        assert parameter is not None  # it was found there
        return parameter

    @property
    def is_quantised(self) -> bool:
        return getattr(self.module, "is_quantised", False)


def linear_sizes(module: Linear) -> tuple[int, int]:
    """Return (in_features, out_features) of a linear layer; a `Conv1D` has a transposed weight."""
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    return module.in_features, module.out_features


def is_quantised(module: Linear | ExpertParameter) -> bool:
    """Whether a linear layer keeps its weight as something else than plain floats."""
    is_float = type(module.weight) in PLAIN and module.weight.is_floating_point()
    return getattr(module, "is_quantised", False) or not is_float


def dense_weight(module: Linear | ExpertParameter) -> torch.Tensor:
    """Return the weight [out, in] of a linear layer as floats, also of bitsandbytes."""
    weight = module.weight
    quant_state = getattr(weight, "quant_state", None)
    if quant_state is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, quant_state)
    if weight.dtype == torch.int8:
        scales = getattr(weight, "SCB", None)
        scales = cast(Any, module).state.SCB if scales is None else scales
        return weight.data.to(torch.float32) * (scales.to(torch.float32) / 127).unsqueeze(1)
    return weight.T if isinstance(module, Conv1D) else weight


@torch.no_grad()
def put_weight(module: Linear | ExpertParameter, weight: torch.Tensor, *, why: str) -> None:
    """Give a linear layer another weight [out, in], rounded to its dtype.

    Raises:
        UserError: the layer is quantised; `why` says what wanted to change it.
    """
    if is_quantised(module):
        raise UserError(
            f"{why} does not work with a quantised base, whose weights cannot change without "
            "another rounding. Drop one of the two."
        )
    old = module.weight
    value = weight.T if isinstance(module, Conv1D) else weight
    old.data = value.to(device=old.device, dtype=old.dtype).contiguous()


# How an adapter starts: as `peft` does it, and the same for any number of stages.
# Each layer draws from a seed of its own, made of the run's seed and the layer's full name. PiSSA
# (arXiv 2404.02948) puts the principal singular values of a weight into A and B and leaves the rest
# the dtype is that of the weight, so that outputs are what they were.

PISSA = "pissa"
Pair = tuple[torch.Tensor, torch.Tensor]


def name_seed(seed: int, name: str) -> int:
    """Return a seed for one named thing: independent of everything else that is drawn."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def init_lora_layer(
    layer: LoRALayer,
    name: str,
    *,
    seed: int,
    base: Linear | ExpertParameter | None = None,
    taken: Pair | None = None,
) -> None:
    """Start an adapter by its `start`; nothing on meta.

    Args:
        name: the layer's full name, which with `seed` decides the draw on any device.
        base: the linear layer that it adapts, which PiSSA changes and whose norms DoRA starts with.
        taken: for PiSSA, the (A, B) of an earlier start of this run, instead of computing them.
    """
    if layer.lora_A.weight.is_meta:
        return
    generator = torch.Generator().manual_seed(name_seed(seed, f"{name}.lora_A.weight"))
    with torch.no_grad():
        if layer.start.startswith(PISSA):
            _start_pissa(layer, base, taken, generator)
        elif layer.start == "orthogonal":
            # from the even and the odd rows of one orthogonal matrix: B A is zero
            if (rank := layer.rank) % 2:
                raise UserError(
                    f"`lora_init` orthogonal needs an even rank, and this is {rank}. Set "
                    f"`lora_rank` {rank + 1}."
                )
            rows = torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0]
            down = torch.randn(layer.lora_A.in_features, rank // 2, generator=generator)
            up = torch.randn(rank // 2, layer.lora_B.out_features, generator=generator)
            down, up = down @ rows[0::2], up.T @ rows[1::2]
            layer.lora_A.weight.copy_(down.T / 10)
            layer.lora_B.weight.copy_(up / 10)
        else:
            drawn = torch.empty(layer.lora_A.weight.shape, dtype=torch.float32)
            if layer.start == "gaussian":
                nn.init.normal_(drawn, std=1 / layer.rank, generator=generator)
            else:
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            layer.lora_A.weight.copy_(drawn)
            layer.lora_B.weight.zero_()
        if layer.lora_magnitude_vector is not None:
            assert base is not None  # a magnitude is that of a layer's weight
            weight = dense_weight(base)
            exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
            layer.lora_magnitude_vector.copy_(layer.norm(exact))


def _start_pissa(
    layer: LoRALayer,
    base: Linear | ExpertParameter | None,
    taken: Pair | None,
    generator: torch.Generator,
) -> None:
    if base is None or is_quantised(base):
        raise UserError(
            f"`lora_init` {layer.start} does not work with a quantised base, as it takes a part "
            "out of plain weights. Use `lora_init` default."
        )
    weight = dense_weight(base)
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rank, pair = layer.rank, taken
    if rank > min(weight.shape):
        raise UserError(
            f"`lora_init` {layer.start} with rank {rank} does not fit a weight "
            f"{list(weight.shape)}. Lower `lora_rank` to {min(weight.shape)} at most."
        )
    if pair is None:
        if rounds := layer.start.removeprefix(PISSA).removeprefix("_niter_"):
            with generators_kept([weight.device]):
                torch.manual_seed(generator.initial_seed())
                left, values, right = torch.svd_lowrank(exact, rank, niter=int(rounds))
            right = right.T
        else:
            left, values, right = torch.linalg.svd(exact, full_matrices=False)
            left, values, right = left[:, :rank], values[:rank], right[:rank]
        root = (values / layer.scale).sqrt()
        pair = root.unsqueeze(1) * right, left * root
    for linear, value in zip((layer.lora_A, layer.lora_B), pair, strict=True):
        linear.weight.copy_(value)
    # the part taken out is A and B as they are after rounding to their dtype
    put_weight(base, exact - layer.delta(exact.dtype), why=f"`lora_init` {layer.start}")
    down, up = (one.weight.detach().to("cpu", copy=True) for one in (layer.lora_A, layer.lora_B))
    layer.taken = down, up


def restored_weight(layer: LoRALayer, base: Linear | ExpertParameter) -> torch.Tensor:
    """Return the weight [out, in] that a layer had before PiSSA took a part of it."""
    assert layer.taken is not None
    weight = dense_weight(base)
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    down, up = (value.to(exact) for value in layer.taken)
    return (exact + layer.scale * (up @ down)).to(weight.dtype)
