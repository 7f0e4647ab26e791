"""Enter a run of `scripts/test_versions.sh` into the table of versions, benchmarks/versions.md.

    python benchmarks/versions.py REPORT.xml    # in the environment that was tried

The row of the same Python, torch and transformers is replaced.
"""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "versions.md"
HEAD = """# Versions of Python, torch and transformers that were tried

`bash scripts/test_versions.sh [torch==X] [transformers==Y]` runs the suites of splits, recompute,
LoRA, decoding, packing, streaming, checkpoints and parity in an environment of these versions and
enters its row here. CPU, {cores} cores.

| Python | torch | transformers | passed | skipped | failed | minutes | date | commit |
|---|---|---|---|---|---|---|---|---|
"""


def read_report(path: Path) -> tuple[Counter, float, list[str]]:
    """Return (tests by outcome, seconds, names of failed tests) of a JUnit report."""
    counts: Counter = Counter()
    failed = []
    suite = ElementTree.parse(path).getroot().find("testsuite")
    for case in suite.iter("testcase"):
        kinds = {child.tag for child in case}
        bad = bool(kinds & {"failure", "error"})
        counts["failed" if bad else "skipped" if "skipped" in kinds else "passed"] += 1
        if bad:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, float(suite.get("time")), failed


def main() -> None:
    counts, seconds, failed = read_report(Path(sys.argv[1]))
    versions = [platform.python_version()]
    versions += [
        importlib.metadata.version(name).split("+")[0] for name in ("torch", "transformers")
    ]
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
    key = f"| {' | '.join(versions)} |"
    row = (
        f"{key} {counts['passed']} | {counts['skipped']} | {counts['failed']} | "
        f"{seconds / 60:.1f} | {datetime.date.today()} | {commit} |"
    )
    old = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    rows = [line for line in old if re.match(r"\| \d", line) and not line.startswith(key)]
    rest = old[max((n for n, line in enumerate(old) if line.startswith("|")), default=-1) + 1 :]
    text = HEAD.format(cores=os.cpu_count()) + "\n".join([*sorted([*rows, row]), *rest]) + "\n"
    PAGE.write_text(text, encoding="utf-8")
    print(row, *failed, sep="\n")


if __name__ == "__main__":
    main()
