"""Find common mistakes in a part before the first step: a mean loss, a signature, a shape.

Shapes: B rows, T tokens, V vocabulary.
"""

import functools
import re
from collections.abc import Callable, Mapping

import torch
from torch import nn

from stageline.contracts import IGNORE, broken, call, part_name, shown
from stageline.distributed.failure_record import raised_at
from stageline.errors import UserError
from stageline.modules.losses import without_reference
from stageline.seeds import host_state_kept, seed_host
from stageline.training.loss_part import LARGEST, LossPart, MicroBatch, innermost


def check_optimizer(
    optimizer: object, parameters: Mapping[str, nn.Parameter], *, part: object
) -> None:
    """Refuse what is not an optimizer over all of these named parameters."""
    refused = functools.partial(broken, "optimizer", part)
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        raise refused(
            f"returned {shown(optimizer)}",
            why="An optimizer object is required",
            cure="return torch.optim.AdamW(param_groups, ...), or another one with param_groups",
        )
    taken = {id(one) for group in groups for one in group["params"]}
    if missing := [name for name, one in parameters.items() if id(one) not in taken]:
        raise refused(
            f"leaves out {len(missing)} of {len(parameters)} parameters, {missing[0]} first",
            why="They would never be trained",
            cure="pass it all of param_groups, or freeze these parts (`frozen_llm` and the like)",
        )


def check_learning_rate(rate_of: object, *, part: object) -> None:
    """Refuse a schedule that is not a function of the step."""
    if not callable(rate_of):
        raise broken(
            "lr_scheduler",
            part,
            f"returned {shown(rate_of)}",
            why="Each step asks for its rate by number",
            cure="return lambda step: rate; torch's schedulers count by themselves",
        )


def check_sim_fn(sim_fn: Callable[..., torch.Tensor]) -> None:
    """Refuse what does not return one similarity for each pair of vectors."""
    vectors_NV = torch.arange(1.0, 25.0).view(3, 8).softmax(dim=-1)
    found = call("sim_fn", sim_fn, vectors_NV, vectors_NV.flip(0))
    if not (isinstance(found, torch.Tensor) and found.shape == (3,)):
        raise broken(
            "sim_fn",
            sim_fn,
            f"returned {shown(found)} for 3 pairs of vectors of 8 numbers",
            why="3 similarities are required",
            cure="reduce the last dimension only",
        )


MOST_LOGITS = 2**22  # numbers of the example: 16 MiB
COUNT = 1000.0  # value of each count, above any minimum that a loss clamps it to
TOLERANCE = 1e-3  # relative, of rounding in float32
# an error of this kind may not happen on the device of the run
_ELSEWHERE = re.compile("gpu|cuda|device|driver|not implemented|process group", re.IGNORECASE)


def check_loss(part: LossPart, batch: MicroBatch, *, vocab_size: int) -> str | None:
    """Try a loss_fn part on random logits on the CPU: its result, and how it adds up.

    Micro-batch losses are divided by the counts of the whole step and summed. A mean over a
    micro-batch trains another loss: it does not halve where counts double, nor add up over rows.

    Args:
        batch: a micro-batch of two samples or groups, as a collate part makes it.
        vocab_size: numbers that the model gives for each token.

    Returns:
        Why it could not be tried (it may need a GPU, other scores, a package); None: it was.

    Raises:
        ContractError: with part, file and line.
    """
    refused = functools.partial(broken, "loss_fn", innermost(part.loss_fn))
    # random logits for a part of the tokens, few enough to be cheap
    width = vocab_size if part.predicts_tokens else 1
    num_rows, num_tokens = batch["labels"].shape
    most = min(num_tokens, max(2, MOST_LOGITS // (width * num_rows)))
    learnt = (batch["labels"] != IGNORE).any(dim=0).nonzero().flatten().tolist()
    start = max(0, min(learnt[0] - 1 if learnt else 0, num_tokens - most))
    generator = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn((num_rows, most, width), generator=generator).requires_grad_()
    shape = batch["input_ids"].shape
    example = {
        name: value[:, start : start + most] if value.shape[:2] == shape else value
        for name, value in batch.items()
    }

    def value_of(
        seen: MicroBatch, *, count: float = COUNT, rows: slice = slice(None)
    ) -> dict[str, float]:
        """Return loss and figures of some rows."""
        own = {n: v[rows] if v.shape[:1] == (num_rows,) else v for n, v in seen.items()}
        own = without_reference({**own, "loss_rows": torch.arange(num_rows)[rows]})
        totals = {name: torch.tensor(count) for name in part.counts}
        with host_state_kept():
            seed_host(0)  # a part that draws draws the same each time
            # a clone is not a leaf, like a model's logits: the part may write into it
            loss, figures = part(logits_BTV[rows].clone(), own, totals=totals, step=0)
        return {name: float(value.detach()) for name, value in {"loss": loss, **figures}.items()}

    try:
        found = value_of(example)
        if part.predicts_tokens:
            first = torch.arange(example["labels"].shape[1]) == 0
            one, other = (
                value_of({**example, "labels": example["labels"].masked_fill(first, label)})["loss"]
                for label in (0, 1)
            )
            if abs(one - other) > 0:
                raise refused(
                    "changes with the label of the first token",
                    why="Logits of token t predict label t + 1",
                    cure="compare logits[:, :-1] with labels[:, 1:], or register it with "
                    "predicts_tokens=False if it takes something else",
                )
        if part.weighs_by_itself:
            return None
        doubled, halves = value_of(example, count=2 * COUNT), [found]
        # rows that have more than tokens (pairs, a reference) cannot be taken apart
        if num_rows % 2 == 0 and not any(name.startswith("loss_") for name in batch):
            middle = num_rows // 2
            halves = [value_of(example, rows=rows) for rows in (slice(middle), slice(middle, None))]
        for name, value in found.items():
            if name.endswith(LARGEST):  # neither a share nor a sum
                continue
            added = sum(half[name] for half in halves)
            if abs(doubled[name] - value / 2) > TOLERANCE * max(abs(value), 1e-6):
                came = f"with {', '.join(part.counts)} {COUNT:.0f}, and {doubled[name]:.6g}"
                came += f" with {2 * COUNT:.0f}"
                why = "Half of it was expected, because the counts are those of the whole step"
            elif abs(added - value) > TOLERANCE * max(abs(value), 1e-6):
                came = f"for {num_rows} rows, and {added:.6g} for two halves of them added up"
                why = "The same was expected, because micro-batches of a step are added up"
            else:
                continue
            what = "the loss" if name == "loss" else f"the figure {name!r}"
            raise refused(
                f"gave {what} {value:.6g} {came}",
                why=why,
                cure="sum over rows and tokens and divide once, by "
                f"{' or '.join(part.counts)}; or register it with weighs_by_itself=True, if it is "
                "meant to depend on how rows fall into micro-batches",
            )
    except UserError:
        raise
    except Exception as error:
        key = error.args[0] if isinstance(error, KeyError) and error.args else None
        # loss_... keys of the reference model come with the run
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
