"""Finds what people get wrong in a part before the first step: a mean loss, a signature, a shape.

Shapes: B rows, T tokens, V vocabulary.
"""

import re
from collections.abc import Callable, Mapping

import torch
from torch import nn

from stageline.contracts import broken, call, part_name, shown
from stageline.data.batches.batch import IGNORE
from stageline.errors import UserError, raised_at
from stageline.modules.losses import without_reference
from stageline.seeds import host_state_kept, seed_host
from stageline.training.loss_part import LossPart, MicroBatch, innermost


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
    if not isinstance(groups, list):
        raise broken(
            "optimizer",
            part,
            f"returned {shown(optimizer)}",
            why="An optimizer object was expected",
            cure="return torch.optim.AdamW(param_groups, ...), or another one with param_groups",
        )
    taken = {id(one) for group in groups for one in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in taken]
    if missing:
        raise broken(
            "optimizer",
            part,
            f"leaves out {len(missing)} of {len(parameters)} parameters: {', '.join(missing[:6])}"
            f"{', ...' if len(missing) > 6 else ''}",
            why="What it does not get is never trained",
            cure="hand all of param_groups to it, or freeze these parts (`frozen_llm` and its kin)",
        )


def check_learning_rate(rate_of: object, *, part: object) -> None:
    """Refuses a schedule that is not a function. Raises as above."""
    if not callable(rate_of):
        raise broken(
            "lr_scheduler",
            part,
            f"returned {shown(rate_of)}",
            why="A function was expected, because each step asks for its rate by number",
            cure="return lambda step: rate; torch's schedulers count by themselves",
        )


def check_sim_fn(sim_fn: Callable[..., torch.Tensor]) -> None:
    """Refuses what does not give one similarity for each pair of vectors. Raises as above."""
    generator = torch.Generator().manual_seed(0)
    a_NV, b_NV = torch.rand((2, 3, 8), generator=generator).softmax(dim=-1)
    found = call("sim_fn", sim_fn, a_NV, b_NV)
    if not (isinstance(found, torch.Tensor) and found.shape == (3,)):
        raise broken(
            "sim_fn",
            sim_fn,
            f"returned {shown(found)} for 3 pairs of vectors of 8 numbers",
            why="3 similarities were expected",
            cure="reduce the last dimension only",
        )


MOST_LOGITS = 2**22  # numbers of the example: 16 MiB
# what fails here and may run where the run does
_ELSEWHERE = re.compile("gpu|cuda|device|driver|not implemented|process group", re.IGNORECASE)
COUNT = 1000.0  # value of each count, above any minimum that a loss clamps it to
TOLERANCE = 1e-3  # of rounding in float32, relative


def check_loss(part: LossPart, batch: MicroBatch, *, vocab_size: int) -> str | None:
    """Tries a loss_fn part on random logits on the CPU: what it returns, and how it weighs.

    The loss of each micro-batch is divided by the counts of the whole step, so that their sum is
    the loss of the step. A mean over a micro-batch looks well and trains another loss: it neither
    halves where the counts double, nor adds up over rows.

    Args:
        part: the part, with its options.
        batch: a micro-batch of two samples or groups, as a collate part makes it.
        vocab_size: numbers that the model gives for each token.

    Returns:
        Why it could not be tried: it may need a GPU, scores of another kind, or a package; else
        None.

    Raises:
        ContractError: it fails, returns something else than a scalar, reads the label of the first
            token, ignores a count, or it is no sum over samples; part, file and line are named.
    """
    value_of = _Example(part, batch, vocab_size if part.predicts_tokens else 1)

    def refused(came: str, *, why: str, cure: str) -> UserError:
        return broken("loss_fn", innermost(part.loss_fn), came, why=why, cure=cure)

    divide = (
        f"sum over rows and tokens and divide once, by {' or '.join(part.counts)}; or register it "
        "with weighs_by_itself=True, if it is meant to depend on how rows fall into micro-batches"
    )
    try:
        found = value_of(batch)
        if part.predicts_tokens:
            one, other = batch["labels"].clone(), batch["labels"].clone()
            one[:, value_of.columns.start], other[:, value_of.columns.start] = 0, 1
            values = [value_of({**batch, "labels": labels})["loss"] for labels in (one, other)]
            if abs(values[0] - values[1]) > 0:
                raise refused(
                    "changes with the label of the first token",
                    why="Logits of token t predict label t + 1",
                    cure="compare logits[:, :-1] with labels[:, 1:], or register it with "
                    "predicts_tokens=False if it takes something else",
                )
        if part.weighs_by_itself:
            return None
        doubled = value_of(batch, count=2 * COUNT)
        added = value_of.halves(batch)
        for name, value in found.items():
            what = "the loss" if name == "loss" else f"the figure {name!r}"
            if not _close(doubled[name], value / 2, value):
                raise refused(
                    f"gave {what} {value:.6g} with {', '.join(part.counts)} {COUNT:.0f}, and "
                    f"{doubled[name]:.6g} with {2 * COUNT:.0f}",
                    why="Half of it was expected, because the counts are those of the whole step",
                    cure=divide,
                )
            if added and not _close(added[name], value, value):
                raise refused(
                    f"gave {what} {value:.6g} for {len(batch['labels'])} rows, and "
                    f"{added[name]:.6g} for two halves of them added up",
                    why="The same was expected, because micro-batches of a step are added up",
                    cure=divide,
                )
    except UserError:
        raise
    except Exception as error:
        key = error.args[0] if isinstance(error, KeyError) and error.args else None
        # keys of the reference model come with the run
        if isinstance(key, str) and key not in batch and not key.startswith("loss_"):
            raise refused(
                f"reads {key!r}, which a micro-batch does not have",
                why=f"The collate part gives {', '.join(batch)}",
                cure="correct the name, or choose a `collate_fn` that gives it",
            ) from error
        told = f"{f'{type(error).__name__}: {error}'.splitlines()[0]}{raised_at(error)}"
        may_run = isinstance(key, str) or not part.predicts_tokens
        if may_run or _ELSEWHERE.search(str(error)) or isinstance(error, ImportError):
            name = part_name(innermost(part.loss_fn))
            return f"the loss_fn {name} could not be tried before the run: {told}"
        raise refused(
            f"raised {told}",
            why="It was called as a step calls it, with random logits and a micro-batch of the run",
            cure="correct that line",
        ) from error
    return None


class _Example:
    """Random logits for a micro-batch, few enough to be cheap: gives loss and figures as numbers.

    Attributes:
        columns: tokens that are looked at; all, if there are not too many.
    """

    def __init__(self, part: LossPart, batch: MicroBatch, width: int) -> None:
        self.part = part
        num_rows, num_tokens = batch["labels"].shape
        most = min(num_tokens, max(2, MOST_LOGITS // (width * num_rows)))
        learnt = (batch["labels"] != IGNORE).any(dim=0).nonzero().flatten().tolist()
        first = max(0, min(learnt[0] - 1 if learnt else 0, num_tokens - most))
        self.columns = slice(first, first + most)
        generator = torch.Generator().manual_seed(0)
        self.logits_BTV = torch.randn((num_rows, most, width), generator=generator).requires_grad_()

    def __call__(
        self, batch: MicroBatch, *, count: float = COUNT, first_row: int = 0
    ) -> dict[str, float]:
        shape = batch["input_ids"].shape
        seen = {
            name: value[:, self.columns] if value.shape[:2] == shape else value
            for name, value in batch.items()
        }
        num_rows, num_tokens = seen["input_ids"].shape
        # a clone is not a leaf, as logits of a model are not: the part may write into it
        logits = self.logits_BTV[first_row : first_row + num_rows, :num_tokens].clone()
        totals = {name: torch.tensor(count) for name in self.part.counts}
        rows = {"loss_rows": torch.arange(num_rows)}
        with host_state_kept():
            seed_host(0)  # a part that draws draws the same each time
            loss, figures = self.part(
                logits, without_reference({**seen, **rows}), totals=totals, step=0
            )
        return {name: float(value.detach()) for name, value in {"loss": loss, **figures}.items()}

    def halves(self, batch: MicroBatch) -> dict[str, float]:
        """The sums over both halves of the rows; empty where rows have more than tokens."""
        num_rows, middle = len(self.logits_BTV), len(self.logits_BTV) // 2
        if num_rows % 2 or any(name.startswith("loss_") for name in batch):
            return {}
        by_rows = {name for name, value in batch.items() if value.shape[:1] == (num_rows,)}
        first = {name: v[:middle] if name in by_rows else v for name, v in batch.items()}
        second = {name: v[middle:] if name in by_rows else v for name, v in batch.items()}
        others = self(second, first_row=middle)
        return {name: value + others[name] for name, value in self(first).items()}


def _close(found: float, expected: float, scale: float) -> bool:
    """Whether both are equal up to rounding; NaN is found in the step."""
    return not abs(found - expected) > TOLERANCE * max(abs(scale), 1e-6)
