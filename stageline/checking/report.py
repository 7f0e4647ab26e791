"""What a check found: a table for the screen and a JSON file. Compares nothing itself."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

MAX_DETAILS = 8  # names under one row of the table; the file has all of them
FILE = "check.json"


@dataclass(frozen=True)
class Row:
    """One thing that was checked.

    Attributes:
        passed: None where it could not be checked.
        figure: what was counted or measured.
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
    """The rows of a check, in the order they came.

    Attributes:
        facts: what was compared with what.
        notes: what was cut, replaced or left out.
    """

    facts: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, passed: bool | None, figure: str, details: Sequence[str] = ()) -> None:
        """Adds a row."""
        self.rows.append(Row(name, passed, figure, tuple(details)))

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
        lines += _wrapped(f"note: {note}" for note in self.notes)
        return "\n".join([*lines, "", *self._table(), "", self.verdict])

    def _table(self) -> list[str]:
        cells = [("check", "result", "figure")]
        cells += [(row.name, row.result, row.figure) for row in self.rows]
        first, second = (max(len(row[column]) for row in cells) for column in (0, 1))
        lines = [f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in cells]
        table = [lines[0], "-" * max(map(len, lines))]
        for line, row in zip(lines[1:], self.rows):
            table.append(line)
            table += [f"    {detail}" for detail in row.details[:MAX_DETAILS]]
            if len(row.details) > MAX_DETAILS:
                table.append(f"    and {len(row.details) - MAX_DETAILS} more")
        return table

    def save(self, folder: str | Path) -> Path:
        """Writes check.json; returns its path."""
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "passed": self.passed,
            "facts": self.facts,
            "notes": self.notes,
            "checks": [{**asdict(row), "result": row.result} for row in self.rows],
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return path


def _wrapped(notes: Iterable[str]) -> list[str]:
    return [line for note in notes for line in textwrap.wrap(note, 96, subsequent_indent="      ")]
