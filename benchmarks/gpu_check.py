"""One command for whoever has cards: all checks in order of worth, one report that tells of them.

Each check (gpu_checks.py) runs in a process of its own, with a limit of time and a log; what it
yields is a row, and where it ends without, the reason is one. This process touches no card, so that
forks may. State lies beside the report, and a second call on the same cards goes on: what failed,
ran out of time or was not reached is run, what is done stays. Usage: scripts/gpu_check.sh.
"""

import argparse
import contextlib
import datetime
import functools
import gc
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from gpu_checks import Check

ROOT = Path(__file__).resolve().parents[1]
EMULATED = (
    "**Emulated cards, tiny shapes: this shows that every row comes. No figure is one of a card; "
    "speed and memory are not judged.**"
)
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEADS = ("check", "what", "expected", "came", "verdict")
HEADED = ("cards", "emulated")  # what the head of the page says of a machine
VERDICTS = {True: "met", False: "**missed**"}


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


def run_in_fork(
    work: Callable[[], Iterable[dict]], log: Path, *, seconds: float
) -> tuple[list[dict], str]:
    """What `work` yields in a process of its own, and why it did not come to its end, or "".

    The process and all that it starts are one group, of which nothing is left afterwards.

    Args:
        log: takes what it writes; what it yields lies beside it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    found = log.with_suffix(".jsonl")
    for file in (log, found):
        file.write_text("")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _work_and_exit(work, log, found)
    with contextlib.suppress(OSError):  # whichever of the two comes first
        os.setpgid(pid, pid)
    try:
        why = _why_ended(pid, log, seconds)
    finally:  # also where time is over, and where this process is told to stop
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    lines = found.read_text().splitlines(keepends=True)  # the last may be cut
    return [json.loads(line) for line in lines if line.endswith("\n")], why


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
        gc.freeze()  # looking through all libraries again takes a second each time
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


def _why_ended(pid: int, log: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            time.sleep(0.02)
            continue
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return ""
        lines = log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
        ended_by = f"ended by {signal.Signals(-code).name}; " if code < 0 else ""
        return f"failed: {ended_by}{lines[-1][:300]}"
    return f"out of time: it ran {seconds / 60:.1f} minutes"


# -- the checks of one call ----------------------------------------------------------------------


def run_checks(
    checks: Sequence["Check"],
    state: State,
    *,
    minutes: float,
    all_checks: Sequence["Check"] = (),
    enter: Callable[["Check"], contextlib.AbstractContextManager] = contextlib.nullcontext,
    commit: str = "",
) -> None:
    """Runs what is not done yet and fits into the time, and writes the report after each.

    Args:
        checks: the most worth first.
        all_checks: that the report tells of, where `checks` are some of them.
        enter: what a check runs in.
    """
    told = all_checks or checks
    deadline = time.monotonic() + 60 * minutes
    num_cards = len(state.machine["cards"])
    write_report(told, state)
    for check in sorted(checks, key=lambda check: check.name in state.outcomes):  # failed ones last
        old = state.outcomes.get(check.name)
        left = (deadline - time.monotonic()) / 60
        if check.cards > num_cards or (old and not old.why) or check.minutes > left:
            continue
        print(f"[{time.strftime('%H:%M:%S')}] {check.name} ...", flush=True)
        log = state.path.with_suffix("") / f"{_slug(check.name)}.log"
        work = functools.partial(_rows_of, check, enter, state.machine)
        start = time.monotonic()
        rows, why = run_in_fork(work, log, seconds=60 * check.minutes)
        taken = time.monotonic() - start
        outcome = Outcome(rows, why, round(taken, 1), os.path.relpath(log, state.path.parent))
        outcome.commit = commit
        state.outcomes[check.name] = outcome
        state.write()
        write_report(told, state)
        for row in outcome.rows:
            print(f"    {verdict(row):10} {row['what']}: {row['came']}", flush=True)
        if why:
            print(f"    {why} (log: {log})", flush=True)


def _rows_of(check: "Check", enter: Callable, machine: dict[str, Any]) -> Iterator[dict]:
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
        why = f"not reached: it may take {check.minutes:g} minutes; call again"
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
    """The newest of this machine, or a new one."""
    cards = machine["cards"]
    slug = f"{len(cards)}x-{'emulated' if machine['emulated'] else _slug(cards[0])}"
    known = sorted(folder.glob(f"*_{slug}*.json"), key=lambda path: path.stat().st_mtime)
    for path in reversed(() if is_new else known):
        state = State.read(path)
        if state.machine == machine:
            return state
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today()}_{slug}.json"
    for count in range(2, 1000):
        if not path.exists():
            break
        path = folder / f"{datetime.date.today()}_{slug}_{count}.json"
    return State(path, machine)


def commit_of() -> str:
    """Of this repository; -dirty where files are changed."""
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
        prog="gpu_check.sh", description="All that is to be known of cards, into one report."
    )
    parser.add_argument("--minutes", type=float, default=40, help="that it may take (40)")
    parser.add_argument("--gpus", type=int, help="how many cards to use (all)")
    parser.add_argument("--only", help="checks, parts of their names with commas: run anew")
    parser.add_argument("--anew", action="store_true", help="another report, from the start")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "gpu")
    parser.add_argument(
        "--emulated", type=int, metavar="N", help="N cards that are not there, tiny shapes"
    )
    return parser.parse_args(words)


def look_at_cards(options: argparse.Namespace, look: Callable[[], Iterable[dict]]) -> dict:
    """What the report says of the machine; asked in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found, why = run_in_fork(look, Path(folder) / "look.log", seconds=120)
    if not found:
        fail(
            f"no card can be asked: {why}. One that torch finds was expected, because all checks "
            "run on it: look at nvidia-smi and the driver, or see the whole with --emulated 2."
        )
    machine, wanted = found[0], options.gpus
    have = len(machine["cards"])
    if wanted is not None and not 1 <= wanted <= have:
        fail(
            f"--gpus {wanted} came, and {have} cards are here. No more than these were expected, "
            "because each rank has a card: leave --gpus out to use all."
        )
    if wanted is not None and wanted < have:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(have))))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown.split(",")[:wanted])
        machine["cards"] = machine["cards"][:wanted]
    return machine


def emulate(count: int) -> Callable[["Check"], contextlib.AbstractContextManager]:
    """Loads emulated cards, before torch is; gives what enters so many in a check's process."""
    os.environ.update(OMP_NUM_THREADS="1", HF_DEACTIVATE_ASYNC_LOAD="1")
    os.environ["STAGELINE_PROVE_SPLIT"] = "never"
    from tests.helpers.emulated_gpu.native import MOST_CARDS, Unavailable, load

    if not 1 <= count <= MOST_CARDS:
        fail(f"--emulated {count} came, 1 to {MOST_CARDS} cards were expected.")
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
        fail(f"--only {only} came. Part of the name of a check was expected: {names}.")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0: all that ran is met; 1: something failed or is missed; 2: nothing could run."""
    options = read_arguments(words)
    # whether there is a card is asked of its driver's library, and forks may use it still
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT))
    enter = emulate(options.emulated) if options.emulated else contextlib.nullcontext
    import gpu_checks

    from stageline.checkpoint.host_memory import settle_allocators

    end_all_when_stopped()
    look = functools.partial(gpu_checks.emulated_machine, options.emulated)
    machine = look_at_cards(options, look if options.emulated else gpu_checks.look)
    settle_allocators()
    state = choose_state(options.folder, machine, is_new=options.anew)
    given = shlex.join(sys.argv[1:] if words is None else words)
    commit, moment = commit_of(), time.strftime("%Y-%m-%d %H:%M")
    state.commands.append(f"`bash scripts/gpu_check.sh {given}`, {moment}, {commit}")
    chosen = choose_checks(gpu_checks.CHECKS, options.only)
    for check in chosen if options.only else ():
        state.outcomes.pop(check.name, None)
    run_checks(
        chosen, state, all_checks=gpu_checks.CHECKS, minutes=options.minutes, enter=enter,
        commit=commit,
    )  # fmt: skip
    print(f"report: {state.path.with_suffix('.md')}")
    outcomes = state.outcomes.values()
    is_well = not any(one.why or any(r["met"] is False for r in one.rows) for one in outcomes)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
