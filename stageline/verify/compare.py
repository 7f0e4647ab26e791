"""Compares named tensors of stages on several ranks with those of a whole model on rank 0.

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
CHUNK = 1 << 22  # numbers that are compared at a time: an embedding in float64 is twice as large
MAX_DETAILS = 8  # names under one row of the table; the file has all of them


@dataclass
class Comparison:
    """The result of comparing named tensors.

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
        """Number of compared tensors, and their greatest difference."""
        if not self.differences:
            how = "to the bit" if self.largest == 0 else f"within {self.largest:.1e}"
            return f"{self.num_compared} equal {how}"
        wrong = f"{len(self.differences)} wrong, {self.num_compared} compared"
        return f"{wrong}, at most {self.largest:.1e} apart"

    def judge(
        self, value: torch.Tensor | None, theirs: torch.Tensor | None, *, tolerance: float, at: str
    ) -> None:
        """Compares one tensor with that of the whole model; `at` begins the line about it."""
        if value is None or theirs is None:
            if value is not None:
                self.differences.append(f"{at}this stage has one, the whole model has none")
            elif theirs is not None:
                self.differences.append(f"{at}the whole model has one, this stage has none")
            return
        self.num_compared += 1
        if value.shape != theirs.shape or value.dtype != theirs.dtype:
            self.largest = math.inf
            self.differences.append(
                f"{at}{tuple(value.shape)} {value.dtype} here, {tuple(theirs.shape)} "
                f"{theirs.dtype} in the whole model"
            )
            return
        fits, apart = measure(value.detach(), theirs.detach(), tolerance=tolerance)
        self.largest = max(self.largest, apart)
        if not fits:
            self.differences.append(f"{at}{apart:.1e} apart")


def measure(ours: torch.Tensor, theirs: torch.Tensor, *, tolerance: float) -> tuple[bool, float]:
    """Whether two tensors of one shape agree, and the greatest difference of two of their numbers.

    NaN agrees with NaN: attention makes it in rows that are padding.

    Args:
        tolerance: absolute and relative; 0 asks for equal bits.
    """
    if torch.equal(ours, theirs):
        return True, 0.0
    largest, fits = 0.0, True
    for one, other in zip(ours.flatten().split(CHUNK), theirs.flatten().split(CHUNK)):
        one, other = one.double(), other.double()
        both = one.isnan() & other.isnan()
        gap = (one - other).abs_().masked_fill_(both, 0.0)
        apart = gap.max().item()
        limits = other.abs().masked_fill_(both, 0.0).add_(1).mul_(tolerance)
        fits &= apart == 0.0 or (tolerance > 0 and bool((gap <= limits).all()))
        largest = max(largest, apart if math.isfinite(apart) else math.inf)
    return fits, largest


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
        (stage, name, None if value is None else (value.shape, value.dtype))
        for stage, name, value in own
    ]
    dist.all_gather_object(facts, mine, group=group)
    for holder, entries in enumerate(facts):
        for index, (stage, name, kind) in enumerate(entries):
            value = own[index][2] if holder == rank else None
            if holder > 0 and value is not None:
                dist.send(value.detach().contiguous(), group=group, group_dst=0)
            elif holder > 0 and rank == 0 and kind is not None:
                value = torch.empty(kind[0], dtype=kind[1])
                dist.recv(value, group=group, group_src=holder)
            if expected is not None:
                at = f"{name} (stage {stage}): {when}"
                found.judge(value, expected.get(name), tolerance=tolerance, at=at)
    listed = {name for entries in facts for _, name, _ in entries}
    for name, theirs in (expected or {}).items():
        if theirs is not None and name not in listed:
            found.differences.append(f"{name} (on no stage): {when}the whole model has it")


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
    """The findings of a check: a table for the screen and a JSON file.

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

    def __str__(self) -> str:
        width = max((len(key) for key in self.facts), default=0)
        lines = [f"{key:<{width}}  {value}" for key, value in self.facts.items()]
        for note in self.notes:
            lines += textwrap.wrap(f"note: {note}", 96, subsequent_indent="      ")
        cells = [("check", "result", "figure")]
        cells += [(row.name, row.result, row.figure) for row in self.rows]
        head, *body = format_table(cells, num_texts=3).splitlines()
        lines += ["", head, "-" * max(map(len, (head, *body)))]
        for line, row in zip(body, self.rows):
            lines += [line, *(f"    {detail}" for detail in row.details[:MAX_DETAILS])]
            if len(row.details) > MAX_DETAILS:
                lines.append(f"    and {len(row.details) - MAX_DETAILS} more")
        failed = [row.name for row in self.rows if row.passed is False]
        verdict = "passed: the split computes what the whole model computes"
        return "\n".join([*lines, "", f"FAILED: {', '.join(failed)}" if failed else verdict])

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
