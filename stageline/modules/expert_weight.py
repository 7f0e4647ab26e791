"""Fused weights of experts [E, ., .] to which something is added during a forward pass.

The forward pass of transformers runs as it is, eager or with grouped products; only what it reads
in the place of the parameter is another object. Not here: the adapters (`lora.py`).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from stageline.device import is_accelerator

_PRODUCTS = ("matmul", "mm", "bmm")
_GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
_FACTS = ("shape", "dtype", "device", "ndim", "dim", "size", "data_ptr", "requires_grad")
GROUPED_BYTES = 16  # grouped products want rows of a multiple of it
DENSE_BYTES = 1 << 28  # an accelerator dequantizes as much at once


def expert_parameters(module: nn.Module) -> list[str]:
    """Return the last names of the fused weights of experts that are a module's own."""
    is_experts = "expert" in type(module).__name__.lower() or hasattr(module, "num_experts")
    if not is_experts or type(module).__module__.startswith("torch."):
        return []
    own = module._parameters.items()
    return [leaf for leaf, p in own if p is not None and p.dim() == 3 and leaf not in vars(module)]


def num_experts(module: nn.Module) -> int:
    """Return E of a module with fused weights of experts, quantised or not; 0: it has none."""
    own = [*vars(module).values(), *map(module.get_parameter, expert_parameters(module))]
    if kept := [one for one in own if isinstance(one, ExpertWeight | nn.Parameter)]:
        return min(int(one.shape[0]) for one in kept)  # longcat has rows for identities, too
    # flat weights [E * rows, columns], whose module is called with the choices all the same
    takes = inspect.signature(module.forward).parameters
    return int(getattr(module, "num_experts", 0)) if "top_k_index" in takes else 0


@contextmanager
def reads_instead(module: nn.Module, values: Mapping[str, object]) -> Iterator[None]:
    """While open, a module's code finds other values under the names of some parameters."""
    store = vars(module)
    before = {leaf: store[leaf] for leaf in values if leaf in store}
    store.update(values)
    try:
        yield
    finally:
        for leaf in values:
            del store[leaf]
        store.update(before)


class LowRank(NamedTuple):
    """Summand of a weight: scale * left @ right, for each expert."""

    left: torch.Tensor  # [..., rows, rank]
    right: torch.Tensor  # [..., rank, columns]
    scale: float


class ExpertWeight:
    """A weight and low-rank summands, which are multiplied one after the other and never summed.

    Indices of experts, transposes and matrix products are those of a tensor. Anything else that is
    done with it sees the sum.
    """

    def __init__(self, base: Any, terms: Sequence[LowRank] = ()) -> None:
        self.base, self.terms = base, tuple(terms)

    def dense(self) -> torch.Tensor:
        """Return the sum, as a tensor."""
        is_packed = isinstance(self.base, PackedWeight)
        total: torch.Tensor = self.base.dense() if is_packed else self.base
        for left, right, scale in self.terms:
            total = total + (scale * (left @ right)).to(total.dtype)
        return total

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) or self.base.ndim != 3:
            return self.dense()[index]
        terms = [LowRank(left[index], right[index], s) for left, right, s in self.terms]
        return ExpertWeight(self.base[index], terms)

    @property
    def mT(self) -> "ExpertWeight":
        terms = [LowRank(right.mT, left.mT, scale) for left, right, scale in self.terms]
        return ExpertWeight(self.base.mT, terms)

    def transpose(self, first: int, second: int) -> Any:
        num_dims = self.base.ndim
        if {first % num_dims, second % num_dims} == {num_dims - 2, num_dims - 1}:
            return self.mT
        return self.dense().transpose(first, second)

    @property
    def T(self) -> Any:
        return self.transpose(0, 1)

    def t(self) -> Any:
        return self.T

    def __matmul__(self, other: torch.Tensor) -> torch.Tensor:
        return torch.matmul(self, other)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base if name in _FACTS else self.dense(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]
        # torch.nn.functional.grouped_mm passes on each option, set or not
        kwargs = {key: value for key, value in (kwargs or {}).items() if value is not None}
        if len(args) >= 2 and isinstance(args[1], cls) and isinstance(args[0], torch.Tensor):
            x, weight, *rest = args
            base = weight.base
            is_packed = isinstance(base, PackedWeight)
            if name == "linear":
                bias = rest[0] if rest else kwargs.get("bias")
                packed = replace(base.mT, bias=bias) if is_packed else None
                result = packed.product(x) if packed else func(x, base, bias)
                return weight._added(result, x, torch.matmul, True)
            if name in _PRODUCTS and not rest and not kwargs:
                return weight._added(base.product(x) if is_packed else func(x, base), x, func)
            if name in _GROUPED and not rest and kwargs.keys() == {"offs"}:
                ends = kwargs["offs"]
                result = base.product(x, ends.tolist()) if is_packed else func(x, base, offs=ends)
                return weight._added(result, x, _grouped(func, ends))
        if len(args) == 2 and isinstance(args[0], cls) and name in _PRODUCTS and not kwargs:
            weight, x = args
            if isinstance(x, torch.Tensor):  # W x = (x^T W^T)^T
                return func(x.mT, weight.mT).mT
        plain = [one.dense() if isinstance(one, cls) else one for one in args]
        named = {key: v.dense() if isinstance(v, cls) else v for key, v in kwargs.items()}
        return func(*plain, **named)

    def _added(
        self,
        result: torch.Tensor,
        x: torch.Tensor,
        multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        is_transposed: bool = False,
    ) -> torch.Tensor:
        """Add the products of x with the summands to that with the weight itself."""
        for left, right, scale in self.mT.terms if is_transposed else self.terms:
            low = multiply(multiply(x.to(left.dtype), left), right)
            result = result + (low * scale).to(result.dtype)
        return result


def _grouped(
    func: Callable[..., torch.Tensor], offsets: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a grouped product of which rows and columns may be of any number of bytes."""

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        step = GROUPED_BYTES // weight.element_size()
        num_columns = weight.shape[2]
        missing = (-weight.shape[1] % step, -num_columns % step)
        if any(missing):
            x, weight = F.pad(x, (0, missing[0])), F.pad(weight, (0, missing[1], 0, missing[0]))
        if not weight.is_contiguous() and not weight.mT.is_contiguous():  # peft's order of ranks
            weight = weight.contiguous()
        return func(x, weight, offs=offsets)[:, :num_columns]

    return multiply


@dataclass(frozen=True)
class PackedWeight:
    """Frozen matrices in few bits, which are dequantized for a product and not kept.

    Attributes:
        parts: tensors [E, ...] that matrix i is made of, each by its i-th entry: bits and scales.
        codes: tables of what bits stand for, of all matrices.
        unpack: (entries of the parts, codes) -> matrices [n, rows, columns].
        size: (rows, columns) as a product sees them.
        dtype: of a dequantized matrix.
        places: of the matrices that this weight stands for; None: all of them.
        is_transposed: products see what `unpack` returns transposed.
        is_one: stands for a single matrix, not for a stack of them.
        bias: frozen; a product with a single matrix adds it before it rounds.
    """

    parts: tuple[torch.Tensor, ...]
    codes: tuple[torch.Tensor, ...]
    unpack: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]
    size: tuple[int, int]
    dtype: torch.dtype
    places: Sequence[int] | None = None
    is_transposed: bool = False
    is_one: bool = False
    bias: torch.Tensor | None = None
    requires_grad = False

    def __len__(self) -> int:
        return len(self.parts[0]) if self.places is None else len(self.places)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.size if self.is_one else (len(self), *self.size))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def mT(self) -> "PackedWeight":
        turned = not self.is_transposed
        return replace(self, size=self.size[::-1], is_transposed=turned, bias=None)

    def __getitem__(self, index: Any) -> "PackedWeight":
        chosen = index.tolist() if isinstance(index, torch.Tensor) else index
        places = self.places or range(len(self))
        if isinstance(chosen, int):
            return replace(self, places=[places[chosen]], is_one=True)
        found = places[chosen] if isinstance(chosen, slice) else [places[one] for one in chosen]
        return replace(self, places=found)

    def matrices(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return some of them as floats, [n, rows, columns]."""
        places = numbers if self.places is None else [self.places[number] for number in numbers]
        if places[-1] - places[0] == len(places) - 1:  # a slice copies nothing
            chosen = [part[places[0] : places[-1] + 1] for part in self.parts]
        else:
            chosen = [part[list(places)] for part in self.parts]
        dense = self.unpack(chosen, self.codes)
        return dense.mT if self.is_transposed else dense

    def dense(self) -> torch.Tensor:
        """Return all of them as floats."""
        made = self.matrices(range(len(self)))
        return made[0] if self.is_one else made

    def product(self, x: torch.Tensor, ends: Sequence[int] | None = None) -> torch.Tensor:
        """Return x times the matrix; `ends`: where the rows of x [N, .] for each matrix end."""
        rows = x.flatten(0, -2)
        if ends is None:
            ends = [len(rows) * (number + 1) // len(self) for number in range(len(self))]
        made = _PackedProduct.apply(rows.to(self.dtype), self, tuple(ends))
        return made.to(x.dtype).unflatten(0, x.shape[:-1])


class _PackedProduct(torch.autograd.Function):
    """Rows times matrices; both passes dequantize those that have rows, some at a time."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: PackedWeight, ends: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.weight, ctx.ends = weight, ends
        return _times(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _times(grads[0], ctx.weight.mT, ctx.ends), None, None


def _times(x: torch.Tensor, weight: PackedWeight, ends: tuple[int, ...]) -> torch.Tensor:
    if weight.bias is not None:
        return torch.addmm(weight.bias, x, weight.dense())
    made, starts = x.new_zeros(len(x), weight.size[1]), (0, *ends)
    filled = [number for number, end in enumerate(ends) if end > starts[number]]
    step = 1
    if is_accelerator(x.device) and x.dtype == torch.bfloat16:  # grouped products take it
        row_bytes = [size * x.element_size() for size in weight.size]
        if not any(size % GROUPED_BYTES for size in row_bytes):
            step = max(1, DENSE_BYTES // (weight.size[0] * row_bytes[1]))
    for numbers in (filled[at : at + step] for at in range(0, len(filled), step)):
        first, last = starts[numbers[0]], ends[numbers[-1]]
        rows, dense = x[first:last], weight.matrices(numbers)
        if len(numbers) == 1:
            made[first:last] = rows @ dense[0]
        else:
            offsets = [ends[number] - first for number in numbers]
            offs = torch.tensor(offsets, dtype=torch.int32, device=x.device)
            made[first:last] = F.grouped_mm(rows, dense, offs=offs)
    return made
