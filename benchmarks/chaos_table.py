"""Runs the fault tests and writes what survived: a line a case, with date, machine and command.

python benchmarks/chaos_table.py --output benchmarks/chaos.md [tests/chaos/test_g_data.py ...]

A case's id (a01 ... j21) stands in the name of a test or of its parameter; what is tried is the
first line of the test's docstring, or else its name in words.
"""

import argparse
import ast
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASE = re.compile(r"(?<![a-z0-9])([a-j]\d\d)(?![0-9])")
GROUPS = {
    "a": "Worker faults", "b": "Preemption", "c": "Saving", "d": "Loading", "e": "Going on",
    "f": "Numbers", "g": "Data", "h": "Configuration", "i": "Model files", "j": "Chat API",
}  # fmt: skip
# what these would try does not exist in this project, or not yet
LEFT_OUT = {
    "g13": "preprocessed token files", "g16": "preprocessed token files",
    "g29": "preprocessing", "g30": "preprocessing",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One test that ran: the cases that it names, what it tries, how it ended."""

    cases: tuple[str, ...]
    tries: str
    result: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["tests/chaos"])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "chaos.md")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *options.tests, f"--junitxml={report}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        outcomes = read_outcomes(report)
    seconds = time.monotonic() - started
    options.output.write_text(write_table(outcomes, options.tests, seconds), encoding="utf-8")
    print(f"wrote {options.output}")
    return code


def read_outcomes(report: Path) -> list[Outcome]:
    """The tests of pytest's report."""
    known = descriptions()
    outcomes = []
    for item in ElementTree.parse(report).iter("testcase"):
        name = item.get("name", "")
        kinds = {child.tag for child in item}
        result = next(
            (word for tag, word in
             (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")) if tag in kinds),
            "survived",
        )  # fmt: skip
        function = name.partition("[")[0]
        file = item.get("classname", "").rpartition(".")[2]
        cases = tuple(dict.fromkeys(CASE.findall(name.replace("_", " "))))
        tries = known.get((file, function), function) + _variant(name, cases)
        outcomes.append(Outcome(cases, tries, result))
    return outcomes


def _variant(name: str, cases: tuple[str, ...]) -> str:
    """What a parameter that names the case adds, in words."""
    parameter = name.partition("[")[2].rstrip("]").replace("_", " ")
    if not cases or not CASE.search(parameter):
        return ""
    words = " ".join(CASE.sub("", parameter).split())
    return f" [{words}]" if words else ""


def descriptions() -> dict[tuple[str, str], str]:
    """(file, test) -> first line of the docstring, or the name in words."""
    found = {}
    for path in (ROOT / "tests" / "chaos").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = (ast.get_docstring(node) or "").partition("\n")[0]
                words = CASE.sub("", node.name.removeprefix("test_").replace("_", " "))
                found[path.stem, node.name] = text or " ".join(words.split())
    return found


def write_table(outcomes: list[Outcome], tests: list[str], seconds: float) -> str:
    """The Markdown of all cases, by group."""
    by_case: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        for case in outcome.cases:
            by_case[case].append(outcome)
    good = sum(_result(found)[0] == "survived" for found in by_case.values())
    lines = [
        "# Faults, one after the other",
        "",
        f"{good} of {len(by_case)} cases survived, {len(outcomes)} tests in {seconds:.0f} s. "
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}.",
        "",
        f"`python benchmarks/chaos_table.py {' '.join(tests)}`",
    ]
    for letter, title in GROUPS.items():
        cases = sorted(case for case in {*by_case, *LEFT_OUT} if case.startswith(letter))
        if any(case in by_case for case in cases):
            lines += ["", f"## {letter.upper()}. {title}", "", "| case | what is tried | |"]
            lines += ["|---|---|---|", *(_line(case, by_case.get(case)) for case in cases)]
    return "\n".join(lines) + "\n"


def _line(case: str, found: list[Outcome] | None) -> str:
    name = f"{case[0].upper()}{int(case[1:])}"
    if not found:
        return f"| {name} | {LEFT_OUT[case]}: not in this project | left out |"
    variants: dict[str, list[str]] = {}
    for item in found:
        text, _, variant = item.tries.partition(" [")
        variants.setdefault(text.rstrip("."), []).append(variant.rstrip("]"))
    tries = " ".join(
        text + (f" ({', '.join(words)})." if any(words) else ".")
        for text, words in ((text, list(filter(None, w))) for text, w in variants.items())
    )
    result, count = _result(found)
    return f"| {name} | {tries.replace('|', '/')} | {result}, {count} |"


def _result(found: list[Outcome]) -> tuple[str, str]:
    results = [item.result for item in found]
    worst = next((word for word in ("failed", "survived") if word in results), "skipped")
    return worst, f"{results.count(worst)} of {len(results)} tests"


if __name__ == "__main__":
    sys.exit(main())
