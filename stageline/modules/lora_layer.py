"""The adapter of one linear layer: plain LoRA, or DoRA with a magnitude for each output.

DoRA (arXiv 2402.09353) turns W + s B A into m (W + s B A) / |W + s B A|, a norm for each output,
through which no gradient goes. Not here: what wraps a layer (`lora.py`), how an adapter starts
(`lora_start.py`).
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from stageline.errors import UserError

MAGNITUDE = "lora_magnitude_vector"


class LoRALayer(nn.Module):
    """The adapter alone: scale * B(A(dropout(x))).

    Args:
        in_features, out_features: of the layer beside it.
        rank: rows of A.
        scale: alpha / rank, or alpha / sqrt(rank).
        dropout: on the input, in training.
        use_dora: a magnitude for each output, too.

    Attributes:
        start: how it begins, see `lora_start.py`.
        use_rslora: how files tell the scale.
        taken: (A, B) whose product was taken out of the layer's weight at the start; None: nothing.
    """

    start = "default"
    use_rslora = False
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
        kwargs = {"device": device, "dtype": dtype}
        self.lora_A = nn.Linear(in_features, rank, bias=False, **kwargs)
        self.lora_B = nn.Linear(rank, out_features, bias=False, **kwargs)
        magnitude = nn.Parameter(torch.ones(out_features, **kwargs)) if use_dora else None
        self.register_parameter(MAGNITUDE, magnitude)
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else nn.Identity()
        self.scale = scale

    @property
    def rank(self) -> int:
        return self.lora_A.out_features

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
        """Takes weights of another adapter, whatever the rank was before."""
        for linear, value in ((self.lora_A, down), (self.lora_B, up)):
            old = linear.weight
            linear.out_features, linear.in_features = value.shape
            value = value.to(device=old.device, dtype=old.dtype)
            linear.weight = nn.Parameter(value, requires_grad=old.requires_grad)
        self.scale = scale
        if magnitude is not None:
            self.lora_magnitude_vector.copy_(magnitude)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.lora_A.weight.dtype)
        return self.lora_B(self.lora_A(self.dropout(x))) * self.scale

    def forward_dora(self, x: torch.Tensor, result: torch.Tensor, base: nn.Module) -> torch.Tensor:
        """What DoRA adds to the output `result` of the layer `base`; as `peft` computes it.

        With dropout the whole direction, and not the low rank alone, sees the thinned input.
        """
        x = x.to(self.lora_A.weight.dtype)
        weight = dense_weight(base).to(x.dtype)
        if self.training and isinstance(self.dropout, nn.Dropout):
            x = self.dropout(x)
            plain = F.linear(x, weight)
        else:
            plain = result if base.bias is None else result - base.bias
        share = self.lora_magnitude_vector / self.norm(weight)
        return (share - 1) * plain + share * self.lora_B(self.lora_A(x)) * self.scale

    @torch.no_grad()
    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """Length of each output's row of a weight [out, in] with the adapter added."""
        low = self.lora_B.weight @ self.lora_A.weight
        return torch.linalg.norm(weight + self.scale * low.to(weight), dim=1)

    def delta(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What the low rank adds to a weight [out, in]."""
        return self.scale * (self.lora_B.weight.to(dtype) @ self.lora_A.weight.to(dtype))

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight [out, in] with the adapter in it; the sum is made in at least float32."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        total = weight.to(dtype) + self.delta(dtype)
        if self.use_dora:
            length = torch.linalg.norm(total, dim=1)
            total = total * (self.lora_magnitude_vector.to(dtype) / length).unsqueeze(1)
        return total


# -- the layer beside it -------------------------------------------------------------------------


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear layer; a `Conv1D` keeps its weight transposed."""
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    return module.in_features, module.out_features


def is_quantised(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as something else than plain floats."""
    weight = module.weight
    is_plain = _is_plain(weight) and weight.is_floating_point()
    return getattr(module, "is_quantised", False) or not is_plain


def _is_plain(weight: torch.Tensor) -> bool:
    return type(weight) in (torch.Tensor, nn.Parameter)


def dense_weight(module: nn.Module) -> torch.Tensor:
    """The weight [out, in] of a linear layer as floats, whatever it keeps.

    Of bitsandbytes with its scales, of a quantised kind of tensor by its `dequantize`.
    """
    weight = module.weight
    if getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state)
    if weight.dtype == torch.int8:
        scales = getattr(weight, "SCB", None)
        scales = module.state.SCB if scales is None else scales
        return weight.data.to(torch.float32) * (scales.to(torch.float32) / 127).unsqueeze(1)
    if type(weight).__module__.startswith("torchao"):
        weight = weight.dequantize()
    return weight.T if isinstance(module, Conv1D) else weight


@torch.no_grad()
def put_weight(module: nn.Module, weight: torch.Tensor, *, why: str) -> None:
    """Gives a linear layer another weight [out, in], rounded to its dtype.

    Raises:
        UserError: the layer is quantised; `why` says what wanted to change it.
    """
    if is_quantised(module):
        raise UserError(
            f"{why} came with a quantised base, plain weights were expected: it changes them, and "
            "a quantised weight that changes is rounded anew. Leave the quantisation out, or this."
        )
    old = module.weight
    value = weight.T if isinstance(module, Conv1D) else weight
    old.data = value.to(device=old.device, dtype=old.dtype).contiguous()
