"""Reads a schedule of the user's own: a CSV file with a row for each rank, a cell for each action.

Cells are spelled as torch spells them: `0F0`, `1B0`, `1I2`, `1W2`, `(0F3;3B1)OVERLAP_F_B`; empty
cells are waits and mean nothing. Transfers between ranks follow from the actions and are left out;
where a file of torch's has them, they are passed over.
"""

import csv
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from stageline.errors import UserError
from stageline.pipeline.actions import Action, Kind, parse_action

_TRANSFER = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class ScheduleFile:
    """A schedule that came from a file.

    Attributes:
        orders: what each rank does, in order.
        rank_of_stage: follows from the rows that a stage stands in.
    """

    orders: tuple[tuple[Action, ...], ...]
    rank_of_stage: tuple[int, ...]
    num_micro_batches: int
    splits_backward: bool


def read_schedule_file(path: Path) -> ScheduleFile:
    """Reads and checks a schedule.

    Raises:
        UserError: with file and row; a pass that is missing, twice there, on two ranks, or that
            waits for one behind it.
    """
    if not path.is_file():
        raise UserError(f"--schedule {path}: there is no such file. A CSV file was expected.")
    with path.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.reader(lines) if any(cell.strip() for cell in row)]
    orders = [_read_row(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]
    if not any(orders):
        raise UserError(f"--schedule {path} holds no action: expected cells such as 0F0, 0B0.")
    rank_of_stage = _find_ranks(orders, path)
    num_micro_batches = 1 + max(action.micro_batch for order in orders for action in order)
    _check_complete(orders, path, len(rank_of_stage), num_micro_batches)
    return ScheduleFile(
        orders=tuple(tuple(order) for order in orders),
        rank_of_stage=rank_of_stage,
        num_micro_batches=num_micro_batches,
        splits_backward=any(a.kind == Kind.WEIGHT_GRAD for order in orders for a in order),
    )


def _read_row(row: list[str], where: str) -> list[Action]:
    cells: list[str] = []
    for cell in row:
        pair = _PAIR.fullmatch(cell.strip())
        cells += pair[1].split(";") if pair else [cell.strip()]
    actions = []
    for cell in cells:
        action = parse_action(cell)
        if action is not None:
            actions.append(action)
        elif cell and not _TRANSFER.fullmatch(cell):
            raise UserError(
                f"{where}: {cell!r} is no action. Expected stage, F, B, I or W, and micro-batch, "
                "such as 0F0 for the forward pass of micro-batch 0 through stage 0."
            )
    return actions


def _find_ranks(orders: list[list[Action]], path: Path) -> tuple[int, ...]:
    rank_of_stage: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if rank_of_stage.setdefault(action.stage, rank) != rank:
                raise UserError(
                    f"{path}: stage {action.stage} stands in rows {rank_of_stage[action.stage] + 1}"
                    f" and {rank + 1}: each stage lies on one rank. Move its actions into one row."
                )
    missing = set(range(max(rank_of_stage) + 1)) - set(rank_of_stage)
    if missing:
        raise UserError(f"{path}: no action of stage {min(missing)} stands in it: add its passes.")
    return tuple(rank_of_stage[stage] for stage in sorted(rank_of_stage))


def _check_complete(
    orders: list[list[Action]], path: Path, num_stages: int, num_micro_batches: int
) -> None:
    """Every stage passes every micro-batch forward once, and backward once or in its two halves."""
    counts = Counter(action for order in orders for action in order)
    for stage in range(num_stages):
        for micro_batch in range(num_micro_batches):
            found = "".join(kind.value * counts[Action(stage, kind, micro_batch)] for kind in Kind)
            if found not in ("FB", "FIW"):
                raise UserError(
                    f"{path}: stage {stage} does {found or 'nothing'} with micro-batch "
                    f"{micro_batch}. Expected F and B, or F, I and W, once each."
                )
