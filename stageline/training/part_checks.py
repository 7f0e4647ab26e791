"""Looks at what parts gave before the first step, and at micro-batches before each.

Shapes: B rows, T tokens, V vocabulary.
"""

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stageline import progress
from stageline.contracts import broken, call, mismatch, part_name, shown
from stageline.data.batches.batch import IGNORE
from stageline.errors import DataError, UserError, raised_at
from stageline.modules.chunked_loss import slices
from stageline.modules.losses import without_reference
from stageline.seeds import host_state_kept, seed_host
from stageline.training.loss_part import LossPart, MicroBatch, count_targets, innermost


def check_optimizer(
    optimizer: object, parameters: Mapping[str, nn.Parameter], *, part: object
) -> None:
    """Refuses what is no optimizer, and one that leaves parameters out.

    Args:
        parameters: what was handed over, by name.

    Raises:
        ContractError: part, file and line, and what came are named.
    """
    groups = getattr(optimizer, "param_groups", None)
    step = getattr(optimizer, "step", None)
    if not (isinstance(groups, list) and callable(step)):
        raise broken(
            "optimizer",
            part,
            f"returned {shown(optimizer)}",
            why="An optimizer object was expected, because it updates the weights and is saved",
            cure="return torch.optim.AdamW(param_groups, ...), or another one with param_groups "
            "and step()",
        )
    problem = mismatch(step)
    if problem is not None:
        raise broken(
            "optimizer",
            part,
            f"returned {shown(optimizer)}, whose step() wants more ({problem})",
            why="One that steps by gradients alone was expected, because the passes of a step run "
            "over several ranks, once",
            cure="choose an optimizer without a closure",
        )
    taken = {id(parameter) for group in groups for parameter in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in taken]
    if missing:
        raise broken(
            "optimizer",
            part,
            f"leaves out {len(missing)} of {len(parameters)} parameters: {', '.join(missing[:6])}"
            f"{', ...' if len(missing) > 6 else ''}",
            why="All were expected, because what it does not get is never trained",
            cure="hand all of param_groups to it (a list of dicts with params), or freeze these "
            "parts of the model (--frozen-*)",
        )


def check_learning_rate(rate_of: object, *, total_steps: int, part: object) -> None:
    """Refuses a schedule that is no function, or gives no rate for the first or the last step.

    Raises:
        ContractError: as above.
    """
    if not callable(rate_of):
        raise broken(
            "lr_scheduler",
            part,
            f"returned {shown(rate_of)}",
            why="A function was expected, because each step asks for its rate by number, also one "
            "that a resumed run begins with",
            cure="return lambda step: rate; torch's schedulers count by themselves",
        )
    for step in {0, max(0, total_steps - 1)}:
        rate = call("lr_scheduler", rate_of, step)
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not (is_number and math.isfinite(rate) and rate >= 0):
            raise broken(
                "lr_scheduler",
                part,
                f"gave {shown(rate)} as the rate of step {step}",
                why="A number of 0 or more was expected, because it is the learning rate",
                cure="return a float from the function",
            )


def check_tracker(tracker: object, *, part: object) -> None:
    """Refuses what cannot log; None is none.

    Raises:
        ContractError: as above.
    """
    lacks = [name for name in ("log", "close") if not callable(getattr(tracker, name, None))]
    if tracker is not None and lacks:
        raise broken(
            "tracker",
            part,
            f"returned {shown(tracker)}, without {' and '.join(lacks)}",
            why="An object with both was expected, because each step is told to it",
            cure="return such an object, or None",
        )


def check_sim_fn(sim_fn: Callable[..., torch.Tensor]) -> None:
    """Refuses what does not give one similarity for each pair of vectors.

    Raises:
        ContractError: as above.
    """
    generator = torch.Generator().manual_seed(0)
    a_NV, b_NV = torch.rand((2, 3, 8), generator=generator).softmax(dim=-1)
    found = call("sim_fn", sim_fn, a_NV, b_NV)
    if not (isinstance(found, torch.Tensor) and found.shape == (3,)):
        raise broken(
            "sim_fn",
            sim_fn,
            f"returned {shown(found)} for 3 pairs of vectors of 8 numbers",
            why="3 similarities were expected, because those of a group are compared",
            cure="reduce the last dimension alone",
        )


# pixels are made on the first stage only
SHARED = ("input_ids", "labels", "loss_kl_input_ids", "loss_kl_labels")


def check_agreement(
    micro_batches: Sequence[Mapping[str, torch.Tensor]], *, group: dist.ProcessGroup | None
) -> None:
    """Compares a hash over the pipeline, before a step sends anything; every rank calls this.

    Each rank loads its micro-batches itself and takes shapes of what comes from them. Where they
    differ, gloo fills a buffer in part without a word, or ends the process; and nobody would see
    that tokens differ.

    Raises:
        DataError: ranks differ; on all of them.
    """
    num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if num_ranks == 1:
        return
    # on the CPU where the group can: no wait for an accelerator
    has_gloo = "cpu" in str(dist.get_backend_config(group))
    device = "cpu" if has_gloo else torch.accelerator.current_accelerator()
    described = [_describe(batch) for batch in micro_batches]
    own = torch.tensor([zlib.crc32("\n".join(described).encode())], device=device)
    hashes = [torch.empty_like(own) for _ in range(num_ranks)]
    with progress.doing("other ranks at the start of a step", is_waiting=True):
        dist.all_gather(hashes, own, group=group)
        if all(torch.equal(other, own) for other in hashes):
            return
        gathered: list[list[str]] = [[] for _ in range(num_ranks)]
        dist.all_gather_object(gathered, described, group=group)
    raise DataError(explain_difference(gathered))


def explain_difference(gathered: Sequence[Sequence[str]]) -> str:
    """The first difference between rank 0 of a pipeline and another one."""
    first = gathered[0]
    rank, other = next((rank, one) for rank, one in enumerate(gathered) if one != first)
    made = f"stage ranks 0 and {rank} of a pipeline made"
    if len(first) != len(other):
        what = f"{len(first)} and {len(other)} micro-batches of one step"
    else:
        index = next(index for index, one in enumerate(first) if one != other[index])
        what = (
            f"different micro-batches {index} of one step: {first[index]} on rank 0, "
            f"{other[index]} on rank {rank}"
        )
    return (
        f"{made} {what}; equal ones were expected. Stages exchange tensors of the shapes that each "
        "rank takes from its own copy: the dataset and the collate part must give the same on "
        "every rank (no randomness of their own, no files that differ between machines)."
    )


def _describe(batch: Mapping[str, torch.Tensor]) -> str:
    """Shapes, types and contents of what every rank holds."""
    parts = []
    for name in SHARED:
        if name in batch:
            value = batch[name]
            contents = value.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            kind = str(value.dtype).removeprefix("torch.")
            checksum = f"{zlib.crc32(contents):08x}"
            parts.append(f"{name} {tuple(value.shape)} {kind} (contents {checksum})")
    return ", ".join(parts)


MOST_LOGITS = 2**22  # numbers of the example: 16 MiB
# what fails here and may run where the run does
_ELSEWHERE = re.compile("gpu|cuda|device|driver|not implemented|process group", re.IGNORECASE)
FIRST = 1000.0  # what counts are taken to be: above all that a loss may clamp them to
TOLERANCE = 1e-3  # of rounding in float32, relative


def check_loss(
    part: LossPart,
    batch: MicroBatch,
    halves: Sequence[MicroBatch],
    *,
    vocab_size: int,
    seed: int = 0,
) -> str | None:
    """Tries a loss_fn part on the CPU, on random logits: what it returns, and how it weighs.

    The loss of each micro-batch is divided by the counts of the whole step, so that their sum is
    the loss of the step. A mean over a micro-batch looks well and trains another loss: it neither
    halves where the counts double, nor adds up over rows.

    Args:
        part: the part, with its options.
        batch: a micro-batch of a few samples, as a collate part makes it.
        halves: two micro-batches of the first and of the other samples; empty: there is one sample.
        vocab_size: numbers that the model gives for each token.

    Returns:
        Why it could not be tried: it may need a GPU, scores of another kind, or a package; else
        None.

    Raises:
        ContractError: it fails, returns something else than a scalar, none of its gradients is
            known, it ignores a count, or is no sum over samples; part, file and line are named.
    """
    _check_counts(part, batch)
    example = _Example(part, batch, vocab_size if part.predicts_tokens else 1, seed=seed)
    try:
        _check_values(example, batch, halves)
    except UserError:
        raise
    except Exception as error:
        key = error.args[0] if isinstance(error, KeyError) and error.args else None
        # keys of the reference model come with the run
        if isinstance(key, str) and key not in batch and not key.startswith("loss_"):
            raise _refused(
                part,
                f"reads {key!r}, which a micro-batch does not have",
                why=f"The collate part gives {', '.join(batch)}",
                cure="correct the name, or choose a `collate_fn` that gives it",
            ) from error
        told = f"{_told(error)}{raised_at(error)}"
        may_run = isinstance(key, str) or not part.predicts_tokens
        if may_run or _ELSEWHERE.search(str(error)) or isinstance(error, ImportError):
            name = part_name(innermost(part.loss_fn))
            return f"the loss_fn {name} could not be tried before the run: {told}"
        raise _refused(
            part,
            f"raised {told}",
            why="It was called as a step calls it, with random logits and a micro-batch of the run",
            cure="correct that line",
        ) from error
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


def _check_values(example: "_Example", batch: MicroBatch, halves: Sequence[MicroBatch]) -> None:
    part = example.part
    found = example.values(batch, FIRST)
    has_graph = found.pop("has graph") or count_targets(batch) == 0
    if not has_graph:
        raise _refused(
            part,
            "returned a loss without a graph: it does not depend on the logits",
            why="A loss that autograd can follow was expected, because training is its gradient",
            cure="leave out detach(), item(), no_grad() and casts to integers",
        )
    if not math.isfinite(found["loss"]):
        raise _refused(
            part,
            f"gave {found['loss']} for logits drawn from a normal distribution",
            why="A number was expected, because a step with such a loss is skipped",
            cure="look for divisions by zero and logarithms of 0",
        )
    if part.predicts_tokens:
        _check_shift(example, batch)
    if not part.weighs_by_itself:
        _check_scale(example, batch, found)
        if halves:
            _check_sum(example, batch, halves, found)
        if part.is_token_sum:
            _check_chunks(example, batch, found["loss"])


def _check_shift(example: "_Example", batch: MicroBatch) -> None:
    """Refuses a loss that reads the label of the first token, which no logits predict."""

    def value(label: int) -> float:
        labels = batch["labels"].clone()
        labels[:, example.first] = label
        return example.values({**batch, "labels": labels}, FIRST)["loss"]

    if value(0) != value(1):
        raise _refused(
            example.part,
            "changes with the label of the first token",
            why="Logits of token t predict label t + 1, so no logits belong to that label",
            cure="compare logits[:, :-1] with labels[:, 1:], or register it with "
            "predicts_tokens=False if it takes something else",
        )


def _check_scale(example: "_Example", batch: MicroBatch, found: dict[str, float]) -> None:
    """Half of each figure where all counts are doubled."""
    part, doubled = example.part, example.values(batch, 2 * FIRST)
    for name, value in found.items():
        if not _close(doubled[name], value / 2, value):
            raise _refused(
                part,
                f"gave {_named(name)} {value:.6g} with {', '.join(part.counts)} {FIRST:.0f}, and "
                f"{doubled[name]:.6g} with {2 * FIRST:.0f}",
                why="Half of it was expected, because micro-batches of a step are added up and the "
                "counts are those of the whole step: a mean over the micro-batch, or a term that "
                "is divided by nothing, grows with their number",
                cure=f"sum, and divide by {' or '.join(part.counts)}; {_unless_meant(part)}",
            )


def _check_sum(
    example: "_Example", batch: MicroBatch, halves: Sequence[MicroBatch], found: dict[str, float]
) -> None:
    """The same for two halves of the rows, added up: collated anew, or cut out of the batch."""
    part, middle = example.part, len(halves[0]["input_ids"])
    ways = [example.added(halves), example.added(example.halves_of(batch, middle))]
    for name, value in found.items():
        sums = [way[name] for way in ways if way is not None and math.isfinite(way[name])]
        if sums and not any(_close(added, value, value) for added in sums):
            raise _refused(
                part,
                f"gave {_named(name)} {value:.6g} for {example.num_rows} rows, and {sums[0]:.6g} "
                "for two halves of them added up",
                why="The same was expected, because it must not matter how rows fall into "
                "micro-batches: a mean that is divided again gives each of them the same weight",
                cure="sum over rows and tokens, and divide once, by "
                f"{' or '.join(part.counts)}; {_unless_meant(part)}",
            )


def _unless_meant(part: LossPart) -> str:
    name = part_name(innermost(part.loss_fn)).partition(" ")[0]
    return (
        f"or register {name} with weighs_by_itself=True, if it is meant to depend on how rows fall "
        "into micro-batches"
    )


def _check_chunks(example: "_Example", batch: MicroBatch, value: float) -> None:
    chunk = max(1, example.logits_BTV.shape[1] // 2)
    pieces = slices(example.logits_BTV.detach(), example.cut(batch), chunk)
    added = sum(example.loss(logits, piece, FIRST)[0].item() for logits, piece in pieces)
    if not _close(added, value, value):
        raise _refused(
            example.part,
            f"says is_token_sum, and gave {value:.6g} for whole rows, {added:.6g} for pieces of "
            f"{chunk} tokens added up",
            why="The same was expected, because `logits_chunk` calls it piece by piece",
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


def _refused(part: LossPart, came: str, *, why: str, cure: str) -> UserError:
    return broken("loss_fn", innermost(part.loss_fn), came, why=why, cure=cure)
