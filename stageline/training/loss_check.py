"""Tries a loss_fn part on a small random example before a run: what it returns, and how it weighs.

A step is cut into micro-batches, of any number. The loss of each is divided by the counts of the
whole step, so that their sum is the loss of the step. A mean over a micro-batch looks well and
trains another loss: it neither halves where the counts double, nor adds up over rows.

Shapes: B rows, T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stageline.contracts import broken, part_name, shown
from stageline.data.batch import IGNORE
from stageline.errors import UserError
from stageline.modules.chunked_loss import slices
from stageline.modules.preference_loss import without_reference
from stageline.seeds import host_state_kept, seed_host
from stageline.training.loss_part import LossPart, MicroBatch, count_targets, innermost

FACT = "weighs_by_itself"  # a part that says so may divide by what it likes
MOST_LOGITS = 2**22  # numbers of the example: 16 MiB
FIRST = 1000.0  # what counts are taken to be: above all that a loss may clamp them to
TOLERANCE = 1e-3  # of rounding in float32, relative


def check_loss(
    loss_fn: Callable[..., Any],
    batch: MicroBatch,
    halves: Sequence[MicroBatch],
    *,
    vocab_size: int,
    seed: int = 0,
) -> str | None:
    """Calls the part a few times on the CPU, on random logits.

    Args:
        loss_fn: the part, with its options.
        batch: a micro-batch of a few samples, as a collate part makes it.
        halves: two micro-batches of the first and of the other samples; empty: there is one sample.
        vocab_size: numbers that the model gives for each token.

    Returns:
        Why it could not be tried: it may need a GPU, or scores of another kind; else None.

    Raises:
        ContractError: it returns something else than a scalar, none of its gradients is known, it
            ignores a count, or it is no sum over samples; part, file and line are named.
    """
    part = LossPart(loss_fn)
    _check_counts(part, batch)
    example = _Example(part, batch, vocab_size if part.predicts_tokens else 1, seed=seed)
    try:
        _check_values(loss_fn, example, batch, halves)
    except UserError:
        raise
    except Exception as error:  # the step will say whether it is one, with its traceback
        name = part_name(innermost(loss_fn))
        return f"the loss_fn {name} could not be tried before the run: {_told(error)}"
    return None


def _check_counts(part: LossPart, batch: MicroBatch) -> None:
    for name, count in part.counts.items():
        found: Any = None
        try:
            found = count(batch)
            is_whole = int(found) == found and found >= 0
        except UserError:
            raise
        except Exception as error:
            found, is_whole = _told(error), False
        if not is_whole:
            raise broken(
                "loss_fn",
                innermost(part.loss_fn),
                f"has the count {name!r} = {part_name(count)}, which gave {shown(found)}",
                why="A number of 0 or more was expected, because it is added up over the step",
                cure="correct the function in its counts",
                contract="counts",
            )


def _check_values(
    loss_fn: Callable[..., Any],
    example: "_Example",
    batch: MicroBatch,
    halves: Sequence[MicroBatch],
) -> None:
    part = example.part
    found = example.values(batch, FIRST)
    has_graph = found.pop("has graph") or count_targets(batch) == 0
    if not has_graph:
        raise _refused(
            loss_fn,
            "returned a loss without a graph: it does not depend on the logits",
            why="A loss that autograd can follow was expected, because training is its gradient",
            cure="leave out detach(), item(), no_grad() and casts to integers",
        )
    if not getattr(innermost(loss_fn), FACT, False):
        _check_scale(loss_fn, example, batch, found)
        if halves:
            _check_sum(loss_fn, example, batch, halves, found)
        if part.is_token_sum:
            _check_chunks(loss_fn, example, batch, found["loss"])


def _check_scale(
    loss_fn: Callable[..., Any], example: "_Example", batch: MicroBatch, found: dict[str, float]
) -> None:
    """Half of each figure where all counts are doubled."""
    doubled, counts = example.values(batch, 2 * FIRST), example.part.counts
    for name, value in found.items():
        if not _close(doubled[name], value / 2, value):
            raise _refused(
                loss_fn,
                f"gave {_named(name)} {value:.6g} with {', '.join(counts)} {FIRST:.0f}, and "
                f"{doubled[name]:.6g} with {2 * FIRST:.0f}",
                why="Half of it was expected, because micro-batches of a step are added up and the "
                "counts are those of the whole step: a mean over the micro-batch, or a term that "
                "is divided by nothing, grows with their number",
                cure=f"sum, and divide by {' or '.join(counts)}; {_unless_meant(loss_fn)}",
            )


def _check_sum(
    loss_fn: Callable[..., Any],
    example: "_Example",
    batch: MicroBatch,
    halves: Sequence[MicroBatch],
    found: dict[str, float],
) -> None:
    """The same for two halves of the rows, added up: collated anew, or cut out of the batch."""
    middle = len(halves[0]["input_ids"])
    ways = [example.added(halves), example.added(example.halves_of(batch, middle))]
    for name, value in found.items():
        sums = [way[name] for way in ways if way is not None and math.isfinite(way[name])]
        if sums and not any(_close(added, value, value) for added in sums):
            raise _refused(
                loss_fn,
                f"gave {_named(name)} {value:.6g} for {example.num_rows} rows, and {sums[0]:.6g} "
                "for two halves of them added up",
                why="The same was expected, because it must not matter how rows fall into "
                "micro-batches: a mean that is divided again gives each of them the same weight",
                cure="sum over rows and tokens, and divide once, by "
                f"{' or '.join(example.part.counts)}; {_unless_meant(loss_fn)}",
            )


def _unless_meant(loss_fn: Callable[..., Any]) -> str:
    name = part_name(innermost(loss_fn)).partition(" ")[0]
    return (
        f"or write {name}.{FACT} = True below it, if it is meant to depend on how rows fall into "
        "micro-batches"
    )


def _check_chunks(
    loss_fn: Callable[..., Any], example: "_Example", batch: MicroBatch, value: float
) -> None:
    chunk = max(1, example.logits_BTV.shape[1] // 2)
    pieces = slices(example.logits_BTV.detach(), example.cut(batch), chunk)
    added = sum(example.loss(logits, piece, FIRST)[0].item() for logits, piece in pieces)
    if not _close(added, value, value):
        raise _refused(
            loss_fn,
            f"says is_token_sum, and gave {value:.6g} for whole rows, {added:.6g} for pieces of "
            f"{chunk} tokens added up",
            why="The same was expected, because --logits-chunk calls it piece by piece",
            cure="correct it (logits of token t predict label t + 1), or take is_token_sum away",
        )


class _Example:
    """Random logits for a micro-batch, few enough to be cheap.

    Attributes:
        first: of the columns that are looked at; all, if there are not too many.
    """

    def __init__(self, part: LossPart, batch: MicroBatch, width: int, *, seed: int) -> None:
        self.part = part
        self.seed = seed
        self.num_rows, num_tokens = batch["input_ids"].shape
        most = max(2, MOST_LOGITS // (width * self.num_rows))
        columns = (batch["labels"] != IGNORE).any(dim=0).nonzero()
        learnt = max(0, int(columns[0]) - 1) if len(columns) else 0
        self.first = max(0, min(learnt, num_tokens - most))
        self.is_cut = num_tokens > most
        shape = (self.num_rows, min(num_tokens, most), width)
        generator = torch.Generator().manual_seed(seed)
        self.logits_BTV = torch.randn(shape, generator=generator).requires_grad_()

    def values(self, batch: MicroBatch, count: float, *, first_row: int = 0) -> dict[str, Any]:
        """Loss and figures of a micro-batch as numbers, by name; `has graph` says of the loss."""
        batch = self.cut(batch)
        num_rows, num_tokens = batch["input_ids"].shape
        # as a model gives them: no leaf, so that the part may write into them
        logits = self.logits_BTV[first_row : first_row + num_rows, :num_tokens].clone()
        loss, figures = self.loss(logits, batch, count)
        numbers = {name: float(value) for name, value in figures.items()}
        return {"has graph": loss.requires_grad, "loss": float(loss.detach()), **numbers}

    def loss(
        self, logits: torch.Tensor, batch: MicroBatch, count: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What the part gives, each count being `count`."""
        totals = {name: torch.tensor(count) for name in self.part.counts}
        rows = {"loss_rows": torch.arange(len(batch["input_ids"]))}
        with host_state_kept():
            seed_host(self.seed)  # a part that draws draws the same each time
            return self.part(logits, without_reference({**batch, **rows}), totals=totals, step=0)

    def added(self, halves: Sequence[MicroBatch]) -> dict[str, float] | None:
        """The sums over halves, by name; None where they do not compare."""
        if sum(len(half["input_ids"]) for half in halves) != self.num_rows:
            return None
        if any(half["input_ids"].shape[1] < self.first + 2 for half in halves):
            return None  # of which no column is looked at
        first = 0
        totals: dict[str, float] = {}
        for half in halves:
            for name, value in self.values(half, FIRST, first_row=first).items():
                totals[name] = totals.get(name, 0.0) + value
            first += len(half["input_ids"])
        return totals

    def halves_of(self, batch: MicroBatch, middle: int) -> list[MicroBatch]:
        """The first `middle` rows and the others; empty where not all the loss gets is by rows.

        A collate part that draws, or looks at all rows, would make other halves.
        """
        by_rows = {name for name, value in batch.items() if value.shape[:1] == (self.num_rows,)}
        if any(name.startswith("loss_") for name in batch.keys() - by_rows):
            return []
        return [
            {name: value[where] if name in by_rows else value for name, value in batch.items()}
            for where in (slice(0, middle), slice(middle, None))
        ]

    def cut(self, batch: MicroBatch) -> MicroBatch:
        """The columns that are looked at."""
        shape, where = batch["input_ids"].shape, slice(self.first, None)
        if self.is_cut:
            where = slice(self.first, self.first + self.logits_BTV.shape[1])
        return {
            name: value[:, where] if value.shape[:2] == shape else value
            for name, value in batch.items()
        }


def _close(found: float, expected: float, scale: float) -> bool:
    """Equal up to rounding; what is no number is found elsewhere."""
    return not abs(found - expected) > TOLERANCE * max(abs(scale), 1e-6)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _named(name: str) -> str:
    return "the loss" if name == "loss" else f"the figure {name!r}"


def _refused(loss_fn: Callable[..., Any], came: str, *, why: str, cure: str) -> UserError:
    return broken("loss_fn", innermost(loss_fn), came, why=why, cure=cure)
