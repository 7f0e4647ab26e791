"""Settings of a call of the streaming engine, and the split of its values into micro-batches.

A call's settings win over the model's. Values are tuples, lists and dicts of tensors and of
anything else. Splitting copies nothing: parts of a tensor are views, which gradients flow through.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from stageline.streaming.plan import Plan


@dataclass(frozen=True)
class RoundPipeRunConfig:
    """Settings of a call; None inherits: from the model's, then from the defaults in brackets.

    Attributes:
        requires_grad: outputs join autograd [whether gradients are on].
        output_device: device of the outputs [host].
        preserve_rng_state: random numbers of a layer are drawn from seeds of their own, which
            recomputation draws again [True].
        recompute_grain: the unit that a backward pass recomputes from its input at once: a whole
            `stage` [default] or a `layer`, which keeps more inputs and fewer activations.
        num_microbatch: largest number of micro-batches [devices + 1].
        split_input: (spec of args, spec of kwargs) or `f(args, kwargs, n) -> (list, list)`;
            [tensors of the batch's size are cut along dimension 0, the rest is repeated].
        split_label: spec or `f(label, n) -> list` [as inputs].
        merge_output: spec, `f(list)`, or False: a list, a value each micro-batch [tensors joined
            along dimension 0, scalars averaged, other values must be equal].
        execute_plan: which layers are a stage [chosen by cost].

    Specs are those of torch.distributed.pipelining.microbatch: `TensorChunkSpec(dim)` in the
    structure of the value, anything else repeats what stands there.
    """

    requires_grad: bool | None = None
    output_device: torch.device | str | None = None
    preserve_rng_state: bool | None = None
    recompute_grain: Literal["stage", "layer"] | None = None
    num_microbatch: int | None = None
    split_input: tuple[Any, Any] | Callable[..., tuple[list, list]] | None = None
    split_label: Any = None
    merge_output: Any = None
    execute_plan: "Plan | None" = None

    def over(self, *bases: "RoundPipeRunConfig") -> "RoundPipeRunConfig":
        """These settings; where one is None, that of the first base that has one."""
        merged: dict[str, Any] = {}
        for config in reversed((self, *bases)):
            merged |= {name: value for name, value in vars(config).items() if value is not None}
        return RoundPipeRunConfig(**merged)

    def filled(self, num_lanes: int) -> "RoundPipeRunConfig":
        """Return the settings with defaults for None, except for the plan and the splits."""
        defaults = RoundPipeRunConfig(
            requires_grad=torch.is_grad_enabled(),
            output_device=torch.device("cpu"),
            preserve_rng_state=True,
            recompute_grain="stage",
            num_microbatch=num_lanes + 1,
        )
        filled = self.over(defaults)
        if filled.recompute_grain not in ("stage", "layer"):
            raise ValueError(
                f"recompute_grain {filled.recompute_grain!r} is unknown. Use 'stage' or 'layer'."
            )
        assert filled.num_microbatch is not None and filled.output_device is not None
        if filled.num_microbatch < 1:
            raise ValueError(f"num_microbatch {filled.num_microbatch} is below 1. Use 1 or more.")
        return replace(filled, output_device=torch.device(filled.output_device))


def place_of_call() -> str:
    """Return file:line of the call into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


Inputs = tuple[tuple, dict[str, Any]]


class Packed(list):
    """A value a micro-batch, as `merge_output=False` returns it; a leaf for pytree."""


def split_inputs(
    args: tuple,
    kwargs: dict[str, Any],
    spec: tuple[Any, Any] | Callable[..., tuple[list, list]] | None,
    num_microbatch: int,
) -> list[Inputs]:
    """(args, kwargs) of each micro-batch.

    Without a spec the size of the batch is the first dimension of the first tensor that has one;
    tensors of that size are cut, others and all else are repeated. A smaller batch gives fewer
    micro-batches; a `Packed` gives as many as it has.
    """
    if callable(spec):
        of_args, of_kwargs = spec(args, kwargs, num_microbatch)
        if len(of_args) != len(of_kwargs) or not of_args:
            raise ValueError(
                f"split_input made {len(of_args)} args and {len(of_kwargs)} kwargs. Return equally "
                "many, at least one."
            )
        return [(tuple(one), dict(other)) for one, other in zip(of_args, of_kwargs, strict=True)]
    args_spec, kwargs_spec = spec if spec is not None else (None, None)
    values = [value for value, its in ((args, args_spec), (kwargs, kwargs_spec)) if its is None]
    size = _batch_size(values)
    packed = {len(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Packed)}
    assert len(packed) <= 1, f"packed inputs hold {sorted(packed)} micro-batches"
    num_parts = num_microbatch if size is None else max(1, min(size, num_microbatch))
    num_parts = next(iter(packed), num_parts)
    all_args = _split(args, args_spec, num_parts, size)
    all_kwargs = _split(kwargs, kwargs_spec, num_parts, size)
    return list(zip(all_args, all_kwargs, strict=True))


def split_label(label: Any, spec: Any, num_parts: int) -> list[Any]:
    """The label of each micro-batch."""
    if callable(spec):
        made = list(spec(label, num_parts))
        if len(made) != num_parts:
            raise ValueError(f"split_label made {len(made)} labels. Return {num_parts} of them.")
        return made
    return _split(label, spec, num_parts, _batch_size(label))


def merge_outputs(outputs: Sequence[Any], spec: Any) -> Any:
    """One value of those of all micro-batches."""
    if spec is False:
        return Packed(outputs)
    if callable(spec) and not isinstance(spec, (TensorChunkSpec, _CustomReducer)):
        return spec(list(outputs))
    flat, structure = pytree.tree_flatten(outputs[0])
    columns = [flat]
    for output in outputs[1:]:
        leaves, other = pytree.tree_flatten(output)
        if other != structure:
            raise ValueError(
                f"micro-batches gave {structure} and {other}. Give merge_output a function."
            )
        columns.append(leaves)
    if spec in (None, True):
        merged = [_joined(values) for values in zip(*columns, strict=True)]
    else:
        rules = _leaf_rules(outputs[0], spec)
        pairs = zip(zip(*columns, strict=True), rules, strict=True)
        merged = []
        for values, rule in pairs:
            if isinstance(rule, TensorChunkSpec):
                merged.append(torch.cat(values, dim=rule.split_dim))
            elif isinstance(rule, _CustomReducer):
                merged.append(functools.reduce(rule.reduce_fn, values, rule.init_value))
            else:
                is_tensor = isinstance(values[0], torch.Tensor)
                merged.append(values[0] if is_tensor else _equal(values))
    return pytree.tree_unflatten(merged, structure)


def _joined(values: tuple[Any, ...]) -> Any:
    first = values[0]
    if not isinstance(first, torch.Tensor) or (first.ndim == 0 and not first.is_floating_point()):
        return _equal(values)
    return torch.stack(values).mean(0) if first.ndim == 0 else torch.cat(values, dim=0)


def _equal(values: tuple[Any, ...]) -> Any:
    if any(value != values[0] for value in values):
        raise ValueError(f"micro-batches gave {values}. Give merge_output a function.")
    return values[0]


def _batch_size(value: Any) -> int | None:
    """Return the first dimension of the first tensor that has one, also inside of packed values."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Packed):
            sizes = [_batch_size(part) for part in leaf]
            known = [size for size in sizes if size is not None]
            if sizes and len(known) == len(sizes):
                return sum(known)
        elif isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    return None


def _split(value: Any, spec: Any, num_parts: int, size: int | None) -> list[Any]:
    leaves, structure = pytree.tree_flatten(value)
    rules = [None] * len(leaves) if spec is None else _leaf_rules(value, spec)
    columns: list[Sequence[Any]] = []
    for leaf, rule in zip(leaves, rules, strict=True):
        is_tensor = isinstance(leaf, torch.Tensor) and leaf.ndim > 0
        if isinstance(leaf, Packed):
            columns.append(leaf)
        elif is_tensor and isinstance(rule, TensorChunkSpec):
            if leaf.shape[rule.split_dim] < num_parts:
                raise ValueError(
                    f"a tensor of shape {tuple(leaf.shape)} cannot be cut into {num_parts} along "
                    f"dimension {rule.split_dim}. Lower num_microbatch."
                )
            columns.append(leaf.tensor_split(num_parts, rule.split_dim))
        elif is_tensor and spec is None and leaf.shape[0] == size:
            columns.append(leaf.tensor_split(num_parts))
        else:
            columns.append([leaf] * num_parts)
    return [
        pytree.tree_unflatten([column[part] for column in columns], structure)
        for part in range(num_parts)
    ]


def _leaf_rules(value: Any, spec: Any) -> list[Any]:
    """The spec of each leaf; one that stands above a structure holds for all leaves below it."""
    if isinstance(value, dict) and isinstance(spec, dict):
        spec = {key: spec.get(key) for key in value}
    rules = pytree._broadcast_to_and_flatten(spec, pytree.tree_structure(value))
    if rules is None:
        raise ValueError(f"{spec!r} is not the spec of {len(value)} values of {type(value)}.")
    return rules
