"""Compares named tensors that lie on several ranks with those of a whole model on rank 0.

Tensors travel one at a time, so that rank 0 never holds more than one of another stage.
"""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stageline.tables import format_table

StageTensors = Sequence[tuple[int, str, torch.Tensor | None]]  # (stage, name, value)
Expected = Mapping[str, torch.Tensor | None]
CHUNK = 1 << 22  # numbers that are compared at a time


@dataclass
class Comparison:
    """What comparisons of named tensors found.

    Attributes:
        num_compared: tensors that both sides have.
        largest: the greatest difference of two numbers; NaN counts as infinite.
        differences: a line for each name that is not as it should be.
    """

    num_compared: int = 0
    largest: float = 0.0
    differences: list[str] = field(default_factory=list)

    @property
    def figure(self) -> str:
        """How many were compared, and how far apart they are at most."""
        if not self.differences:
            how = "to the bit" if self.largest == 0 else f"within {self.largest:.1e}"
            return f"{self.num_compared} equal {how}"
        wrong = f"{len(self.differences)} wrong, {self.num_compared} compared"
        return f"{wrong}, at most {self.largest:.1e} apart"

    def judge(
        self, value: torch.Tensor | None, theirs: torch.Tensor | None, *, tolerance: float, at: str
    ) -> None:
        """Compares one tensor with that of the whole model; `at` begins the line about it."""
        if value is None and theirs is None:
            return
        if value is None:
            self.differences.append(f"{at}the whole model has one, this stage has none")
            return
        if theirs is None:
            self.differences.append(f"{at}this stage has one, the whole model has none")
            return
        self.num_compared += 1
        fits, largest = measure(value.detach(), theirs.detach(), tolerance=tolerance)
        self.largest = max(self.largest, largest)
        if value.shape != theirs.shape or value.dtype != theirs.dtype:
            self.differences.append(
                f"{at}{tuple(value.shape)} {value.dtype} here, {tuple(theirs.shape)} "
                f"{theirs.dtype} in the whole model"
            )
        elif not fits:
            self.differences.append(f"{at}{largest:.1e} apart")


def measure(ours: torch.Tensor, theirs: torch.Tensor, *, tolerance: float) -> tuple[bool, float]:
    """Whether two tensors agree, and the greatest difference of two of their numbers.

    NaN agrees with NaN: attention makes it in rows that are padding.

    Args:
        tolerance: absolute and relative; 0 asks for equal bits.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False, math.inf
    if torch.equal(ours, theirs):
        return True, 0.0
    largest, fits = 0.0, True
    pairs = zip(ours.flatten().split(CHUNK), theirs.flatten().split(CHUNK))
    for one, other in pairs:  # in pieces: an embedding in float64 would double the memory
        fit, apart = _measure_piece(one.double(), other.double(), tolerance)
        largest, fits = max(largest, apart), fits and fit
    return fits, largest


def _measure_piece(
    ours: torch.Tensor, theirs: torch.Tensor, tolerance: float
) -> tuple[bool, float]:
    both = ours.isnan() & theirs.isnan()
    gap = (ours - theirs).abs_().masked_fill_(both, 0.0)
    largest = gap.max().item()
    limits = theirs.abs().masked_fill_(both, 0.0).add_(1).mul_(tolerance)
    fits = largest == 0.0 or (tolerance > 0 and bool((gap <= limits).all()))
    return fits, largest if math.isfinite(largest) else math.inf


def numbers_agree(ours: float, theirs: float, *, tolerance: float) -> bool:
    """Whether two numbers agree; NaN agrees with nothing."""
    return abs(ours - theirs) <= tolerance * (1 + abs(theirs))


def compare_named(
    found: Comparison,
    own: StageTensors,
    expected: Expected | None,
    *,
    tolerance: float,
    group: dist.ProcessGroup | None = None,
    when: str = "",
) -> None:
    """Compares all ranks' tensors with the expected ones by name; every rank calls this.

    Args:
        found: on rank 0, what was found is added to it.
        own: of this rank's stages; None stands for a tensor that is not there, such as the
            gradient of a parameter that has none.
        expected: on rank 0, all names; elsewhere None.
        when: stands before what differs.
    """
    rank = dist.get_rank(group)
    facts: list[Any] = [None] * dist.get_world_size(group)
    mine = [
        (stage, name, None if value is None else (tuple(value.shape), value.dtype))
        for stage, name, value in own
    ]
    dist.all_gather_object(facts, mine, group=group)
    for holder, entries in enumerate(facts):
        for index, (stage, name, kind) in enumerate(entries):
            value = own[index][2] if holder == rank else None
            if kind is not None and holder > 0:
                value = _to_first(value, kind, holder=holder, rank=rank, group=group)
            if expected is not None:
                at = f"{name} (stage {stage}): {when}"
                found.judge(value, expected.get(name), tolerance=tolerance, at=at)
    listed = {name for entries in facts for _, name, _ in entries}
    for name, theirs in (expected or {}).items():
        if theirs is not None and name not in listed:
            found.differences.append(f"{name} (on no stage): {when}the whole model has it")


def _to_first(
    value: torch.Tensor | None,
    kind: tuple,
    *,
    holder: int,
    rank: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor | None:
    """Sends a tensor from its holder to rank 0; the tensor on rank 0."""
    if rank == holder:
        assert value is not None  # `kind` says so
        dist.send(value.detach().contiguous(), group=group, group_dst=0)
    elif rank == 0:
        buffer = torch.empty(kind[0], dtype=kind[1])
        dist.recv(buffer, group=group, group_src=holder)
        return buffer
    return None


MAX_DETAILS = 8  # names under one row of the table; the file has all of them


@dataclass(frozen=True)
class ComparedRow:
    """One thing that was checked.

    Attributes:
        passed: None where it could not be checked.
        details: of a failure, what exactly is wrong, one line each.
    """

    name: str
    passed: bool | None
    figure: str
    details: Sequence[str] = ()

    @property
    def result(self) -> str:
        return {True: "ok", False: "FAILED", None: "not checked"}[self.passed]


@dataclass
class Report:
    """What a check found: a table for the screen and a JSON file.

    Attributes:
        facts: what was compared with what.
        notes: what was cut, replaced or left out.
    """

    facts: dict[str, str] = field(default_factory=dict)
    rows: list[ComparedRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, passed: bool | None, figure: str, details: Sequence[str] = ()) -> None:
        """Adds a row."""
        self.rows.append(ComparedRow(name, passed, figure, tuple(details)))

    @property
    def passed(self) -> bool:
        """Whether something was checked and nothing failed."""
        return bool(self.rows) and all(row.passed is not False for row in self.rows)

    @property
    def verdict(self) -> str:
        failed = [row.name for row in self.rows if row.passed is False]
        if failed:
            return f"FAILED: {', '.join(failed)}"
        return "passed: the split computes what the whole model computes"

    def __str__(self) -> str:
        width = max((len(key) for key in self.facts), default=0)
        lines = [f"{key:<{width}}  {value}" for key, value in self.facts.items()]
        for note in self.notes:
            lines += textwrap.wrap(f"note: {note}", 96, subsequent_indent="      ")
        return "\n".join([*lines, "", *self._table(), "", self.verdict])

    def _table(self) -> list[str]:
        cells = [("check", "result", "figure")]
        cells += [(row.name, row.result, row.figure) for row in self.rows]
        lines = format_table(cells, num_texts=3).splitlines()
        table = [lines[0], "-" * max(map(len, lines))]
        for line, row in zip(lines[1:], self.rows):
            table.append(line)
            table += [f"    {detail}" for detail in row.details[:MAX_DETAILS]]
            if len(row.details) > MAX_DETAILS:
                table.append(f"    and {len(row.details) - MAX_DETAILS} more")
        return table

    def save(self, folder: str | Path) -> Path:
        """Writes check.json; returns its path."""
        path = Path(folder) / "check.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "passed": self.passed,
            "facts": self.facts,
            "notes": self.notes,
            "checks": [{**asdict(row), "result": row.result} for row in self.rows],
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return path
