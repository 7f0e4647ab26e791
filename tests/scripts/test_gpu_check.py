"""gpu_check.sh: its runner, and all of its checks on two emulated cards.

The first part runs small checks in forks of this process; the second part starts the script.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_check, gpu_checks
from benchmarks.gpu_checks import Check, row
from tests.helpers.warm_start import live_processes

ROOT = Path(__file__).resolve().parents[2]
SHORT = 1  # seconds
CHOSEN = (
    "the host,the card,resume,parity: llama,streaming: 1b,several cards: schedules,chunked loss"
)


def good(machine):
    print("a word for the log")
    yield row("sum", "4", "4", True)
    yield row("speed", "-", "7")


def breaks(machine):
    yield row("first half", "4", "4", True)
    raise ValueError("the second | half")


def is_killed(machine):
    os.kill(os.getpid(), signal.SIGKILL)  # the system does this when memory runs out
    yield


def hangs(machine):
    """With a process that outlives it, unless it is ended."""
    pid = os.fork()
    if pid:
        Path(machine["folder"], "pid").write_text(str(pid))
        yield row("before it hangs", "-", "here")
    time.sleep(600)


CHECKS = (
    Check("breaks", breaks, 60),
    Check("is killed", is_killed, 60),
    Check("hangs", hangs, SHORT),
    Check("good", good, 60),
    Check("two", good, 60, cards=2),
    Check("long", good, 9000, least=3000),
)


@pytest.fixture
def state(tmp_path):
    machine = {"cards": ["a card"], "emulated": False, "folder": str(tmp_path)}
    return gpu_check.choose_state(tmp_path, machine, is_new=False)


def table(path):
    """Check -> its rows: what, expected, came, verdict."""
    found = {}
    for line in path.with_suffix(".md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| check |"):
            name, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
            found.setdefault(name.partition(" (")[0], []).append(cells)
    return found


def is_alive(pid):
    return pid in live_processes()


def run(checks, state, *, seconds=2400, **options):
    call = gpu_check.Call(state, checks, seconds=seconds, **options)
    call.run(checks)
    return call


def test_each_end_of_a_check_is_a_row(state):
    run(CHECKS, state, commit="abc")
    rows = table(state.path)
    assert list(rows) == [check.name for check in CHECKS]
    assert rows["good"] == [["sum", "4", "4", "met"], ["speed", "-", "7", "-"]]
    whole, half = rows["breaks"]
    assert whole == ["first half", "4", "4", "met"]
    assert half[2].startswith("ValueError: the second \\| half (") and half[3] == "**failed**"
    log = state.path.parent / half[2].rpartition("(")[2].rstrip(")")
    assert "Traceback" in log.read_text()
    assert "SIGKILL" in rows["is killed"][0][2] and rows["is killed"][0][3] == "**failed**"
    assert rows["hangs"][0] == ["before it hangs", "-", "here", "-"]
    assert rows["hangs"][1][3] == "**out of time**"
    assert rows["two"] == [["-", "-", "needs 2 cards, and 1 came", "not run"]]
    assert rows["long"][0][2].startswith("not reached: it starts where 3000 s are left")
    pid = int((state.path.parent / "pid").read_text())
    assert not is_alive(pid), "what a check starts ends with it"


def test_a_second_call_runs_what_is_not_done(state, tmp_path):
    done = []

    def noted(name, work):
        def run(machine):
            with (tmp_path / "ran").open("a") as file:
                print(name, file=file)
            yield from work(machine)

        return Check(name, run, 60)

    calls = [
        [noted("a", good), noted("b", breaks)],
        [noted("a", good), noted("b", good), noted("c", good)],
    ]
    for checks in calls:
        state = gpu_check.choose_state(tmp_path, state.machine, is_new=False)
        state.commands.append("a call")
        run(checks, state)
        done.append((tmp_path / "ran").read_text().split())
    assert done == [["a", "b"], ["a", "b", "c", "b"]], "what was tried before comes last"
    assert not any(one.why for one in state.outcomes.values()) and len(state.commands) == 2
    grown = {**state.machine, "GiB of the host": 128}
    found = gpu_check.choose_state(tmp_path, grown, is_new=False)
    assert found.path == state.path and found.machine == grown
    other = {**state.machine, "torch": "another"}
    assert gpu_check.choose_state(tmp_path, other, is_new=False).path != state.path
    assert gpu_check.choose_state(tmp_path, state.machine, is_new=True).path != state.path


def call(folder, *words):
    command = ["bash", ROOT / "scripts" / "gpu_check.sh", "--emulated", "2", "--folder", folder]
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    given["STAGELINE_VENV"] = str(Path(sys.executable).parents[1])
    done = subprocess.run(
        [*map(str, command), *words], capture_output=True, text=True, env=given, timeout=900
    )
    if "no card can be emulated" in done.stderr:
        pytest.skip(done.stderr)
    return done


@pytest.mark.timeout(1200)
def test_the_checks_on_two_emulated_cards(tmp_path):
    """Run only a few of the checks that run tests, default jobs or families."""
    names = [check.name for check in gpu_check.choose_checks(gpu_checks.CHECKS, CHOSEN)]
    done = call(tmp_path, "--only", CHOSEN)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    rows = {name: found for name, found in table(path).items() if name in names}
    assert list(rows) == names
    for name, found in rows.items():
        for what, expected, came, verdict in found:
            assert what and expected and came, name
            assert verdict in ("met", "not judged", "-"), (name, came)
    compared = {what: came for what, _, came, _ in rows["streaming: 1b"]}
    assert compared["tiny: ours / plain_checkpoint"].endswith(" x"), compared
    assert "Emulated cards" in path.with_suffix(".md").read_text()
    judged = [name for name, found in rows.items() if any(one[3] == "met" for one in found)]
    assert len(judged) == 3, "numbers are true on emulated cards"
