"""One call of the engine: what the caller gave becomes a pass, its ends what the caller gets."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stageline.streaming.host_weights import HostWeights
from stageline.streaming.lanes import Lane
from stageline.streaming.microbatch import Inputs
from stageline.streaming.passes import Flow, Pass, PassPart, Rules, bring, can_have, on_host
from stageline.streaming.plan import Plan

# -- joins a forward pass without a graph to autograd: its backward recomputes and streams again --


class Detour(torch.autograd.Function):
    """From the inputs of a call to its outputs; in backward the engine runs its own way.

    `run_forward()` gives the output leaves, `run_backward(gradients)` the inputs' gradients. As
    with a checkpoint, there is no second backward pass through it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run_forward: Callable[[], list[Any]],
        run_backward: Callable[[tuple], list[Any]],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.run_backward = run_backward
        ctx.is_used = False
        outputs = run_forward()
        plain = [each for each in outputs if not (each.is_floating_point() or each.is_complex())]
        ctx.mark_non_differentiable(*plain)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple:
        if ctx.is_used:
            raise RuntimeError(
                "backward came a second time through one call of RoundPipe: what it kept is gone "
                "after the first. Call the model again."
            )
        ctx.is_used = True
        return (None, None, None, *ctx.run_backward(gradients))


def through_detour(
    run_forward: Callable[[], Any], run_backward: Callable[[list[Any]], list[Any]], inputs: Any
) -> Any:
    """The value of `run_forward()`, whose tensors lead back to `run_backward`.

    Args:
        run_forward: gives nested tuples, lists and dicts with tensors.
        run_backward: gets a gradient or None for each tensor of them, gives one for each of
            `inputs`.
        inputs: the tensors of the call, in order.
    """
    kept: dict[str, Any] = {}

    def run() -> list[Any]:
        leaves, kept["structure"] = pytree.tree_flatten(run_forward())
        kept["leaves"] = leaves
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    anchor = torch.zeros((), requires_grad=True)  # inputs alone need not want gradients
    tensors = Detour.apply(run, lambda each: run_backward(list(each)), anchor, *inputs)
    made = iter(tensors)
    leaves = [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in kept["leaves"]]
    return pytree.tree_unflatten(leaves, kept["structure"])


# -------------------------------------------------------------------------------------------------


class EngineCall:
    """A pass with its micro-batches, in the caller's terms.

    Args:
        settle: what is to be done with a pass whose work was given to the queues.
        output_device: where results lie.
        labels: of each micro-batch, for a call that runs forward and backward.
    """

    def __init__(
        self,
        shelves: Sequence[HostWeights],
        lanes: Sequence[Lane],
        rules: Rules,
        inputs: Sequence[Inputs],
        *,
        settle: Callable[[Pass], None],
        output_device: torch.device | str | None,
        labels: Sequence[Any] | None = None,
    ) -> None:
        labels = [None] * len(inputs) if labels is None else labels
        parts = [PassPart(on_host(each), its) for each, its in zip(inputs, labels, strict=True)]
        self._run = Pass(shelves, lanes, rules, parts)
        self._gpus = [lane.device for lane in lanes if lane.device.type == "cuda"]
        self._settle = settle
        self._device = torch.device(output_device or "cpu")

    def outputs(self, plan: Plan) -> list[Any]:
        """What the last layer makes of each micro-batch, without a graph."""
        with self._generators_kept():
            self._run.forward(plan.forward)
            outputs = [self._brought(part.output) for part in self._run.parts]
        self._settle(self._run)
        return outputs

    def outputs_with_graph(self, plan: Plan, check: Callable[[], None]) -> list[Any]:
        """The same, joined to autograd.

        Args:
            check: raises what went wrong since, before the backward pass begins.
        """
        stages = (*plan.forward, plan.backward[0])

        def forward() -> list[Any]:
            self._run.forward(stages, self._run.segments(plan.backward))
            outputs = [self._brought(part.output) for part in self._run.parts]
            self._settle(self._run)
            return outputs

        def backward(gradients: list[Any]) -> list[Any]:
            check()
            rest = iter(gradients)
            for part in self._run.parts:
                assert part.output is not None
                own = [(leaf, next(rest)) for leaf in _tensors(part.output.value)]
                part.gradients = on_host([each for leaf, each in own if can_have(leaf)])
            with self._generators_kept():
                self._run.backward(plan.backward)
            found = [_input_gradients(part) for part in self._run.parts]
            self._settle(self._run)
            return [gradient for each in found for gradient in each]

        inputs = [leaf for part in self._run.parts for leaf in _tensors(part.inputs.value)]
        with self._generators_kept():
            return through_detour(forward, backward, inputs)

    def forward_backward(self, plan: Plan, *, keeps_outputs: bool) -> tuple[Any, list[Any]]:
        """The sum of losses, and the outputs of each micro-batch if they are kept."""
        parts = self._run.parts
        with self._generators_kept():
            self._run.forward_backward(plan)
        losses = [self._brought(part.loss) for part in parts]
        if self._run.rules.input_gradients:
            _to_inputs(parts)
        outputs = [self._brought(part.output) for part in parts] if keeps_outputs else []
        self._settle(self._run)
        return _summed(losses), outputs

    def _brought(self, flow: Flow | None) -> Any:
        assert flow is not None
        here = bring(flow, None)
        here.mark.wait()
        if self._device.type == "cpu":
            return here.value
        return pytree.tree_map_only(torch.Tensor, lambda each: each.to(self._device), here.value)

    @contextlib.contextmanager
    def _generators_kept(self) -> Iterator[None]:
        """Leaves the caller's generators as they are, where layers get seeds of their own."""
        if self._run.rules.seed is None:
            yield
            return
        with torch.random.fork_rng(self._gpus):
            yield
            if not self._gpus:  # the host's generator is drawn from when work is done, not given
                for _, mark in self._run.landed:
                    mark.wait()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _input_gradients(part: PassPart) -> list[torch.Tensor | None]:
    """A gradient or None for each tensor of a micro-batch's inputs."""
    tensors = _tensors(part.inputs.value)
    assert part.gradients is not None
    here = bring(part.gradients, None)
    here.mark.wait()
    rest = iter(here.value)
    found = [next(rest) if can_have(leaf) else None for leaf in tensors]
    return [
        gradient if leaf.requires_grad else None
        for leaf, gradient in zip(tensors, found, strict=True)
    ]


def _to_inputs(parts: Sequence[PassPart]) -> None:
    """Hands gradients on to where the call's inputs come from."""
    pairs = [
        (leaf, gradient)
        for part in parts
        for leaf, gradient in zip(_tensors(part.inputs.value), _input_gradients(part), strict=True)
        if gradient is not None
    ]
    if pairs:
        torch.autograd.backward([leaf for leaf, _ in pairs], [given for _, given in pairs])


def _summed(losses: Sequence[Any]) -> Any:
    """Micro-batches' losses added up; of sequences loss by loss."""
    if isinstance(losses[0], torch.Tensor):
        return sum(losses[1:], start=losses[0])
    return [_summed(column) for column in zip(*losses, strict=True)]
