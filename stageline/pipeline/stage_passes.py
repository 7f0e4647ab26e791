"""Forward and backward passes of one stage, micro-batch by micro-batch. Talks to no other rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from stageline.modules.layer_seeds import NO_SEEDS, LayerSeeds
from stageline.pipeline.borders import run_stage
from stageline.pipeline.plan import Kind
from stageline.stage import Stage

Tensors = tuple[torch.Tensor, ...]
MicroBatch = dict[str, torch.Tensor]


# the output of the last stage -> its loss, or nothing where it is looked at alone
LossOf = Callable[[torch.Tensor | Tensors], torch.Tensor | tuple[()]]


class StagePasses:
    """Keeps what each micro-batch needs for its backward pass, and no longer than that.

    Args:
        computes_grad: something trains in this stage or before it; else no graph is made.
        sends_grad: something trains before it.
        saving: entered around each forward pass that keeps a graph.
        seeds: settles what a forward pass draws at random.

    Attributes:
        after_weights: called with the model behind each pass for the weights alone, which autograd
            does not tell the end of.
    """

    def __init__(
        self,
        model: Stage,
        *,
        computes_grad: bool,
        sends_grad: bool,
        saving: Callable[[], AbstractContextManager],
        seeds: LayerSeeds = NO_SEEDS,
    ) -> None:
        self.model = model
        self.computes_grad = computes_grad
        self.sends_grad = sends_grad
        self.saving = saving
        self.seeds = seeds
        self.after_weights: Callable[[nn.Module], None] | None = None
        self._kept: dict[int, tuple[Tensors, Tensors]] = {}
        self._weight_work: dict[int, list[dict]] = {}

    def forward(
        self,
        index: int,
        inputs: Tensors,
        batch: MicroBatch,
        *,
        loss_of: LossOf | None = None,
    ) -> Tensors:
        """Runs micro-batch `index`.

        Args:
            inputs: token ids on the first stage, else what the stage before returned.
            batch: what the model's forward takes besides.
            loss_of: on the last stage, the output -> its loss.

        Returns:
            What goes on to the next stage, cut off from the graph; on the last stage the loss.
        """
        self.seeds.start(self.model, index)
        if not self.computes_grad or not torch.is_grad_enabled():
            with torch.no_grad():
                return self._run(inputs, batch, loss_of)
        if self.sends_grad:
            inputs = tuple(value.requires_grad_(value.is_floating_point()) for value in inputs)
        with self.saving():
            outputs = self._run(inputs, batch, loss_of)
        self._kept[index] = (inputs, outputs)
        return tuple(output.detach() for output in outputs)

    def _run(
        self,
        inputs: Tensors,
        batch: MicroBatch,
        loss_of: LossOf | None,
    ) -> Tensors:
        output = run_stage(self.model, inputs, batch)
        if loss_of is not None:
            self.seeds.start_loss()
            output = loss_of(output)
        return output if isinstance(output, tuple) else (output,)

    def backward(self, index: int, kind: Kind, grads: Tensors | None) -> Tensors:
        """One backward pass of micro-batch `index`.

        Args:
            kind: BACKWARD, INPUT_GRAD or WEIGHT_GRAD.
            grads: of the outputs; None on the last stage and for WEIGHT_GRAD.

        Returns:
            Gradients of the inputs, where they are sent on and now complete; else nothing.
        """
        if kind == Kind.INPUT_GRAD and not getattr(self.model, "splits_backward", True):
            self._weight_work[index] = []
            kind = Kind.BACKWARD  # with the gradients of the weights
        if kind == Kind.WEIGHT_GRAD and not getattr(self.model, "splits_backward", True):
            self._weight_work.pop(index)
            return ()
        if kind == Kind.WEIGHT_GRAD:
            weights = list(self._weights())
            stage_backward_weight(iter(weights), self._weight_work.pop(index))
            _run_grad_hooks(weights)
            if self.after_weights is not None:
                self.after_weights(self.model)
            return ()
        inputs, outputs = self._kept.pop(index)
        roots, root_grads = _with_graph(outputs, grads)
        if kind == Kind.BACKWARD:
            if roots:
                torch.autograd.backward(roots, root_grads)
        else:
            # torch cuts the roots off in place, which a view does not allow
            roots = [root.clone() if root._is_view() else root for root in roots]
            groups: list[dict] = []
            sources = [value for value in inputs if value.requires_grad]
            if roots:
                _, groups = stage_backward_input(roots, root_grads, sources, self._weights())
            self._weight_work[index] = groups
        if not self.sends_grad:
            return ()
        # an input that had no effect on the loss has no gradient, yet the peer waits for one
        return tuple(
            torch.zeros_like(value) if value.grad is None else value.grad
            for value in inputs
            if value.is_floating_point()
        )

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()
        self._weight_work.clear()

    def _weights(self) -> Iterator[nn.Parameter]:
        return iter([p for p in self.model.parameters() if p.requires_grad])


def _with_graph(
    outputs: Tensors, grads: Tensors | None
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """The outputs that something trainable had a part in, with their gradients."""
    places = [place for place, output in enumerate(outputs) if output.requires_grad]
    roots = [outputs[place] for place in places]
    return roots, None if grads is None else [grads[place] for place in places]


def _run_grad_hooks(weights: Sequence[nn.Parameter]) -> None:
    """Does for weights' gradients what autograd does, and torch's split backward pass leaves out.

    Half-precision training collects its float32 sums in these hooks.
    """
    for weight in weights:
        if weight.grad is not None:
            for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
                hook(weight)


def model_inputs(batch: Mapping[str, torch.Tensor]) -> MicroBatch:
    """What a model takes of a micro-batch: all but labels and what begins with loss_."""
    return {
        name: value
        for name, value in batch.items()
        if name != "labels" and not name.startswith("loss_")
    }


def copy_metas(metas: Sequence[torch.Tensor], device: torch.device) -> Tensors:
    """Empty tensors of given shapes and dtypes."""
    return tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in metas)
