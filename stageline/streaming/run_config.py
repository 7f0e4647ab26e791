"""How one call runs through the streaming engine; a call's settings win over the model's."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from stageline.streaming.plan import Plan


@dataclass(frozen=True)
class RoundPipeRunConfig:
    """Settings of a call; None inherits: from the model's, then from the defaults in brackets.

    Attributes:
        requires_grad: outputs join autograd [whether gradients are on].
        output_device: where outputs lie [host].
        preserve_rng_state: random numbers of a layer are drawn from seeds of their own, which
            recomputation draws again [True].
        recompute_grain: of what a backward pass is recomputed from its input at once: a whole
            `stage` [default] or a `layer`, which keeps more inputs and fewer activations.
        num_microbatch: at most so many micro-batches [devices + 1].
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
        merged = self
        for base in bases:
            open_ones = [item.name for item in fields(self) if getattr(merged, item.name) is None]
            merged = replace(merged, **{name: getattr(base, name) for name in open_ones})
        return merged

    def filled(self, num_lanes: int) -> "RoundPipeRunConfig":
        """With the defaults in place of what is None, but for the plan and the ways to split.

        Raises:
            ValueError: a value that no call can have.
        """
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
                f"recompute_grain {filled.recompute_grain!r} came, 'stage' or 'layer' was expected"
            )
        assert filled.num_microbatch is not None and filled.output_device is not None
        if filled.num_microbatch < 1:
            raise ValueError(
                f"num_microbatch {filled.num_microbatch} came, 1 or more was expected: each call "
                "has at least one micro-batch"
            )
        return replace(filled, output_device=torch.device(filled.output_device))


# -- where in the user's code something of this room was made: the name of what has no other ------


def place_of_call() -> str:
    """file:line of whoever called into this room."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
