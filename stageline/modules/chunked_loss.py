"""The loss over a few tokens at a time: the logits of a whole micro-batch never exist.

The last stage returns hidden states [B, T, H]. Head and loss run over chunks of them, and once more
in the backward pass. Works for any loss that is a sum over target tokens.

Shapes: B samples, T tokens, H hidden size, V vocabulary, C tokens of a chunk and one more.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stageline.errors import UserError
from stageline.modules.recompute import RandomState

MicroBatch = dict[str, torch.Tensor]
Piece = tuple[torch.Tensor, MicroBatch]


class ChunkedLoss:
    """A loss_fn part over chunks; takes hidden states where the part takes logits.

    Args:
        loss_fn: a loss_fn part that is a sum over target tokens.
        whole: the transformers model of the last stage.
        chunk: tokens of a chunk.

    Raises:
        UserError: the model has no head of its own.
    """

    def __init__(
        self, loss_fn: Callable[..., torch.Tensor], *, whole: PreTrainedModel | None, chunk: int
    ) -> None:
        head_of(whole)
        self.loss_fn = loss_fn
        self.whole = whole
        self.chunk = chunk

    def __call__(
        self, hidden_BTH: torch.Tensor, micro_batch: MicroBatch, **given: Any
    ) -> torch.Tensor:
        """The loss of a micro-batch, a scalar; its gradients reach the hidden states and the head.

        What is `given` goes to the part: the number of targets, and what else it asks for.

        Two nodes of the graph share the work. A backward pass that asks for the gradient of the
        hidden states alone, as those of zero-bubble schedules do, leaves the second one alone.
        """
        work = _Work(self, micro_batch, given, RandomState(hidden_BTH.device))
        loss = _HiddenGradients.apply(work, hidden_BTH)
        if loss.grad_fn is not None:
            work.hidden_node = weakref.ref(loss.grad_fn)
        zero = _HeadGradients.apply(work, hidden_BTH.detach(), loss.detach(), *work.weights)
        return loss + zero

    def pieces(self, hidden_BTH: torch.Tensor, micro_batch: MicroBatch) -> Iterator[Piece]:
        """(logits, micro-batch) of one chunk after the other.

        Neighbours share a token, since the logits at one token predict the next: all targets are
        there, each once.
        """
        head = head_of(self.whole)
        for hidden_BCH, part in slices(hidden_BTH, micro_batch, self.chunk):
            yield head(hidden_BCH), part


def slices(hidden_BTH: torch.Tensor, micro_batch: MicroBatch, chunk: int) -> Iterator[Piece]:
    """Chunks of hidden states and of everything in the micro-batch that has a value per token."""
    num_tokens = hidden_BTH.shape[1]
    for start in range(0, max(num_tokens - 1, 1), chunk):
        where = slice(start, min(start + chunk + 1, num_tokens))
        part = {
            name: value[:, where] if _is_per_token(name, value, hidden_BTH) else value
            for name, value in micro_batch.items()
        }
        yield hidden_BTH[:, where], part


def _is_per_token(name: str, value: torch.Tensor, hidden_BTH: torch.Tensor) -> bool:
    is_for_loss = name in ("input_ids", "attention_mask", "labels") or name.startswith("loss_")
    return is_for_loss and value.shape[:2] == hidden_BTH.shape[:2]


class _BaseOutput:
    """What a base model returns, as far as heads read it."""

    def __init__(self, hidden_BTH: torch.Tensor) -> None:
        self.last_hidden_state = hidden_BTH

    def __getitem__(self, index: int | slice) -> object:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _BaseStub(nn.Module):
    """Stands for the base model: the hidden states are there already."""

    was_called = False

    def forward(self, *args: object, inputs_embeds: torch.Tensor, **kwargs: object) -> _BaseOutput:
        self.was_called = True
        return _BaseOutput(inputs_embeds)


class Head(nn.Module):
    """The model class's own code behind its base model: scaling and capping of logits included."""

    def __init__(self, headed: PreTrainedModel, stub: _BaseStub) -> None:
        super().__init__()
        self.headed = headed
        self.stub = stub

    def forward(self, hidden_BCH: torch.Tensor) -> torch.Tensor:
        logits_BCV = self.headed(inputs_embeds=hidden_BCH, use_cache=False).logits
        if not self.stub.was_called:
            raise UserError(
                f"{type(self.headed).__name__} does not call its base model by the name "
                f"{self.headed.base_model_prefix!r}, so its head can't run alone: leave "
                "`logits_chunk` out for this architecture."
            )
        return logits_BCV


def head_of(whole: PreTrainedModel | None) -> Head:
    """The head of a model, sharing its modules; the model itself is not changed.

    Raises:
        UserError: the model has no base model apart from its head.
    """
    if whole is None or whole.base_model_prefix not in whole._modules:
        name = "the stage model" if whole is None else type(whole).__name__
        raise UserError(
            f"{name} has no transformers model with a base model apart from its head, which "
            "`logits_chunk` needs in order to run the head alone: leave it out for this model."
        )
    prefix = whole.base_model_prefix
    headed = copy.copy(whole)
    stub = _BaseStub()
    headed.__dict__["_modules"] = {**whole._modules, prefix: stub}
    return Head(headed, stub)


class _Work:
    """One micro-batch's loss: run forward once, and backward by either node or both together."""

    def __init__(
        self,
        parent: ChunkedLoss,
        micro_batch: MicroBatch,
        given: dict[str, Any],
        random_state: RandomState,
    ) -> None:
        self.head = head_of(parent.whole)
        self.weights = [weight for weight in self.head.parameters() if weight.requires_grad]
        self.loss_fn = parent.loss_fn
        self.chunk = parent.chunk
        self.micro_batch = micro_batch
        self.given = given
        self.random_state = random_state
        # weak: the node holds this object
        self.hidden_node: Callable[[], object | None] = lambda: None
        self.hidden_grad: torch.Tensor | None = None

    def run(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        """The sum over chunks."""
        losses = [
            self.loss_fn(self.head(hidden), part, **self.given)
            for hidden, part in slices(hidden_BTH, self.micro_batch, self.chunk)
        ]
        return torch.stack(losses).sum()

    def gradients(
        self,
        hidden_BTH: torch.Tensor,
        weights: list[torch.Tensor],
        grad: torch.Tensor,
        *,
        wants_hidden: bool,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Gradients of the hidden states, or None, and of `weights`."""
        hidden_grad = torch.zeros_like(hidden_BTH) if wants_hidden else None
        sums: list[torch.Tensor | None] = [None] * len(weights)
        start = 0
        with self.random_state.replayed():
            for view, part in slices(hidden_BTH, self.micro_batch, self.chunk):
                hidden = view.detach().requires_grad_(wants_hidden)
                with torch.enable_grad():
                    loss = self.loss_fn(self.head(hidden), part, **self.given)
                sources = [hidden, *weights] if wants_hidden else weights
                found = torch.autograd.grad(loss, sources, grad, allow_unused=True)
                if hidden_grad is not None and found[0] is not None:
                    hidden_grad[:, start : start + hidden.shape[1]] += found[0]
                _add(sums, found[len(sources) - len(weights) :])
                start += self.chunk
        rounded = [
            None if total is None else total.to(weight.dtype)
            for total, weight in zip(sums, weights, strict=True)
        ]
        return hidden_grad, rounded


def _add(sums: list[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> None:
    """Adds in place; in float32 at least, so that many chunks lose no small contributions."""
    for index, grad in enumerate(found):
        if grad is None:
            continue
        total = sums[index]
        if total is None:
            dtype = torch.promote_types(grad.dtype, torch.float32)
            # not the gradient itself: autograd may have given one tensor to two weights
            total = sums[index] = torch.zeros_like(grad, dtype=dtype)
        total.add_(grad)


class _HiddenGradients(torch.autograd.Function):
    """The loss; its backward pass gives the gradient of the hidden states."""

    @staticmethod
    def forward(ctx: Any, work: _Work, hidden_BTH: torch.Tensor) -> torch.Tensor:
        ctx.work = work
        ctx.save_for_backward(hidden_BTH)
        return work.run(hidden_BTH)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        hidden_grad, ctx.work.hidden_grad = ctx.work.hidden_grad, None
        if hidden_grad is None:
            (hidden_BTH,) = ctx.saved_tensors
            hidden_grad, _ = ctx.work.gradients(hidden_BTH, [], grad, wants_hidden=True)
        return None, hidden_grad


class _HeadGradients(torch.autograd.Function):
    """Zero; its backward pass gives the gradients of the head's weights.

    Made after the other node, so that it runs first where a backward pass needs both. Then it
    makes both, since the logits are half of the work.
    """

    @staticmethod
    def forward(
        ctx: Any, work: _Work, hidden_BTH: torch.Tensor, loss: torch.Tensor, *weights: object
    ) -> torch.Tensor:
        ctx.work = work
        ctx.save_for_backward(hidden_BTH)
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        work = ctx.work
        (hidden_BTH,) = ctx.saved_tensors
        node = work.hidden_node()
        wants_hidden = node is not None and torch._C._will_engine_execute_node(node)
        work.hidden_grad, grads = work.gradients(
            hidden_BTH, work.weights, grad, wants_hidden=wants_hidden
        )
        return None, None, None, *grads
