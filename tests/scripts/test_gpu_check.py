"""gpu_check.sh: what its runner promises, and the whole of it on two emulated cards.

The first part has checks of its own, in forks of this process; the second starts the script.
"""

import json
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
SHORT = 0.02  # minutes


def good(machine):
    print("a word for the log")
    yield row("sum", "4", "4", True)
    yield row("speed", "-", "7")


def breaks(machine):
    yield row("first half", "4", "4", True)
    raise ValueError("the second | half")


def is_killed(machine):
    os.kill(os.getpid(), signal.SIGKILL)  # as the system does where memory runs out
    yield


def hangs(machine):
    """With a process that outlives it, unless it is ended."""
    pid = os.fork()
    if pid:
        Path(machine["folder"], "pid").write_text(str(pid))
        yield row("before it hangs", "-", "here")
    time.sleep(600)


CHECKS = (
    Check("breaks", breaks, 1),
    Check("is killed", is_killed, 1),
    Check("hangs", hangs, SHORT),
    Check("good", good, 1),
    Check("two", good, 1, cards=2),
    Check("long", good, 50),
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


def test_each_end_of_a_check_is_a_row(state):
    gpu_check.run_checks(CHECKS, state, minutes=40, commit="abc")
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
    assert rows["long"][0][2].startswith("not reached: it may take 50 minutes")
    pid = int((state.path.parent / "pid").read_text())
    assert not is_alive(pid), "what a check starts ends with it"


def test_a_second_call_runs_what_is_not_done(state, tmp_path):
    done = []

    def noted(name, work):
        def run(machine):
            with (tmp_path / "ran").open("a") as file:
                print(name, file=file)
            yield from work(machine)

        return Check(name, run, 1)

    calls = [
        [noted("a", good), noted("b", breaks)],
        [noted("a", good), noted("b", good), noted("c", good)],
    ]
    for checks in calls:
        state = gpu_check.choose_state(tmp_path, state.machine, is_new=False)
        state.commands.append("a call")
        gpu_check.run_checks(checks, state, minutes=40)
        done.append((tmp_path / "ran").read_text().split())
    assert done == [["a", "b"], ["a", "b", "c", "b"]], "what was tried before comes last"
    assert not any(one.why for one in state.outcomes.values()) and len(state.commands) == 2
    other = {**state.machine, "torch": "another"}
    assert gpu_check.choose_state(tmp_path, other, is_new=False).path != state.path
    assert gpu_check.choose_state(tmp_path, state.machine, is_new=True).path != state.path


def test_all_processes_end_when_the_script_is_stopped(state, tmp_path):
    pid = os.fork()
    if pid == 0:
        try:
            gpu_check.end_all_when_stopped()
            gpu_check.run_checks([Check("hangs", hangs, 5)], state, minutes=40)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
    child = int((tmp_path / "pid").read_text())
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


def test_more_cards_than_there_are(tmp_path, capsys):
    options = gpu_check.read_arguments(["--gpus", "3", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu_check.look_at_cards(options, lambda: gpu_checks.emulated_machine(2))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --gpus 3 came, and 2 cards are here.")


def test_a_schedule_that_hangs_is_a_row_and_the_others_go_on(monkeypatch):
    asked = []

    def on_ranks(words, count, *, seconds):
        asked.append(words[-1].split(","))
        for name in asked[-1]:
            if name == "looped_bfs":
                raise AssertionError("ranks [0, 1] still run after 180 s")
            figures = {"micro-batches": 8, "of ideal": 0.8, "bubble %": 9, "ideal bubble %": 7}
            yield {"schedule": name, **figures}

    monkeypatch.setattr(gpu_checks, "on_ranks", on_ranks)
    machine = {"cards": ["a card"] * 2, "emulated": False}
    rows = list(gpu_checks.schedules_on_cards(machine))
    names = list(gpu_checks.schedules.SCHEDULES)
    assert [one["what"].partition(" on 2 cards")[0] for one in rows] == names
    (hung,) = [one for one in rows if one["came"] == "ranks [0, 1] still run after 180 s"]
    assert hung is rows[names.index("looped_bfs")] and not any(one["met"] for one in rows)
    assert asked == [names, names[names.index("looped_bfs") + 1 :]]


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
def test_the_whole_on_two_emulated_cards(tmp_path):
    done = call(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    rows = table(path)
    assert list(rows) == [check.name for check in gpu_checks.CHECKS]
    for name, found in rows.items():
        for what, expected, came, verdict in found:
            assert what and expected and came, name
            assert verdict in ("met", "not judged", "-"), (name, came)
    compared = {what: came for what, _, came, _ in rows["streaming: 1b"]}
    assert compared["tiny: ours / plain_checkpoint"].endswith(" x"), compared
    assert "Emulated cards" in path.with_suffix(".md").read_text()
    judged = [name for name, found in rows.items() if any(one[3] == "met" for one in found)]
    assert len(judged) >= 12, "numbers are true on emulated cards"

    state = json.loads(path.read_text())
    state["outcomes"]["chunked loss"]["why"] = "out of time: it ran 2.0 minutes"
    path.write_text(json.dumps(state))
    done = call(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line for line in done.stdout.splitlines() if line.endswith(" ...")]
    assert [line.partition("] ")[2] for line in ran] == ["chunked loss ..."]
    assert list(tmp_path.glob("*.json")) == [path]
