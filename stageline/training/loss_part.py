"""Calls a loss_fn part with what it asks for: counts of the whole batch, and the step.

A part names its counts in `part.counts`, {"num_groups": micro-batch -> int}, and takes them, as it
takes `num_targets` and `step`, by these names. It returns the loss, or (loss, figures).
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stageline.contracts import broken, call, shown
from stageline.data.batch import IGNORE
from stageline.errors import UserError

MicroBatch = dict[str, torch.Tensor]
Figures = dict[str, torch.Tensor]
# names in the log that a loss may not take for a figure of its own
RESERVED = frozenset(
    "kind step time loss router_loss grad_norm learning_rate num_tokens num_targets num_samples "
    "tokens_per_second seconds is_skipped peak_memory_bytes trouble warnings token_accuracy "
    "is_best non_finite loss_figures data_wait perplexity".split()
)


class LossPart:
    """A loss_fn part, and what it asks for.

    Args:
        loss_fn: the part, a partial of it, or an object with the part as `loss_fn`.

    Attributes:
        counts: name -> function that counts in a micro-batch; `num_targets` comes first.
        is_token_sum: the loss is the mean of token losses.
        predicts_tokens: what it gets are logits of the next token; `part.predicts_tokens` says no.

    Raises:
        UserError: a count has the name of another argument, or the part does not take it.
    """

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self.loss_fn = loss_fn
        part = innermost(loss_fn)
        own: Mapping[str, Callable[[MicroBatch], int]] = getattr(part, "counts", {})
        self.predicts_tokens = bool(getattr(part, "predicts_tokens", True))
        taken = _arguments(part)
        for name in own:
            if name in ("num_targets", "step") or not (name in taken or "**" in taken):
                raise UserError(
                    f"the loss {getattr(part, '__name__', type(part).__name__)!r} declares the "
                    f"count {name!r}. A name of its own that is one of its arguments was "
                    "expected, because the number is handed over by this name: correct its "
                    "`counts` or its signature."
                )
        self.counts: dict[str, Callable[[MicroBatch], int]] = {"num_targets": count_targets, **own}
        self.is_token_sum = bool(getattr(part, "is_token_sum", False))
        self._takes_step = "step" in taken or "**" in taken

    def count(self, micro_batches: Sequence[MicroBatch]) -> dict[str, int]:
        """Each count over the micro-batches of this replica."""
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
        """The share of a micro-batch in the loss, and in its named figures; often there are none.

        Args:
            totals: the counts of the whole batch, by name.
            step: optimizer step, from 0.
        """
        given: dict[str, Any] = {"step": step} if self._takes_step else {}
        found = call("loss_fn", self.loss_fn, logits, micro_batch, **totals, **given)
        self._check(found)
        if not isinstance(found, tuple):
            return found, {}
        loss, figures = found
        taken = RESERVED.intersection(figures)
        if taken:
            raise UserError(
                f"the loss returned figures named {', '.join(sorted(taken))}. Other names were "
                "expected, because the log has these already: rename them."
            )
        return loss, {name: value.detach() for name, value in figures.items()}

    def _check(self, found: Any) -> None:
        """Refuses what is no scalar, or (scalar, figures) with scalars of their own."""
        figures: Mapping[str, object]
        loss, figures = found if _is_pair(found) else (found, {})
        wrong = [value for value in (loss, *figures.values()) if not _is_scalar(value)]
        if wrong:
            what = shown(found)
            if found is not loss and _is_scalar(loss):
                name = next(name for name, value in figures.items() if not _is_scalar(value))
                what = f"the figure {name!r}: {shown(figures[name])}"
            raise broken(
                "loss_fn",
                innermost(self.loss_fn),
                f"returned {what}",
                why="A tensor of one number without dimensions, in floats, was expected, because "
                "its gradient is taken and it is added up over micro-batches",
                cure="sum over rows and tokens, divide by num_targets, and return that; figures "
                "are a dict of such tensors beside it",
            )

    def sums(
        self, logits: torch.Tensor, micro_batch: MicroBatch, *, step: int
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Figure -> count -> the sum that is to be divided by it; the loss is named `loss`.

        For when totals are not known yet. Loss and figures are sums of terms, each divided by one
        count: with that one 1 and the others without end, its term alone is left.
        """
        found: dict[str, dict[str, torch.Tensor]] = {}
        for chosen in self.counts:
            totals = {
                name: torch.tensor(1.0 if name == chosen else torch.inf, device=logits.device)
                for name in self.counts
            }
            loss, figures = self(logits, micro_batch, totals=totals, step=step)
            for name, value in {"loss": loss, **figures}.items():
                found.setdefault(name, {})[chosen] = value.detach().double().cpu()
        return found


def _is_pair(found: object) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def innermost(loss_fn: Callable[..., Any]) -> Any:
    """The part itself, without partials and wrappers around it."""
    part: Any = loss_fn
    while True:
        if isinstance(part, functools.partial) and not hasattr(part, "counts"):
            part = part.func
        elif not inspect.isroutine(part) and hasattr(part, "loss_fn"):
            part = part.loss_fn
        else:
            return part


def declares(loss_fn: Callable[..., Any], name: str) -> bool:
    """Whether a part says yes to `name`: by a flag, or by a function of its options."""
    options: dict[str, Any] = {}
    part: Any = loss_fn
    while isinstance(part, functools.partial) or hasattr(part, "loss_fn"):
        if isinstance(part, functools.partial):
            options = {**part.keywords, **options}
        part = part.func if isinstance(part, functools.partial) else part.loss_fn
    answer = getattr(part, name, False)
    return bool(answer(**options) if callable(answer) else answer)


def count_targets(batch: MicroBatch) -> int:
    """Supervised tokens of a micro-batch; the first token of a row is never predicted."""
    return int((batch["labels"][:, 1:] != IGNORE).sum())


def _arguments(part: Any) -> set[str]:
    """Names of the arguments of a part; with `**` where it takes any."""
    try:
        parameters = inspect.signature(part).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {"**" if item.kind is item.VAR_KEYWORD else item.name for item in parameters}
