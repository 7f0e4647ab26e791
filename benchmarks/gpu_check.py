"""Run all GPU checks on this machine, in order of worth, into one report.

Each check (gpu_checks.py) runs in a forked process with a time limit and a log. Each row that it
yields goes into the report, and a check that does not finish adds a row with the reason. Checks of
numbers run side by side on all cores first. Checks of time run alone afterwards. A check starts
where its least time is left, and it is cut off at the end of the call. This process never touches a
card, so that it can fork. The state and the report are written after each check. A second call on
the same cards continues: it runs what is missing, then what failed or ran out of time.
Usage: scripts/gpu_check.sh.
"""

import argparse
import contextlib
import ctypes
import datetime
import functools
import gc
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO
from unittest import mock

if TYPE_CHECKING:
    from gpu_checks import Check

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
EMULATED = (
    "**Emulated cards, tiny shapes: this shows that every row comes. No figure is one of a card; "
    "speed and memory are not judged.**"
)
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEADS = ("check", "what", "expected", "came", "verdict")
HEADED = ("cards", "emulated")  # what the head of the page says of a machine
VERDICTS = {True: "met", False: "**missed**"}
SHARE = 0.36  # most of a call's time that checks side by side may take before those of time begin
SPARE = 5.0  # seconds at the end of a call, for the last report and for ending
LONGEST_LOG = 4 << 20  # bytes of a log that go into the archive: its end tells most
NVML = "libnvidia-ml.so.1"
NVML_FOLDERS = (
    *("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib64"),
    *("/usr/lib/x86_64-linux-gnu", "/usr/local/cuda/lib64", "/usr/local/cuda/compat"),
)
# prints the facts of the machine; where a word is not installed the next one follows
FACTS = """
date; uname -a; nvidia-smi
nvidia-smi --query-gpu=name,driver_version,compute_mode,clocks.sm,clocks.max.sm,power.limit,\
pcie.link.gen.current,pcie.link.width.current --format=csv
nvidia-smi topo -m
head -5 /proc/meminfo; grep -m1 'model name' /proc/cpuinfo; grep -c ^processor /proc/cpuinfo
df -h / /tmp /dev/shm; ulimit -a
for word in git gcc g++ nvcc ninja; do echo "$word: $(command -v $word || echo none)"; done
echo "host name: $(hostname)"; cat /etc/hosts
env | cut -d= -f1 | sort | tr '\n' ' '; echo
"$0" -m pip list --format=freeze
"""


@dataclass
class Outcome:
    """How a check ended.

    Attributes:
        why: it did not come to its end; "" where it did.
        rows: `what`, `expected`, `came`, and whether it is `met`; None where nobody can say.
    """

    rows: list[dict[str, Any]]
    why: str
    seconds: float
    log: str
    commit: str = ""


@dataclass
class State:
    """What is known so far; `path` is the report's, with .json.

    Attributes:
        commands: that brought it here, with their moments.
        outcomes: of checks by name.
    """

    path: Path
    machine: dict[str, Any]
    commands: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "State":
        text = json.loads(path.read_text(encoding="utf-8"))
        outcomes = {name: Outcome(**one) for name, one in text.pop("outcomes").items()}
        return cls(path, outcomes=outcomes, **text)

    def write(self) -> None:
        """All at once: a call that is killed leaves the state of before."""
        text = {name: value for name, value in asdict(self).items() if name != "path"}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


# -- processes -----------------------------------------------------------------------------------


class Fork:
    """A forked process that runs `work`, at the head of a process group of its own.

    Args:
        log: receives what the process prints; the rows that `work` yields are stored next to it.
        seconds: time limit.
    """

    def __init__(self, work: Callable[[], Iterable[dict]], log: Path, *, seconds: float) -> None:
        self.log, self.found, self.seconds = log, log.with_suffix(".jsonl"), seconds
        log.parent.mkdir(parents=True, exist_ok=True)
        for file in (log, self.found):
            file.write_text("")
        sys.stdout.flush()
        sys.stderr.flush()
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            _work_and_exit(work, log, self.found)
        with contextlib.suppress(OSError):  # whichever of the two processes comes first
            os.setpgid(self.pid, self.pid)

    @property
    def taken(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def why_ended(self, until: float) -> str | None:
        """Return None while it runs, "" after a good end, else the reason.

        Args:
            until: moment at which it has to end, whatever its own limit.
        """
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            is_late = self.taken >= self.seconds or time.monotonic() >= until
            return f"out of time: it ran {self.taken:.0f} s" if is_late else None
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return ""
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
        ended_by = f"ended by {signal.Signals(-code).name}; " if code < 0 else ""
        return f"failed: {ended_by}{lines[-1][:300]}"

    def end(self) -> list[dict]:
        """End all that is left of the process group, and return the rows."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        lines = self.found.read_text().splitlines(keepends=True)  # the last line may be incomplete
        return [json.loads(line) for line in lines if line.endswith("\n")]


def _work_and_exit(work: Callable[[], Iterable[dict]], log: Path, found: Path) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
        sys.stdout = open(1, "w", buffering=1, closefd=False)
        sys.stderr = open(2, "w", buffering=1, closefd=False)
        gc.freeze()  # a collection over all libraries takes a second each time
        with found.open("a", encoding="utf-8") as file:
            for row in work():
                print(json.dumps(row), file=file, flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- the checks of one call ----------------------------------------------------------------------


class Call:
    """One call of the command: it runs checks until its time is over.

    Args:
        told: checks of the report, in its order.
        seconds: time that is left for the call.
        enter: context that a check runs in, in its process.
        commit: commit of the code, for the report.
        out: folder that receives copies of the report, its state and the logs.
        slow: factor on the limit of each check.
    """

    def __init__(
        self,
        state: State,
        told: Sequence["Check"],
        *,
        seconds: float,
        enter: Callable[["Check"], contextlib.AbstractContextManager] = contextlib.nullcontext,
        commit: str = "",
        out: Path | None = None,
        slow: float = 1.0,
    ) -> None:
        self.state, self.told, self.enter, self.commit = state, told, enter, commit
        self.out, self.slow = out, slow
        self.began = time.monotonic()
        self.seconds = seconds
        self.end = self.began + seconds - min(SPARE, seconds / 10)
        self.running: list[tuple[Check, Fork]] = []
        self.write()

    def run(self, checks: Sequence["Check"]) -> None:
        """Run what is not done: new checks first, then those that did not finish before."""
        num_cards = len(self.state.machine["cards"])
        outcomes = self.state.outcomes
        open_checks = [
            check
            for check in checks
            if check.cards <= num_cards and (check.name not in outcomes or outcomes[check.name].why)
        ]
        new = [check for check in open_checks if check.name not in outcomes]
        again = [check for check in open_checks if check.name in outcomes]
        numbers = [check for check in new if check.beside]
        alone = [check for check in new if not check.beside]
        try:
            share = time.monotonic() + SHARE * self.seconds
            # cut off for what is measured alone: they run again where time is left
            cut = self._run_some(numbers, until=min(self.end, share) if alone else self.end)
            self._run_some(alone, until=self.end)
            self._run_some([*cut, *(c for c in again if c.beside)], until=self.end)
            self._run_some([c for c in again if not c.beside], until=self.end)
        finally:  # also where this process is told to stop
            for check, fork in list(self.running):
                self._keep(check, fork, f"out of time: the call ended after {fork.taken:.0f} s")

    def _run_some(self, checks: Sequence["Check"], *, until: float) -> list["Check"]:
        """Run checks of one kind, side by side or alone; return those that `until` cut off."""
        cores = os.cpu_count() or 1
        waiting, cut = list(checks), []
        while waiting or self.running:
            width = max(2, min(14, cores - 2)) if waiting and waiting[0].beside else 1
            while waiting and len(self.running) < width:
                check, left = waiting.pop(0), until - time.monotonic()
                is_tiny = self.state.machine["emulated"]
                if left < (min(check.least, 10) if is_tiny else check.least):
                    if left > 0:
                        self.say(f"{check.name}: not begun, {left:.0f} s are left here")
                    cut.append(check)
                    continue
                self.say(f"{check.name} ...")
                log = self.state.path.with_suffix("") / f"{_slug(check.name)}.log"
                work = functools.partial(_rows_of, check, self.enter, self.state.machine)
                fork = Fork(work, log, seconds=self.slow * check.seconds)
                self.running.append((check, fork))
            time.sleep(0.02)
            for check, fork in list(self.running):
                why = fork.why_ended(until)
                if why is None:
                    continue
                if why.startswith("out of time") and fork.taken < fork.seconds:
                    cut.append(check)
                self._keep(check, fork, why)
        return cut

    def _keep(self, check: "Check", fork: Fork, why: str) -> None:
        self.running.remove((check, fork))
        taken, rows = round(fork.taken, 1), fork.end()
        log = os.path.relpath(fork.log, self.state.path.parent)
        self.state.outcomes[check.name] = Outcome(rows, why, taken, log, self.commit)
        self.write()
        self.say(f"{check.name}: {taken:.0f} s {why}")
        for row in rows:
            print(f"    {verdict(row):10} {row['what']}: {row['came']}", flush=True)
        if why:
            tail = fork.log.read_text(errors="replace").strip().splitlines()[-12:]
            print(*(f"      | {line[:200]}" for line in tail), sep="\n", flush=True)

    def say(self, text: str) -> None:
        """Print a line with the seconds of this call."""
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def write(self) -> None:
        """Write the state and the report, and copy them and the logs to `out`."""
        self.state.write()
        write_report(self.told, self.state)
        if self.out is None:
            return
        path = self.state.path
        for suffix in (".md", ".json"):
            shutil.copy(path.with_suffix(suffix), self.out / f"{path.stem}{suffix}")
        part = self.out / "logs.part"
        with tarfile.open(part, "w:gz", compresslevel=3) as archive:
            for log in sorted(path.with_suffix("").glob("*.log")):
                if log.stat().st_size > LONGEST_LOG:
                    log.write_bytes(log.read_bytes()[-LONGEST_LOG:])
                archive.add(log, f"{path.stem}/{log.name}")
        part.replace(self.out / "logs.tar.gz")

    def print_what_is_left(self) -> None:
        """Print missed rows, failed checks, and checks that did not run."""
        outcomes, num_cards = self.state.outcomes, len(self.state.machine["cards"])
        missed = [
            f"{name}: {row['what']}: {row['came']} (expected: {row['expected']})"
            for name, outcome in outcomes.items()
            for row in outcome.rows
            if row["met"] is False
        ]
        failed = [f"{name}: {outcome.why}" for name, outcome in outcomes.items() if outcome.why]
        idle = [c.name for c in self.told if c.name not in outcomes and c.cards <= num_cards]
        heads = {"missed": missed, "failed or out of time": failed, "not reached": idle}
        for head, lines in heads.items():
            print(f"== {head}: {len(lines)} ==", *lines, sep="\n", flush=True)


def _rows_of(check: "Check", enter: Callable, machine: dict[str, Any]) -> Iterator[dict]:
    if check.beside:
        import torch

        torch.set_num_threads(1)
    with enter(check):
        yield from check.run(machine)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


# -- the report ----------------------------------------------------------------------------------


def write_report(checks: Sequence["Check"], state: State) -> None:
    """The page: where and how it was measured, and a table with all checks."""
    machine = state.machine
    names = [f"{machine['cards'].count(n)} x {n}" for n in dict.fromkeys(machine["cards"])]
    rows = [row for check in checks for row in table_rows(check, state)]
    counts = Counter(row[-1] for row in rows)
    counted = ", ".join(f"{count} {kind}" for kind, count in counts.most_common() if kind != "-")
    commits = ", ".join(dict.fromkeys(one.commit for one in state.outcomes.values()))
    facts = "; ".join(f"{key} {value}" for key, value in machine.items() if key not in HEADED)
    lines = [
        f"# What `gpu_check.sh` found on {', '.join(names)}",
        "",
        *((EMULATED, "") if machine["emulated"] else ()),
        f"{facts}. Commit {commits or 'none yet'}.",
        "",
        *(f"- {command}" for command in state.commands),
        "",
        f"Rows: {counted}. The most worth comes first; logs lie in `{state.path.stem}/`.",
        "",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
        *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows),
    ]
    text = "\n".join(lines) + "\n"
    state.path.with_suffix(".md").write_text(text, encoding="utf-8")


def table_rows(check: "Check", state: State) -> list[tuple[str, ...]]:
    """What came of a check, and why nothing did."""
    outcome = state.outcomes.get(check.name)
    have = len(state.machine["cards"])
    if outcome is None:
        why = f"not reached: it starts where {check.least:g} s are left; call again"
        if check.cards > have:
            why = f"needs {check.cards} cards, and {have} came"
        return [(check.name, "-", "-", why, "not run")]
    seconds = f"{check.name} ({outcome.seconds:.0f} s)"
    found = [
        (seconds, row["what"], row["expected"], row["came"], verdict(row)) for row in outcome.rows
    ]
    if outcome.why or not found:
        kind, _, reason = (outcome.why or "failed: it yielded no row").partition(": ")
        found.append(
            (seconds, "-", "it comes to its end", f"{reason} ({outcome.log})", f"**{kind}**")
        )
    return found


def verdict(row: dict[str, Any]) -> str:
    """Of one row."""
    return VERDICTS.get(row["met"], "-" if row["expected"] == "-" else "not judged")


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


# -- the command ---------------------------------------------------------------------------------


def choose_state(folder: Path, machine: dict[str, Any], *, is_new: bool) -> State:
    """Return the newest state of these cards and this software, or a new one.

    Memory is no part of it: a virtual machine may grow between two calls.
    """

    def facts(machine: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in machine.items() if not name.startswith("GiB")}

    cards = machine["cards"]
    slug = f"{len(cards)}x-{'emulated' if machine['emulated'] else _slug(cards[0])}"
    known = sorted(folder.glob(f"*_{slug}*.json"), key=lambda path: path.stat().st_mtime)
    for path in reversed(() if is_new else known):
        state = State.read(path)
        if facts(state.machine) == facts(machine):
            state.machine = machine
            return state
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today()}_{slug}.json"
    for count in range(2, 1000):
        if not path.exists():
            break
        path = folder / f"{datetime.date.today()}_{slug}_{count}.json"
    return State(path, machine)


def commit_of() -> str:
    """Return the commit of this repository, with -dirty where files are changed.

    Where no .git is, as on a machine that a copy was sent to, STAGELINE_COMMIT names it.
    """
    if "STAGELINE_COMMIT" in os.environ:
        return os.environ["STAGELINE_COMMIT"]
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def fail(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description="Run all GPU checks of this machine into one report."
    )
    parser.add_argument("--minutes", type=float, default=40, help="time of the call (40)")
    parser.add_argument("--seconds", type=float, help="time of the call, instead of --minutes")
    parser.add_argument("--gpus", type=int, help="number of cards to use (all)")
    parser.add_argument("--only", help="parts of names of checks, with commas: run these again")
    parser.add_argument("--anew", action="store_true", help="start another report")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "benchmarks" / "gpu", help="folder of the report"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for copies of report, state, console, logs, machine facts",
    )
    parser.add_argument(
        "--here", action="store_true", help="use the Python that is there: no setup, no network"
    )
    parser.add_argument(
        "--more-packages", type=Path, metavar="FOLDER",
        help="packages that only the checks about them import (roundpipe, bitsandbytes)",
    )  # fmt: skip
    parser.add_argument(
        "--host-gib", type=int, metavar="N",
        help="memory of the host, where the kernel reports less (a virtual machine that grows)",
    )  # fmt: skip
    parser.add_argument("--slow", type=float, help="factor on all limits (1; emulated: 4)")
    parser.add_argument(
        "--emulated", type=int, metavar="N", help="N cards that are not there, tiny shapes"
    )
    return parser.parse_args(words)


def look_at_cards(options: argparse.Namespace, look: Callable[[], Iterable[dict]]) -> dict:
    """Return what the report says of the machine; a process of its own asks for it."""
    with tempfile.TemporaryDirectory() as folder:
        fork = Fork(look, Path(folder) / "look.log", seconds=120)
        while (why := fork.why_ended(fork.began + fork.seconds)) is None:
            time.sleep(0.02)
        found, text = fork.end(), fork.log.read_text(errors="replace")
    if not found:
        print(text[-3000:])
        fail(
            f"no card answers: {why}. Look at nvidia-smi and the driver, or try all checks without "
            "a card: --emulated 2."
        )
    machine, wanted = found[0], options.gpus
    have = len(machine["cards"])
    if wanted is not None and not 1 <= wanted <= have:
        fail(f"--gpus {wanted}, but this machine has {have} cards. Leave --gpus out to use all.")
    if wanted is not None and wanted < have:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(have))))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown.split(",")[:wanted])
        machine["cards"] = machine["cards"][:wanted]
    if options.host_gib:
        machine["GiB of the host"] = options.host_gib
    return machine


def find_nvml() -> None:
    """Let torch find NVML, or it starts the driver to count cards, and no fork can use one then.

    Where the library is in a folder that the loader does not search, this process starts again.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(NVML)
        return
    folder = next((each for each in NVML_FOLDERS if Path(each, NVML).exists()), None)
    searched = os.environ.get("LD_LIBRARY_PATH", "")
    if folder is None or folder in searched.split(":"):
        return
    print(f"{NVML} is in {folder}, which the loader does not search: starting again", flush=True)
    os.environ["LD_LIBRARY_PATH"] = f"{folder}:{searched}" if searched else folder
    os.execv(sys.executable, [sys.executable, *sys.argv])


class Console:
    """A stream that writes into a file as well."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self.stream, self.file = stream, file

    def write(self, text: str) -> int:
        self.file.write(text)
        return self.stream.write(text)

    def flush(self) -> None:
        self.file.flush()
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def filled(out: Path | None) -> Iterator[None]:
    """Write the console and the facts of the machine into a folder."""
    if out is None:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (
        (out / "machine.txt").open("w") as facts,
        (out / "console.txt").open("a") as file,
        contextlib.redirect_stdout(Console(sys.stdout, file)),
        contextlib.redirect_stderr(Console(sys.stderr, file)),
    ):
        asked = subprocess.Popen(
            ["sh", "-c", FACTS, sys.executable], stdout=facts, stderr=subprocess.STDOUT
        )
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                asked.wait(2)
            asked.kill()
            asked.wait()


def emulate(count: int) -> Callable[["Check"], contextlib.AbstractContextManager]:
    """Load emulated cards, before torch is imported; return the context of a check's process."""
    os.environ.update(OMP_NUM_THREADS="1", HF_DEACTIVATE_ASYNC_LOAD="1")
    os.environ["STAGELINE_PROVE_SPLIT"] = "never"
    from tests.helpers.emulated_gpu.native import MOST_CARDS, Unavailable, load

    if not 1 <= count <= MOST_CARDS:
        fail(f"--emulated {count} is not possible. Choose 1 to {MOST_CARDS} cards.")
    try:
        native = load()
    except Unavailable as error:
        fail(f"no card can be emulated: {error}.")

    @contextlib.contextmanager
    def enter(check: "Check") -> Iterator[None]:
        from tests.helpers.emulated_gpu.cards import Cards

        with Cards(native, count) as cards:
            yield
            if cards.races:
                raise RuntimeError("; ".join(cards.races))

    return enter


def end_all_when_stopped() -> None:
    """Lets a signal raise, so that the processes of a check end before this one does."""
    for number in STOPPING:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


def choose_checks(checks: Sequence["Check"], only: str | None) -> list["Check"]:
    """Those that --only names."""
    parts = only.lower().split(",") if only else [""]
    found = [check for check in checks if any(part in check.name.lower() for part in parts)]
    if not found:
        names = "; ".join(check.name for check in checks)
        fail(f"--only {only} is in no check's name. Choose a part of one: {names}.")
    return found


@contextlib.contextmanager
def on_cards(check: "Check") -> Iterator[None]:
    """Set torch's allocators as a run does, in the process of a check.

    The driver is not asked whether there is a card: ranks that a check forks could not use it then.
    """
    import torch

    from commands.train_engines import settle_allocators

    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        settle_allocators()
    yield


def main(words: Sequence[str] | None = None) -> int:
    """Return 0 if no row is missed and no check failed, 1 if some did, 2 if nothing could run."""
    options = read_arguments(words)
    with filled(options.out):
        return run(options, sys.argv[1:] if words is None else words)


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    # Python 3.12 warns of the threads that importing torch leaves
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if Path("/sys/class/net/lo").exists():  # ranks meet on this machine: no host name is looked up
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if options.more_packages:
        os.environ["STAGELINE_MORE_PACKAGES"] = str(options.more_packages.resolve())
    sys.path.insert(0, str(ROOT))
    paths = [os.environ.get("PYTHONPATH"), str(ROOT)]  # for processes that checks start
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if not options.emulated:
        find_nvml()
    try:
        enter = emulate(options.emulated) if options.emulated else on_cards
        import gpu_checks
    except ModuleNotFoundError as error:
        fail(f"{sys.executable} lacks {error.name}. Install it there, or leave --here out.")
    end_all_when_stopped()
    look = functools.partial(gpu_checks.emulated_machine, options.emulated)
    machine = look_at_cards(options, look if options.emulated else gpu_checks.look)
    state = choose_state(options.folder, machine, is_new=options.anew)
    commit, moment = commit_of(), time.strftime("%Y-%m-%d %H:%M")
    state.commands.append(f"`bash scripts/gpu_check.sh {shlex.join(words)}`, {moment}, {commit}")
    chosen = choose_checks(gpu_checks.CHECKS, options.only)
    for check in chosen if options.only else ():
        state.outcomes.pop(check.name, None)
    seconds = 60 * options.minutes if options.seconds is None else options.seconds
    call = Call(
        state,
        gpu_checks.CHECKS,
        seconds=seconds - (time.monotonic() - BEGAN),  # importing torch took a part
        enter=enter,
        commit=commit,
        out=options.out,
        slow=options.slow or (4.0 if options.emulated else 1.0),
    )
    call.say(f"{json.dumps(machine)}, commit {commit}")
    call.run(chosen)
    call.print_what_is_left()
    print(f"report: {state.path.with_suffix('.md')}")
    outcomes = state.outcomes.values()
    is_well = not any(one.why or any(r["met"] is False for r in one.rows) for one in outcomes)
    return 0 if is_well else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch takes seconds to end in order, which are of the call
