"""Schedules by name: the stages of each rank, and the order in which each rank works.

The orders of the built-in schedules come from torch.distributed.pipelining; a CSV file gives any
other. Loads no model, moves no tensor.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import get_schedule_class

from stageline.errors import UserError
from stageline.pipeline.plan import Action, Kind, parse_action

Orders = list[list[Action]]  # the actions of each rank, in order
_TRANSFER = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class ScheduleKind:
    """Properties of a schedule, the same in all its runs.

    Attributes:
        warm_up: with one stage a rank: (ranks, rank, micro-batches) -> the forward passes before
            the first backward pass; a backward and a forward pass in turn come behind them. None:
            the order is that of torch's class.
        least: (ranks, stages) -> the fewest micro-batches it runs.
    """

    torch_name: str | None = None  # its name in torch; None: torch has none like it
    warm_up: Callable[[int, int, int], int] | None = None
    is_multi: bool = False  # a rank holds several stages
    is_v: bool = False  # rank r of p holds stages r and 2p - 1 - r; the last stage is on rank 0
    splits_backward: bool = False  # gradients of inputs and of weights are computed apart
    least: Callable[[int, int], int] = lambda num_ranks, num_stages: 1
    has_rounds: bool = False  # they must fall into max(1, micro-batches // ranks) equal rounds


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind("GPipe", warm_up=lambda num_ranks, rank, count: count),
    # torch's list for 1F1B is made for pictures: its last rank counts from micro-batch 1
    "1f1b": ScheduleKind(
        "1F1B",
        warm_up=lambda num_ranks, rank, count: num_ranks - rank,
        least=lambda num_ranks, num_stages: num_ranks,
    ),
    # one more in flight for each border behind a stage: transfers there and back have a pass's time
    "eager_1f1b": ScheduleKind(warm_up=lambda num_ranks, rank, count: 2 * (num_ranks - rank) - 1),
    "looped_bfs": ScheduleKind("LoopedBFS", is_multi=True),
    "interleaved_1f1b": ScheduleKind("Interleaved1F1B", is_multi=True, has_rounds=True),
    "interleaved_zero_bubble": ScheduleKind(
        "InterleavedZeroBubble", is_multi=True, splits_backward=True, has_rounds=True
    ),
    "zbv": ScheduleKind("ZBVZeroBubble", is_multi=True, is_v=True, splits_backward=True),
    "dualpipev": ScheduleKind(
        "DualPipeV",
        is_multi=True,
        is_v=True,
        splits_backward=True,
        least=lambda num_ranks, num_stages: num_stages,
    ),
}


@dataclass(frozen=True)
class Schedule:
    """A schedule for given numbers of ranks and stages."""

    name: str
    rank_of_stage: tuple[int, ...]
    kind: ScheduleKind
    written: Orders | None = field(default=None, repr=False, hash=False)  # the file has them

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of_stage) + 1

    @property
    def last_stage_rank(self) -> int:
        return self.rank_of_stage[-1]

    @property
    def splits_backward(self) -> bool:
        return self.kind.splits_backward

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(from, to) ranks of all transfers, of activations and of gradients."""
        borders = [pair for pair in pairwise(self.rank_of_stage) if pair[0] != pair[1]]
        return sorted({*borders, *((there, here) for here, there in borders)})

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank]

    def legal_micro_batches(self, count: int) -> int:
        """The least number of micro-batches, `count` or more, that this schedule runs."""
        if self.written is not None:
            return 1 + max(action.micro_batch for order in self.written for action in order)
        count = max(count, self.kind.least(self.num_ranks, self.num_stages))
        if self.kind.has_rounds:
            while count % max(1, count // self.num_ranks):
                count += 1
        return count

    def check(
        self, num_micro_batches: int, *, micro_batch_size: int = 1, accumulate_steps: int = 1
    ) -> None:
        """Refuse a number of micro-batches that this schedule cannot run.

        The error gives the next batch size that can, by the micro-batch size and the accumulation.
        """
        count = num_micro_batches
        legal = self.legal_micro_batches(count)
        if legal == count:
            return
        least, rounds = self.kind.least(self.num_ranks, self.num_stages), count // self.num_ranks
        reason = f"they must fall into {rounds} equal rounds over {self.num_ranks} ranks"
        if self.written is not None:
            reason = f"it runs {legal} and no other number"
        elif count < least:
            what = "ranks" if least == self.num_ranks else "stages"
            reason = f"it needs one for each of its {least} {what} at least"
        per_batch = accumulate_steps / micro_batch_size
        batch_size = micro_batch_size * -(-legal // accumulate_steps)
        while self.written is None and (made := round(batch_size * per_batch)) != (
            self.legal_micro_batches(made)
        ):
            batch_size += micro_batch_size
        raise UserError(
            f"{count} micro-batches (`batch_size` x `accumulate_steps` / `micro_batch_size`) can't "
            f"fill `schedule` {self.name} on {self.num_ranks} ranks with {self.num_stages} stages: "
            f"{reason}. Set `batch_size` to {batch_size}, which makes "
            f"{round(batch_size * per_batch)}, or choose `schedule` gpipe."
        )

    def orders(self, num_micro_batches: int) -> Orders:
        """Return what each rank does in a step; raises as `check` does."""
        self.check(num_micro_batches)
        if self.written is not None:
            return [list(order) for order in self.written]
        if self.kind.warm_up is not None:
            made: Orders = []
            for rank in range(self.num_ranks):
                # the warm-up, then a backward and a forward pass in turn
                warm_up = self.kind.warm_up(self.num_ranks, rank, num_micro_batches)
                forwards = [Action(rank, Kind.FORWARD, i) for i in range(num_micro_batches)]
                made.append(forwards[:warm_up])
                for index in range(num_micro_batches):
                    made[-1].append(Action(rank, Kind.BACKWARD, index))
                    made[-1] += forwards[warm_up + index : warm_up + index + 1]
            return made
        assert self.kind.torch_name is not None
        per_rank = self.num_stages // self.num_ranks
        orders = _torch_orders(self.kind.torch_name, self.num_ranks, per_rank, num_micro_batches)
        return [list(order) for order in orders]


def make_schedule(name: str, *, num_ranks: int, stages_per_rank: int | None = None) -> Schedule:
    """Look a schedule up, a key of `SCHEDULES`, or read it from a CSV file.

    Args:
        stages_per_rank: None takes 1, or 2 for the schedules that need several.
    """
    if name.endswith(".csv"):
        return read_schedule(name, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    kind = SCHEDULES.get(name)
    if kind is None:
        raise UserError(
            f"`schedule` {name} is unknown. Choose {', '.join(SCHEDULES)}, or the path of a "
            ".csv file with a row of actions (0F0, 0B0, ...) for each rank."
        )
    stages_per_rank = stages_per_rank or default_stages_per_rank(name)
    least, most = (2, 2 if kind.is_v else None) if kind.is_multi else (1, 1)
    if stages_per_rank < least or (most and stages_per_rank > most):
        raise UserError(
            f"`schedule` {name} has {f'exactly {most}' if most else '2 or more'} stages on each "
            f"rank, not `stages_per_rank` {stages_per_rank}. Change one of them."
        )
    placement = [stage % num_ranks for stage in range(num_ranks * stages_per_rank)]
    if kind.is_v:
        placement = [*range(num_ranks), *reversed(range(num_ranks))]
    return Schedule(name, tuple(placement), kind)


def default_stages_per_rank(name: str) -> int:
    """Return how many stages a rank holds unless the user says so."""
    kind = SCHEDULES.get(name)
    return 2 if kind is not None and kind.is_multi else 1


def read_schedule(
    name: str, *, num_ranks: int | None = None, stages_per_rank: int | None = None
) -> Schedule:
    """Read a schedule of the user's own: a row for each rank, a cell for each action.

    Cells are spelled as torch spells them: `0F0`, `1B0`, `1I2`, `1W2`, `(0F3;3B1)OVERLAP_F_B`.
    Empty cells, and the transfers that torch writes into a file, are passed over.

    Args:
        num_ranks, stages_per_rank: of the run; None: as the file has it.

    Raises:
        UserError: with file and row.
    """
    path = Path(name)
    if not path.is_file():
        raise UserError(f"`schedule` {path}: there is no such file. Give the path of a CSV file.")
    with path.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.reader(lines) if any(cell.strip() for cell in row)]
    # the actions of each rank, and the rank of each stage
    orders: Orders = []
    holders: dict[int, int] = {}
    for rank, row in enumerate(rows):
        orders.append([])
        for cell in map(str.strip, row):
            pair = _PAIR.fullmatch(cell)
            for text in pair[1].split(";") if pair else [cell]:
                action = parse_action(text)
                if action is not None:
                    orders[-1].append(action)
                    if (other := holders.setdefault(action.stage, rank)) != rank:
                        raise UserError(
                            f"{path}: stage {action.stage} stands in rows {other + 1} and "
                            f"{rank + 1}. Move its actions into one row."
                        )
                elif text and not _TRANSFER.fullmatch(text):
                    raise UserError(
                        f"{path}, row {rank + 1}: {text!r} is not an action. Write stage, F, B, I "
                        "or W, and micro-batch, such as 0F0."
                    )
    if missing := set(range(max(holders, default=0) + 1)) - set(holders):
        raise UserError(f"{path} has no action of stage {min(missing)}. Add its passes.")
    counts = Counter(action for order in orders for action in order)
    kind = ScheduleKind(splits_backward=any(a.kind == Kind.WEIGHT_GRAD for a in counts))
    schedule = Schedule(name, tuple(holders[stage] for stage in sorted(holders)), kind, orders)
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.legal_micro_batches(1)):
            found = "".join(kind.value * counts[Action(stage, kind, micro_batch)] for kind in Kind)
            if found not in ("FB", "FIW"):
                raise UserError(
                    f"{path}: stage {stage} does {found or 'nothing'} with micro-batch "
                    f"{micro_batch}. Give F and B, or F, I and W, once each."
                )
    is_other = stages_per_rank and stages_per_rank * len(orders) != schedule.num_stages
    if num_ranks not in (None, len(orders)) or is_other:
        raise UserError(
            f"`schedule` {name} has {schedule.num_stages} stages and rows for {len(orders)} ranks, "
            f"the run has {num_ranks or len(orders)} ranks and `stages_per_rank` "
            f"{stages_per_rank}. Change these options or the file."
        )
    return schedule


@cache
def _torch_orders(
    torch_name: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the compute actions of torch's schedule class, pairs of overlapped ones in a row."""
    # all that a schedule asks its stages before it runs
    stage: Any = SimpleNamespace(
        num_stages=num_ranks * stages_per_rank, group_size=num_ranks, group_rank=0, submod=None
    )
    made: Any = get_schedule_class(torch_name)([stage] * stages_per_rank, num_micro_batches)
    orders = []
    for rank in range(num_ranks):
        actions = made.pipeline_order[rank]
        flat = [part for one in actions for part in getattr(one, "sub_actions", None) or (one,)]
        # others are reductions of gradients, which the training step does
        orders.append(tuple(action for part in flat if (action := parse_action(str(part)))))
    return tuple(orders)
