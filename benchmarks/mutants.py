"""Breaks one line of the code at a time, and asks whether the tests named for it notice.

`mutants.yaml` lists, for each file, lines as they are, as a slip would have them, and the tests
that must fail. All runs on a copy of this checkout, outside of it. Tests run in forks of
this process, which has imported torch but nothing of ours.

    python benchmarks/mutants.py [--only lora] [--jobs 1] [--seconds 120] [--output FILE.md]

Exit code 1: a mutant survived, does not apply, or its tests fail without it.
"""

import argparse
import contextlib
import datetime
import gc
import importlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".yaml")
HEAVY = (  # what our code and tests import of others
    "torch.distributed.pipelining",
    "transformers.models.llama.modeling_llama",
    "peft",
    "datasets",
    "matplotlib.pyplot",
    "jsonargparse",
    "hypothesis",
    "fastapi",
    "uvicorn",
    "openai",
    "httpx",
    "prometheus_client",
    "llguidance",
)
Result = tuple["Mutant", str, float, str]  # with fate, seconds, what is to be told
KILLED, SURVIVED, STALE, BROKEN = "killed", "survived", "does not apply", "tests fail without it"


@dataclass(frozen=True)
class Mutant:
    """A line with a fault.

    Attributes:
        before, after: a part of one line that is in the file once, with as much of the next
            as tells it apart, and what stands in its place.
        tests: the files or tests, as pytest names them, of which one must fail.
    """

    number: int
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def text(self, source: str) -> str | None:
        """The file with the fault; None where the line is not in it exactly once."""
        if source.count(self.before) != 1:
            return None
        return source.replace(self.before, self.after)


def read_list(path: Path = LIST) -> list[Mutant]:
    """All mutants, in the order of the list."""
    found: list[Mutant] = []
    for part in yaml.safe_load(path.read_text()):
        for before, after, *tests in part["mutants"]:
            names = _test_names(tests or [part["tests"]])
            found.append(Mutant(len(found) + 1, part["file"], before, after, names))
    return found


def _test_names(words: list[str]) -> tuple[str, ...]:
    """`unit/test_lora.py::test_a` stands for a test below `tests/`; a text may hold several."""
    return tuple(f"tests/{name}" for word in words for name in word.split())


def copy_checkout(folder: Path) -> None:
    """The files of git and those not yet in it, and a link to the environment."""
    listing = ["git", "-C", ROOT, "ls-files", "-z", "-co", "--exclude-standard"]
    for name in subprocess.check_output(listing, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")


@contextlib.contextmanager
def mutated(folder: Path, mutant: Mutant) -> Iterator[bool]:
    """While open, the copy has the fault; yields whether the line was there.

    Python knows its compiled files by size and time, so the file gets a time of its own.
    """
    path = folder / mutant.file
    source = path.read_text() if path.is_file() else ""
    text = mutant.text(source)
    if text is None:
        yield False
        return
    kept = path.stat()
    path.write_text(text)
    os.utime(path, (mutant.number, mutant.number))
    try:
        yield True
    finally:
        path.write_text(source)
        os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))


def run_tests(folder: Path, tests: tuple[str, ...], *, seconds: float) -> tuple[int | None, str]:
    """pytest's exit code, None where it ran too long, and the end of what it told."""
    told = folder.with_suffix(".txt")
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _become_pytest(folder, tests, told)
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what a test has left behind, too
    if not ended:
        os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    return code, told.read_text(errors="replace")[-2000:]


def _become_pytest(folder: Path, tests: tuple[str, ...], told: Path) -> None:
    code = 99
    try:
        os.setsid()
        with told.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        ours = {str(ROOT), str(ROOT / "benchmarks")}
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in ours)]
        sys.argv[1:] = []
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = pytest.main([*options, "--rootdir", str(folder), "-c", "pyproject.toml", *tests])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def judge(folder: Path, mutant: Mutant, *, usual: float | None) -> tuple[str, float, str]:
    """What became of a mutant, the seconds of its tests, and what is to be told.

    Args:
        usual: seconds of its tests on the code as it is; None: they fail there.
    """
    if usual is None:
        return BROKEN, 0.0, ", ".join(mutant.tests)
    started = time.monotonic()
    with mutated(folder, mutant) as is_there:
        if not is_there:
            return STALE, 0.0, f"{mutant.before!r} is not in {mutant.file} exactly once"
        code, told = run_tests(folder, mutant.tests, seconds=3 * usual + 20)
    took = time.monotonic() - started
    if code in (None, 1):
        return KILLED, took, "" if code else f"ran too long: {usual:.0f} s were usual"
    if code == 0:
        return SURVIVED, took, ""
    return STALE, took, f"pytest ended with {code}: {told[-300:]}"


class UsualTimes:
    """Seconds of tests on the code as it is, each set of them run once; None: one fails."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known: dict[tuple[str, ...], float | None] = {}
        self._lock = threading.Lock()

    def of(self, tests: tuple[str, ...], folder: Path) -> float | None:
        """Runs them, unless that was done."""
        if tests in self._known:
            return self._known[tests]
        with self._lock:
            if tests not in self._known:
                started = time.monotonic()
                code, told = run_tests(folder, tests, seconds=self._seconds)
                if code != 0:
                    print(f"without a mutant, code {code}: {told}", file=sys.stderr, flush=True)
                self._known[tests] = time.monotonic() - started if code == 0 else None
        return self._known[tests]


def run_all(mutants: list[Mutant], *, jobs: int, seconds: float) -> list[Result]:
    """What became of each, in the order of the list."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            folder = Path(scratch, f"tree{number}")
            copy_checkout(folder)
            folders.put(folder)
        usual = UsualTimes(seconds)

        def one(mutant: Mutant) -> Result:
            folder = folders.get()
            try:
                found = judge(folder, mutant, usual=usual.of(mutant.tests, folder))
            finally:
                folders.put(folder)
            print(f"{found[0]:9} {found[1]:5.1f} s  {_row(mutant)} {found[2]}", flush=True)
            return (mutant, *found)

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, mutants))


def _row(mutant: Mutant) -> str:
    before, after = (" ".join(text.split()) for text in (mutant.before, mutant.after))
    return f"{mutant.number} {mutant.file}: {before} -> {after or '(nothing)'}"


def report(results: list[Result], *, seconds: float) -> str:
    """The figures as Markdown: a line a file, then each mutant that was not killed."""
    fates = Counter(fate for _, fate, _, _ in results)
    rate = fates[KILLED] / max(1, len(results))
    lines = [
        f"## {len(results)} mutants, {rate:.1%} killed, {datetime.date.today()}",
        "",
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; Python "
        f"{platform.python_version()}, torch {sys.modules['torch'].__version__}, transformers "
        f"{sys.modules['transformers'].__version__}. {seconds:.0f} s in all.",
        "",
        "| file | mutants | killed | seconds |",
        "|---|---|---|---|",
    ]
    for file in sorted({mutant.file for mutant, *_ in results}):
        own = [row for row in results if row[0].file == file]
        killed = sum(fate == KILLED for _, fate, _, _ in own)
        lines.append(f"| {file} | {len(own)} | {killed} | {sum(row[2] for row in own):.0f} |")
    for mutant, fate, _, told in results:
        if fate != KILLED:
            lines += ["", f"{fate}: `{_row(mutant)}` {told}".rstrip()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="an expression for file, lines and tests")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="for tests, without a mutant")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    mutants = [one for one in read_list() if re.search(arguments.only, f"{_row(one)} {one.tests}")]
    for name in HEAVY:
        with contextlib.suppress(ImportError):  # its tests skip themselves
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # forks need not look through all of torch
    started = time.monotonic()
    results = run_all(mutants, jobs=arguments.jobs, seconds=arguments.seconds)
    text = report(results, seconds=time.monotonic() - started)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
    return int(any(fate != KILLED for _, fate, _, _ in results))


if __name__ == "__main__":
    sys.exit(main())
