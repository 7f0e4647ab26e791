"""One stage: its contract and its passes, without any communication."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from stageline.contracts import broken, mismatch, shown
from stageline.errors import UserError
from stageline.modules.layer_seeds import NO_SEEDS, LayerSeeds
from stageline.modules.router_records import counting_tokens
from stageline.pipeline.plan import Kind
from stageline.stage import Stage

Tensors = tuple[torch.Tensor, ...]
MicroBatch = dict[str, torch.Tensor]
PROBE = (2, 8)  # rows and tokens of an example


def trains(model: nn.Module) -> bool:
    """Whether a stage has a trainable parameter."""
    return any(parameter.requires_grad for parameter in model.parameters())


def batch_input(model: Stage, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return what a stage receives for one micro-batch, on the meta device."""
    if hasattr(model, "get_batch_input"):
        return model.get_batch_input(batch)
    return model.get_example_input(*batch["input_ids"].shape)


def batch_output(model: Stage, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return what a stage sends on for one micro-batch, on the meta device."""
    if hasattr(model, "get_batch_output"):
        return model.get_batch_output(batch)
    return model.get_example_output(*batch["input_ids"].shape)


_CONTRACT = "get_example_input get_example_output parts stage num_stages is_first is_last".split()


def check_stage(made: object, *, part: Callable[..., Any]) -> Any:
    """Return the stage model in what a train_model part returned.

    Raises:
        ContractError: it is not (model, processor, id), or the model is not a stage.
    """
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module)):
        raise broken(
            "train_model",
            part,
            f"returned {shown(made) if not isinstance(made, nn.Module) else 'a model alone'}",
            why="A checkpoint is saved with its processor",
            cure="return (model, processor, pad_token_id), as MyStage.build(**kwargs) does",
        )
    model: Any = made[0]
    if lacks := [name for name in _CONTRACT if not hasattr(model, name)]:
        cure = "subclass StageModel of pp_models (docs/add_a_model.md)"
        raise _of_stage(model, f"has no {', '.join(lacks)}", cure)
    try:
        takes = model.get_example_input(*PROBE)
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise _of_stage(
            model,
            f"cannot say what it receives ({type(error).__name__}: {error})",
            "define get_example_input, which StageModel reads from hidden_size of the config",
        ) from error
    is_sequence = isinstance(takes, tuple | list) and takes
    if not is_sequence or not all(isinstance(value, torch.Tensor) for value in takes):
        raise _of_stage(
            model,
            f"said of the input of stage {model.stage}: {shown(takes)}",
            f"return tensors for {PROBE[0]} rows of {PROBE[1]} tokens from get_example_input",
        )
    ids = torch.zeros(1, 1, dtype=torch.long)
    _check_call(model, takes, {"input_ids": ids, "attention_mask": ids})
    return model


def run_stage(
    model: nn.Module, inputs: Sequence[torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> Any:
    """Return the output of a forward pass; a ContractError where it is not what comes out."""
    try:
        output = model(*inputs, **batch)
    except TypeError:
        _check_call(model, inputs, batch)
        raise  # a mistake inside, which its traceback tells
    values = output if isinstance(output, tuple) else (output,)
    if not values or not all(isinstance(value, torch.Tensor) for value in values):
        cure = "return a tensor or a tuple: take output.logits or output.last_hidden_state"
        raise _of_stage(model, f"returned {shown(output)} from forward", cure)
    ids = batch.get("input_ids")
    if getattr(model, "is_last", False) and ids is not None and values[0].shape[:2] != ids.shape:
        came = f"{shown(values[0])} as logits of {len(ids)} rows of {ids.shape[1]} tokens"
        raise _of_stage(model, f"returned {came}", "return [rows, tokens, vocabulary]")
    return output


def _check_call(
    model: nn.Module, inputs: Sequence[torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> None:
    problem = mismatch(model.forward, *inputs, **batch)
    if problem is not None:
        raise _of_stage(
            model,
            f"cannot be called with {len(inputs)} tensors and {', '.join(batch)} ({problem})",
            "define forward(self, hidden_or_ids, *extras, **batch)",
        )


def check_border(
    model: Stage, came: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], index: int
) -> None:
    """Refuse an output that is not what the next stage expects: it would hang, or read garbage."""
    found = [(tuple(value.shape), value.dtype) for value in came]
    wanted = [(tuple(value.shape), value.dtype) for value in expected]
    if found != wanted:
        made = f"made {found} of micro-batch {index}, stage {model.stage + 1} expects {wanted}"
        cure = "correct get_example_input, extras included; in half precision it has self.dtype"
        raise _of_stage(model, made, cure)


def _of_stage(model: Any, came: str, cure: str) -> UserError:
    came = f"of stage {getattr(model, 'stage', '?')} {came}"
    why = "Ranks compute what travels between stages from the contract"
    return broken("stage model", type(model), came, why=why, cure=cure)


# the output of the last stage -> its loss, or () where it is only read
LossOf = Callable[[torch.Tensor | Tensors], torch.Tensor | tuple[()]]


@dataclass(eq=False)
class StagePasses:
    """Forward and backward passes, micro-batch by micro-batch.

    The state of a micro-batch is kept until its backward pass, and no longer.

    Args:
        computes_grad: something trains in this stage or before it; else no graph is made.
        sends_grad: something trains before it.
        saving: entered around each forward pass that keeps a graph.

    Attributes:
        after_weights: called with the model after each pass for only the weights, whose end
            autograd does not report.
    """

    model: Stage
    computes_grad: bool
    sends_grad: bool
    saving: Callable[[], AbstractContextManager]
    seeds: LayerSeeds = NO_SEEDS
    after_weights: Callable[[nn.Module], None] | None = field(default=None, init=False)
    _kept: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict, init=False)
    _weight_work: dict[int, list[dict]] = field(default_factory=dict, init=False)

    def forward(
        self, index: int, inputs: Tensors, batch: MicroBatch, *, loss_of: LossOf | None = None
    ) -> Tensors:
        """Run micro-batch `index` on token ids, or on what the stage before returned.

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

    def _run(self, inputs: Tensors, batch: MicroBatch, loss_of: LossOf | None) -> Tensors:
        with counting_tokens(self.model, batch):
            output = run_stage(self.model, inputs, batch)
        if loss_of is not None:
            self.seeds.start_loss()
            output = loss_of(output)
        return output if isinstance(output, tuple) else (output,)

    def backward(self, index: int, kind: Kind, grads: Tensors | None) -> Tensors:
        """Run one backward pass of micro-batch `index`.

        Args:
            grads: of the outputs; None on the last stage and for WEIGHT_GRAD.

        Returns:
            Gradients of the inputs, where they are sent on and now complete; else nothing.
        """
        if not getattr(self.model, "splits_backward", True) or not torch_splits_backward():
            if kind == Kind.WEIGHT_GRAD:
                return ()
            kind = Kind.BACKWARD  # with the gradients of the weights
        if kind == Kind.WEIGHT_GRAD:
            weights = self._weights()
            stage_backward_weight(iter(weights), self._weight_work.pop(index))
            # autograd calls them too: half-precision training adds up float32 sums in these hooks
            for weight in weights:
                if weight.grad is not None:
                    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
                        hook(weight)
            if self.after_weights is not None:
                self.after_weights(self.model)
            return ()
        inputs, outputs = self._kept.pop(index)
        places = [place for place, output in enumerate(outputs) if output.requires_grad]
        roots = [outputs[place] for place in places]
        root_grads = None if grads is None else [grads[place] for place in places]
        if kind == Kind.BACKWARD:
            if roots:
                torch.autograd.backward(roots, root_grads)
        else:
            # torch cuts the roots off in place, which a view does not allow
            roots = [root.clone() if root._is_view() else root for root in roots]
            groups: list[dict] = []
            sources = [value for value in inputs if value.requires_grad]
            if roots:
                _, groups = stage_backward_input(roots, root_grads, sources, iter(self._weights()))
            self._weight_work[index] = groups
        if not self.sends_grad:
            return ()
        # an input that had no effect on the loss has no gradient, yet the peer waits for one
        return tuple(
            torch.zeros_like(value) if value.grad is None else value.grad
            for value in inputs
            if value.is_floating_point()
        )

    def _weights(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def clear(self) -> None:
        self._kept.clear()
        self._weight_work.clear()


@functools.cache
def torch_splits_backward() -> bool:
    """Return whether torch's split backward pass gives the gradients of an ordinary one.

    In torch 2.11 it counts a weight that is used twice too often: the whole backward pass runs
    in the place of its first half.
    """

    def run(backward: Callable) -> list[torch.Tensor | None]:
        leaves = [nn.Parameter(torch.tensor(float(n))) for n in (2, 3, 5)]
        hidden, _, weight = leaves
        backward([hidden * weight * weight], leaves[:2], weight)
        return [leaf.grad for leaf in leaves]

    def split(outputs: list, inputs: list, weight: nn.Parameter) -> None:
        _, groups = stage_backward_input(outputs, None, inputs, iter([weight]))
        stage_backward_weight(iter([weight]), groups)

    with torch.enable_grad():
        try:
            return run(split) == run(lambda outputs, *_: torch.autograd.backward(outputs))
        except RuntimeError:
            return False


def model_inputs(batch: Mapping[str, torch.Tensor]) -> MicroBatch:
    """Return what a model takes of a micro-batch: all but labels and what begins with loss_."""
    return {n: value for n, value in batch.items() if n != "labels" and not n.startswith("loss_")}
