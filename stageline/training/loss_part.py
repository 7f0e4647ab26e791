"""Call a loss_fn part with counts of the whole batch and, if it takes it, the step.

A part declares counts, {"num_groups": micro-batch -> int}, and takes them by these names, like
`num_targets` and `step`. It returns the loss, or (loss, figures).
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from stageline import progress
from stageline.contracts import IGNORE, broken, call, shown
from stageline.errors import UserError
from stageline.pipeline.runner import MicroBatch

Figures = dict[str, torch.Tensor]
LARGEST = "_max"  # at the end of a figure's name: the largest of the step, not the sum
# names in the log that a loss may not take for a figure of its own
RESERVED = frozenset(
    "kind step time loss router_loss grad_norm lr learning_rate num_tokens num_targets num_samples "
    "tok/s tokens_per_second seconds is_skipped peak_memory_bytes trouble warnings token_accuracy "
    "is_best non_finite loss_figures data_wait perplexity expert_load "
    "expert_load_by_layer idle_experts idle_experts_by_layer".split()
)


TARGETS = ("target", "targets", "label", "labels")  # second argument of a torch-style loss


@dataclass(frozen=True)
class MeanOfTargets:
    """A torch-style `loss_fn(output, target)` as a part; the target is `labels`."""

    loss_fn: Callable[..., torch.Tensor]

    def __call__(
        self, logits: torch.Tensor, micro_batch: MicroBatch, *, num_targets: torch.Tensor
    ) -> torch.Tensor:
        count = count_targets(micro_batch)
        if count == 0:  # the mean of no token is NaN
            return logits.float().sum() * 0
        return self.loss_fn(logits, micro_batch["labels"]) * (count / num_targets)


@dataclass(eq=False)
class LossPart:
    """A loss_fn part with its declared facts.

    Args:
        loss_fn: the part, a partial of it, or an object with the part as `loss_fn`.
        counts: name -> function that counts in a micro-batch; `num_targets` is added in front.
        is_token_sum: the loss is the mean of token losses.
        is_cross_entropy: exp of the loss is the perplexity.
        predicts_tokens: it gets logits of the next token.
        needs_reference, needs_kl: it needs `loss_reference`, `loss_kl` in each micro-batch.
        weighs_by_itself: it need not add up over micro-batches.

    Raises:
        UserError: a count has the name of another argument, or the part does not take it.
    """

    loss_fn: Callable[..., Any]
    _: KW_ONLY
    counts: Mapping[str, Callable[[MicroBatch], int]] = field(default_factory=dict)
    is_token_sum: bool = False
    is_cross_entropy: bool = False
    predicts_tokens: bool = True
    needs_reference: bool = False
    needs_kl: bool = False
    weighs_by_itself: bool = False

    def __post_init__(self) -> None:
        part = innermost(self.loss_fn)
        parameters: list[inspect.Parameter] = []
        with contextlib.suppress(TypeError, ValueError):  # a built-in function has no signature
            called = part.forward if isinstance(part, torch.nn.Module) else part
            parameters = list(inspect.signature(called).parameters.values())
        taken = {"**" if one.kind is one.VAR_KEYWORD else one.name for one in parameters}
        for name in self.counts:
            if name in ("num_targets", "step") or not taken & {name, "**"}:
                raise UserError(
                    f"the loss {getattr(part, '__name__', type(part).__name__)!r} declares the "
                    f"count {name!r}, which must be an argument of its own. Correct its `counts` "
                    "or its signature."
                )
        names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        is_torch_style = len(names) == 2 and names[1] in TARGETS
        if is_torch_style and not taken & {"num_targets", "**"}:
            self.loss_fn = MeanOfTargets(self.loss_fn)
        self.counts = {"num_targets": count_targets, **self.counts}
        self._takes_step = "step" in taken or "**" in taken

    @classmethod
    def of(cls, loss_fn: "Callable[..., Any] | LossPart") -> "LossPart":
        """Return a plain function as a part without declared facts, a part as it is."""
        return loss_fn if isinstance(loss_fn, LossPart) else cls(loss_fn)

    def over(self, loss_fn: Callable[..., Any]) -> "LossPart":
        """Return the same part around another function."""
        other = copy.copy(self)
        other.loss_fn = loss_fn
        return other

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of a loss that keeps one, with lists for tensors; else None."""
        read = getattr(innermost(self.loss_fn), "state_dict", None)
        if read is None:
            return None
        return {
            name: one.tolist() if isinstance(one, torch.Tensor) else one
            for name, one in read().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state that `state_dict` returned."""
        part = innermost(self.loss_fn)
        tensors = {
            name: torch.tensor(state[name], dtype=one.dtype, device=one.device)
            for name, one in part.state_dict().items()
            if name in state and isinstance(one, torch.Tensor)
        }
        part.load_state_dict({**state, **tensors})

    def count(self, micro_batches: Sequence[MicroBatch]) -> dict[str, int]:
        """Return each count over the micro-batches of this replica."""
        return {
            name: sum(int(count(batch)) for batch in micro_batches)
            for name, count in self.counts.items()
        }

    def __call__(
        self,
        logits: torch.Tensor,
        micro_batch: MicroBatch,
        *,
        totals: Mapping[str, torch.Tensor],
        step: int,
    ) -> tuple[torch.Tensor, Figures]:
        """Return the share of a micro-batch in the loss and in its named figures.

        Args:
            totals: the counts of the whole batch, by name.
            step: optimizer step, from 0.
        """
        given: dict[str, Any] = {"step": step} if self._takes_step else {}
        found = call("loss_fn", self.loss_fn, logits, micro_batch, **totals, **given)
        is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
        loss, figures = found if is_pair else (found, {})
        for name, value in {"": loss, **figures}.items():
            is_tensor = isinstance(value, torch.Tensor)
            if not (is_tensor and value.ndim == 0 and value.is_floating_point()):
                raise broken(
                    "loss_fn",
                    innermost(self.loss_fn),
                    f"returned {f'the figure {name!r}: ' if name else ''}{shown(value)}",
                    why="A float tensor of one number without dimensions is required",
                    cure="sum over rows and tokens, divide by num_targets, and return that; "
                    "figures are a dict of such tensors",
                )
        if taken := RESERVED.intersection(figures):
            names = ", ".join(sorted(taken))
            raise UserError(f"the loss returned figures named {names}, as in the log. Rename them.")
        return loss, {name: value.detach() for name, value in figures.items()}

    def sums(
        self, logits: torch.Tensor, micro_batch: MicroBatch, *, step: int
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return figure -> count -> the sum that is to be divided by it; the loss is named `loss`.

        For when totals are not known yet. Loss and figures are sums of terms, each divided by one
        count: with that count 1 and the others infinite, only its term is left.
        """
        found: dict[str, dict[str, torch.Tensor]] = {}
        for chosen in self.counts:
            totals = {
                name: torch.full((), 1.0 if name == chosen else torch.inf, device=logits.device)
                for name in self.counts
            }
            loss, figures = self(logits, micro_batch, totals=totals, step=step)
            for name, value in {"loss": loss, **figures}.items():
                if name.endswith(LARGEST):  # not a sum
                    continue
                found.setdefault(name, {})[chosen] = value.detach().double().cpu()
        return found


def innermost(loss_fn: Callable[..., Any]) -> Any:
    """Return the part itself, without partials and wrappers around it."""
    part: Any = loss_fn
    while isinstance(part, functools.partial) or (
        hasattr(part, "loss_fn") and not inspect.isroutine(part)
    ):
        part = part.func if isinstance(part, functools.partial) else part.loss_fn
    return part


def count_targets(batch: MicroBatch) -> int:
    """Return the supervised tokens of a micro-batch; a row's first token is never predicted."""
    return int((batch["labels"][:, 1:] != IGNORE).sum())


Output = torch.Tensor | tuple[torch.Tensor, ...]


def logits_of(output: Output) -> torch.Tensor:
    """Return the logits [B, T, V] of a last stage, which may return (logits, extra loss)."""
    return output[0] if isinstance(output, tuple) else output


class StepLoss:
    """The loss of a step: gets the output of each micro-batch, returns what backward starts from.

    The extra loss of a mixture of experts' routers, weighted by the model, is a figure of one
    micro-batch; the step has the mean of them.

    Args:
        num_targets, counts: supervised tokens and what else the part counts, of the whole step.
        num_micro_batches: of the whole step, over all replicas.
        scale: of fp16's loss scaling; in no figure.

    Attributes:
        loss, figures: sums of what `loss_fn` returned, scalars in float32; of some the largest.
        extra_loss: the mean of the extra losses; 0 for models without.
        each: the loss of every micro-batch in the order of the calls, extra loss included.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any] | LossPart,
        *,
        num_targets: int,
        counts: Mapping[str, int] | None = None,
        step: int = 0,
        num_micro_batches: int,
        scale: float,
        device: torch.device,
    ) -> None:
        self.part = LossPart.of(loss_fn)
        given = {**dict.fromkeys(self.part.counts, 1), **(counts or {}), "num_targets": num_targets}
        self.totals = {
            name: torch.full((), float(count), device=device) for name, count in given.items()
        }
        self.step, self.num_micro_batches, self.scale = step, num_micro_batches, scale
        self.loss, self.extra_loss = torch.zeros(2, device=device).unbind()
        self.figures: Figures = {}
        self.each: list[torch.Tensor] = []

    def __call__(self, output: Output, batch: MicroBatch) -> torch.Tensor:
        here = progress.place()
        with progress.doing("loss", stage=here.stage, micro_batch=here.micro_batch):
            loss, figures = self.part(logits_of(output), batch, totals=self.totals, step=self.step)
        self.loss = self.loss + loss.detach().float()
        for name, value in figures.items():
            before = self.figures.get(name, torch.zeros_like(value)).float()
            join = torch.maximum if name.endswith(LARGEST) else torch.add
            self.figures[name] = join(before, value.float())
        if isinstance(output, tuple):
            extra_loss = output[1] / self.num_micro_batches
            self.extra_loss = self.extra_loss + extra_loss.detach().float()
            loss = loss + extra_loss
        self.each.append(loss.detach())
        return loss * self.scale
