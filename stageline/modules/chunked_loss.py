"""The loss over a few tokens at a time: the logits of a whole micro-batch never exist.

The last stage returns hidden states [B, T, H]. Head and loss run over chunks of them, and once more
in the backward pass; what fits into one chunk runs once, as any layer. `ChunkedLogits` serves a
loss that needs of each token only a few numbers, as cross-entropy does: no logits are made for
tokens outside of the loss. `ChunkedLoss` serves any other loss that is a sum over target tokens.

Shapes: B samples, T tokens, H hidden size, V vocabulary, C tokens of a chunk (of a `ChunkedLoss`
and one more), N tokens that are asked about, K numbers of each.
"""

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from stageline.errors import UserError
from stageline.modules.recompute import RandomState

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MicroBatch = dict[str, torch.Tensor]
Piece = tuple[torch.Tensor, MicroBatch]
# hidden states -> for each chunk of tokens its hidden states, and the function over its logits
Chunks = Callable[[torch.Tensor], Iterator[tuple[torch.Tensor, Callable[..., torch.Tensor]]]]


class ChunkedLoss:
    """A loss_fn part over chunks; takes hidden states where the part takes logits.

    Args:
        loss_fn: a loss_fn part that is a sum over target tokens.
        whole: the transformers model of the last stage.
        chunk: tokens of a chunk.
    """

    def __init__(
        self, loss_fn: Callable[..., torch.Tensor], *, whole: "PreTrainedModel | None", chunk: int
    ) -> None:
        head_of(whole)
        self.loss_fn = loss_fn
        self.whole = whole
        self.chunk = chunk

    def __call__(
        self, hidden_BTH: "torch.Tensor | ChunkedLogits", micro_batch: MicroBatch, **given: Any
    ) -> torch.Tensor:
        """The loss of a micro-batch, a scalar; its gradients reach the hidden states and the head.

        What is `given` goes to the part: the number of targets, and what else it asks for.
        """
        logits = on_demand(hidden_BTH, whole=self.whole, chunk=self.chunk)
        loss_fn = functools.partial(self.loss_fn, **given)

        def chunks(hidden_BTH: torch.Tensor) -> Iterator[Any]:
            for hidden_BCH, part in slices(hidden_BTH, micro_batch, self.chunk):
                yield hidden_BCH, lambda logits_BCV, part=part: loss_fn(logits_BCV, part)

        work = _Work(logits.whole, chunks, logits.device, chunk=self.chunk, is_sum=True)
        return work(logits.hidden_BTH)

    def pieces(
        self, hidden_BTH: "torch.Tensor | ChunkedLogits", micro_batch: MicroBatch
    ) -> Iterator[Piece]:
        """(logits, micro-batch) of one chunk after the other.

        Neighbours share a token, since the logits at one token predict the next: all targets are
        there, each once.
        """
        logits = on_demand(hidden_BTH, whole=self.whole, chunk=self.chunk)
        head = head_of(logits.whole)
        for hidden_BCH, part in slices(logits.hidden_BTH, micro_batch, self.chunk):
            yield head(hidden_BCH), part


def slices(hidden_BTH: torch.Tensor, micro_batch: MicroBatch, chunk: int) -> Iterator[Piece]:
    """Chunks of hidden states and of everything in the micro-batch that has a value per token."""
    num_tokens = hidden_BTH.shape[1]
    for start in range(0, max(num_tokens - 1, 1), chunk):
        where = slice(start, min(start + chunk + 1, num_tokens))
        part = dict(micro_batch)
        for name, value in micro_batch.items():
            is_known = name in ("input_ids", "attention_mask", "labels")
            is_by_token = value.shape[:2] == hidden_BTH.shape[:2]
            if is_by_token and (is_known or name.startswith("loss_")):
                part[name] = value[:, where]
        yield hidden_BTH[:, where], part


class ChunkedLogits:
    """Stands for the logits of a micro-batch, of which chunks are made when they are asked about.

    `hidden_BTH` is what the last stage gives in their place.
    """

    def __init__(
        self, hidden_BTH: torch.Tensor, *, whole: "PreTrainedModel | None", chunk: int
    ) -> None:
        self.hidden_BTH, self.whole, self.chunk = hidden_BTH, whole, chunk
        self.dtype, self.device = hidden_BTH.dtype, hidden_BTH.device

    def by_token(
        self,
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        labels_BT: torch.Tensor,
        is_asked_BT: torch.Tensor | None = None,
        *,
        places_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Numbers of each token that is asked about, [B, T, K]; 0 elsewhere.

        The head runs over these tokens only. Gradients reach the hidden states and the head.

        Args:
            function: (logits [C, V], labels [C]) -> [C, K].
            labels_BT: the token that each token should predict, -100 where there is none.
            is_asked_BT: default: where there is a label.
            places_N: these as places among all tokens; to find them, the host would wait for the
                device.
        """
        if places_N is None:
            is_asked_BT = labels_BT >= 0 if is_asked_BT is None else is_asked_BT
            places_N = is_asked_BT.flatten().nonzero().flatten()
        labels_N = labels_BT.flatten()[places_N]
        # index_select: its gradient adds up without a sort
        hidden_1NH = self.hidden_BTH.flatten(0, 1).index_select(0, places_N)[None]

        def chunks(hidden_1NH: torch.Tensor) -> Iterator[Any]:
            parts = zip(hidden_1NH.split(self.chunk, 1), labels_N.split(self.chunk), strict=True)
            for hidden_1CH, labels_C in parts:
                yield hidden_1CH, lambda logits_1CV, own=labels_C: function(logits_1CV[0], own)

        work = _Work(self.whole, chunks, self.device, chunk=self.chunk, is_sum=False)
        values_NK = work(hidden_1NH)
        zeros = values_NK.new_zeros(labels_BT.numel(), values_NK.shape[-1])
        return zeros.index_copy(0, places_N, values_NK).view(*labels_BT.shape, -1)


def on_demand(
    output: torch.Tensor | ChunkedLogits, *, whole: "PreTrainedModel | None", chunk: int
) -> ChunkedLogits:
    """Return the hidden states of a last stage as logits; a streamed stage returns these itself."""
    if isinstance(output, ChunkedLogits):
        return output
    return ChunkedLogits(output, whole=whole, chunk=chunk)


class LossByToken:
    """A loss_fn part that takes `ChunkedLogits`; takes hidden states in their place."""

    def __init__(
        self, loss_fn: Callable[..., Any], *, whole: "PreTrainedModel | None", chunk: int
    ) -> None:
        head_of(whole)
        self.loss_fn = loss_fn
        self.logits_of = functools.partial(on_demand, whole=whole, chunk=chunk)

    def __call__(
        self, hidden_BTH: torch.Tensor | ChunkedLogits, micro_batch: MicroBatch, **given: Any
    ) -> Any:
        """Return the result of the part; see `ChunkedLoss`."""
        return self.loss_fn(self.logits_of(hidden_BTH), micro_batch, **given)


class _BaseOutput:
    """Output of a base model, as far as heads read it."""

    def __init__(self, hidden_BTH: torch.Tensor) -> None:
        self.last_hidden_state = hidden_BTH

    def __getitem__(self, index: int | slice) -> object:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _BaseStub(nn.Module):
    """Stands for the base model: the hidden states are there already.

    Of the model itself a head may read plain values, as multipliers, and none of its modules.
    """

    was_called = False

    def __init__(self, headed: "PreTrainedModel", base: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(headed_name=type(headed).__name__, base=base)  # no children

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.base, name)
        if isinstance(value, nn.Module | torch.Tensor):
            raise self.refusal(f"reads {name!r} of its base model")
        return value

    def forward(
        self, *args: object, inputs_embeds: torch.Tensor | None = None, **kwargs: object
    ) -> _BaseOutput:
        if inputs_embeds is None:
            raise self.refusal("gives its base model no embeddings")
        self.was_called = True
        return _BaseOutput(inputs_embeds)

    def refusal(self, reason: str) -> UserError:
        """Return the error of a model whose head cannot run alone."""
        return UserError(
            f"{self.headed_name} {reason}, so its head can't run alone. Drop `logits_chunk`."
        )


class Head(nn.Module):
    """The model class's own code behind its base model: scaling and capping of logits included."""

    def __init__(self, headed: "PreTrainedModel", stub: _BaseStub) -> None:
        super().__init__()
        self.headed = headed
        self.stub = stub

    def forward(self, hidden_BCH: torch.Tensor) -> torch.Tensor:
        logits_BCV = self.headed(inputs_embeds=hidden_BCH, use_cache=False).logits
        if not self.stub.was_called:
            name = self.headed.base_model_prefix
            raise self.stub.refusal(f"does not call its base model by the name {name!r}")
        return logits_BCV


def head_of(whole: "PreTrainedModel | None") -> Head:
    """The head of a model, sharing its modules; the model itself is not changed."""
    if whole is None or whole.base_model_prefix not in whole._modules:
        name = "the stage model" if whole is None else type(whole).__name__
        raise UserError(
            f"{name} has no transformers model with a base model apart from its head. Drop "
            "`logits_chunk`."
        )
    prefix = whole.base_model_prefix
    headed = copy.copy(whole)
    stub = _BaseStub(whole, whole.base_model)
    headed.__dict__["_modules"] = {**whole._modules, prefix: stub}
    return Head(headed, stub)


@torch.no_grad()
def runs_alone(whole: "PreTrainedModel | None", *, dtype: torch.dtype) -> bool:
    """Whether a model's head gives for a few hidden states what it gives for them among others."""
    # imported here: it needs transformers, which help and errors of options do without
    from stageline.modules.lora_layer import linear_sizes

    try:
        weight = next(head_of(whole).parameters())
        sizes = linear_sizes(cast(Any, whole).get_output_embeddings())
        hidden_BTH = torch.linspace(-1, 1, 8 * sizes[0], dtype=dtype, device=weight.device)
        hidden_BTH = hidden_BTH.sin().view(2, 4, sizes[0])
        head, is_training = head_of(whole), cast(Any, whole).training
        head.eval()
        all_BTV, some_1TV = head(hidden_BTH), head(hidden_BTH[1:, [3, 1]])
        head.train(is_training)
        if weight.is_meta:
            return all_BTV.shape[:2] == (2, 4)
        apart = (some_1TV - all_BTV[1:, [3, 1]]).abs().max()
        return all_BTV.shape[:2] == (2, 4) and bool(apart <= 0.02 * all_BTV.abs().max())
    except Exception:  # foreign code, written for a whole model
        return False


class _Work:
    """Work over the logits of a micro-batch: once forward, once more for the backward pass.

    Two nodes of the graph share it. A backward pass that asks only for the gradient of the hidden
    states, as those of zero-bubble schedules do, does not run the second one.

    Args:
        is_sum: results of chunks are added up; else they are concatenated.
    """

    def __init__(
        self,
        whole: "PreTrainedModel | None",
        chunks: Chunks,
        device: torch.device,
        *,
        chunk: int,
        is_sum: bool,
    ) -> None:
        self.head = head_of(whole)
        self.weights = [weight for weight in self.head.parameters() if weight.requires_grad]
        self.chunks, self.chunk, self.is_sum = chunks, chunk, is_sum
        self.random_state = RandomState(device)
        # weak: the node holds this object
        self.hidden_node: Callable[[], object | None] = lambda: None
        self.hidden_grad: torch.Tensor | None = None

    def __call__(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        is_one = len(list(self.chunks(hidden_BTH))) == 1
        if is_one or not torch.is_grad_enabled():  # to run the head again would save nothing
            return self.run(hidden_BTH)
        made = _HiddenGradients.apply(self, hidden_BTH)
        if made.grad_fn is not None:
            self.hidden_node = weakref.ref(made.grad_fn)
        return made + _HeadGradients.apply(self, hidden_BTH.detach(), made.detach(), *self.weights)

    def run(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        """The sum over chunks, or what is made of each, one behind the other."""
        made = [function(self.head(hidden)) for hidden, function in self.chunks(hidden_BTH)]
        return torch.stack(made).sum() if self.is_sum else torch.cat(made)

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
        grads = itertools.repeat(grad) if self.is_sum else iter(grad.split(self.chunk))
        start = 0
        with self.random_state.replayed():
            for view, function in self.chunks(hidden_BTH):
                hidden = view.detach().requires_grad_(wants_hidden)
                with torch.enable_grad():
                    made = function(self.head(hidden))
                sources = [hidden, *weights] if wants_hidden else weights
                found = torch.autograd.grad(made, sources, next(grads), allow_unused=True)
                if hidden_grad is not None and found[0] is not None:
                    hidden_grad[:, start : start + hidden.shape[1]] += found[0]
                _add(sums, found[len(sources) - len(weights) :])
                start += self.chunk
        pairs = zip(sums, weights, strict=True)
        return hidden_grad, [None if total is None else total.to(w.dtype) for total, w in pairs]


def _add(sums: list[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> None:
    """Add in place; in float32 at least, so that many chunks lose no small contributions."""
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
    """Node that returns the result; its backward pass gives the gradient of the hidden states."""

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
        ctx: Any, work: _Work, hidden_BTH: torch.Tensor, made: torch.Tensor, *weights: object
    ) -> torch.Tensor:
        ctx.work = work
        ctx.save_for_backward(hidden_BTH)
        return torch.zeros_like(made)

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
