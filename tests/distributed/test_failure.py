"""Real processes that fail, are killed, or are interrupted. The group's timeout is 600 s and that
of a test far below: a rank that waits for a dead neighbour would be noticed.

One run of each kind starts new Pythons, below our launcher and below torchrun; the launcher and
the workers of the others are forks.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.small_run import Finished
from tests.helpers.warm_start import WarmLauncher, live_processes

ROOT = Path(__file__).resolve().parents[2]
ENTRY = Path(__file__).with_name("failing_entry.py")
SECONDS = 60
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

pytestmark = pytest.mark.timeout(3 * SECONDS)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _run(mode: str, folder: Path, *, num_ranks: int = 2, prefix: list[str] | None = None):
    """Runs the entry file with new Pythons, to the end."""
    return subprocess.run(
        [*(prefix or [sys.executable]), str(ENTRY), mode, str(folder), str(num_ranks)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def _run_warm(mode: str, folder: Path, *, num_ranks: int = 2) -> Finished:
    """Run like `_run`, from forks."""
    return _warm_launcher(mode, folder, num_ranks=num_ranks).finish(SECONDS)


def _warm_launcher(
    mode: str, folder: Path, *, num_ranks: int = 2, torchrun: list[str] = [], **environment: str
) -> WarmLauncher:
    words = [*torchrun, str(ENTRY), mode, str(folder), str(num_ranks)]
    return WarmLauncher(words, {"OMP_NUM_THREADS": "1", **environment})


def _first_line(stderr: str) -> str:
    return stderr.strip().splitlines()[0]


def _last_line(stderr: str) -> str:
    return stderr.strip().splitlines()[-1]


def test_a_run_without_failure_ends_with_0_and_no_words(tmp_path):
    done = _run("ok", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(list(tmp_path.glob("done_*"))) == 2


def test_a_single_process_says_no_word_either(tmp_path):
    done = _run_warm("ok", tmp_path, num_ranks=1)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert [path.name for path in tmp_path.glob("done_*")] == ["done_0"]


@pytest.mark.parametrize("mode", ["raise_on_1", "close_then_raise_on_1"])
def test_an_exception_on_rank_1_ends_all_and_is_the_only_report(tmp_path, mode):
    done = _run_warm(mode, tmp_path, num_ranks=3)
    assert done.code == 9
    line = "error[crash] rank=1 stage=1: KeyError: 'boom on purpose' at failing_entry.py:"
    assert _first_line(done.err).startswith(line)
    assert _last_line(done.err) == _first_line(done.err)
    assert done.err.count("Traceback") == 1
    assert "failing_entry.py" in done.err
    assert "onnection" not in done.err and "===" not in done.err


def test_below_torchrun_the_cause_comes_first_too(tmp_path):
    done = _run("raise_on_1", tmp_path, prefix=[sys.executable, *TORCHRUN, "2"])
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "torch/distributed/run.py" not in line]
    line = "error[crash] rank=1 stage=1: KeyError: 'boom on purpose'"
    assert any(words.startswith(line) for words in said[:3])
    assert "Connection closed" not in done.stderr


def test_what_the_schedule_wrapped_is_named_by_its_cause(tmp_path):
    done = _run_warm("wrapped_on_1", tmp_path)
    assert done.code == 9
    line = "error[crash] rank=1 stage=1: IndexError: index 7 is out of range"
    assert _first_line(done.err).startswith(line)


def test_an_error_that_all_ranks_hit_is_printed_once(tmp_path):
    done = _run_warm("user_error", tmp_path, num_ranks=3)
    assert done.code == 2
    assert done.err == "error[usage]: --batch-size 7 is wrong on every rank\n"


def test_an_error_of_the_data_ends_with_3(tmp_path):
    done = _run_warm("data_error_on_1", tmp_path)
    assert done.code == 3
    assert done.err == "error[data] rank=1 stage=1: rows.jsonl:17 is not JSON\n"


@pytest.mark.parametrize(("mode", "code"), [("raise_on_0", 9), ("user_error", 2)])
def test_a_single_process_reports_the_same_way(tmp_path, mode, code):
    done = _run_warm(mode, tmp_path, num_ranks=1)
    assert done.code == code
    wanted = "error[crash]: KeyError: 'boom once'" if code == 9 else "error[usage]: --batch-size 7"
    assert _first_line(done.err).startswith(wanted)


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    done = _run_warm("killed_on_1", tmp_path, num_ranks=3)
    assert done.code == 9
    words = "error[crash] rank=1 stage=1: killed by signal 9 (SIGKILL; the system may have run out"
    assert done.err.startswith(words) and done.err.count("\n") == 1
    assert "Traceback" not in done.err


def _start(
    mode: str, folder: Path, *, torchrun: list[str] = [], **environment: str
) -> WarmLauncher:
    """Begins a run of two ranks, and waits until both are at work."""
    run = _warm_launcher(mode, folder, torchrun=torchrun, **environment)
    _wait_for_ranks(folder, lambda: run.poll() is None)
    return run


def _start_new(mode: str, folder: Path) -> subprocess.Popen:
    """Start like `_start`, with new Pythons."""
    process = subprocess.Popen(
        [sys.executable, str(ENTRY), mode, str(folder), "2"],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C for it is not Ctrl-C for pytest
    )
    _wait_for_ranks(folder, lambda: process.poll() is None)
    return process


def _wait_for_ranks(folder: Path, is_running: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while len(list(folder.glob("started_*"))) < 2:
        assert is_running()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _send(run: WarmLauncher, signum: int) -> set[int]:
    """Returns the processes that the signal's receiver has started."""
    workers = {pid for pid, parent in live_processes().items() if parent == run.pid}
    assert len(workers) == 2
    os.kill(run.pid, signum)
    return workers


def _processes_of(folder: Path) -> list[str]:
    """Command lines of live processes that name this folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def test_one_ctrl_c_lets_every_rank_finish_its_step_and_save(tmp_path):
    process = _start_new("train_until_stopped", tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    steps = [(tmp_path / f"saved_{rank}").read_text() for rank in range(2)]
    assert steps[0] == steps[1]
    assert len(list(tmp_path.glob("done_*"))) == 2
    assert err.count("Stopping after this step") == 1
    assert "Traceback" not in err


def test_ctrl_c_below_torchrun_saves_too(tmp_path):
    run = _start("train_until_stopped", tmp_path, torchrun=[*TORCHRUN, "2"])
    _send(run, signal.SIGINT)
    run.finish(SECONDS)
    assert len(list(tmp_path.glob("saved_*"))) == 2


def test_a_key_press_that_arrives_twice_is_one(tmp_path):
    run = _start("train_until_stopped", tmp_path)
    _send(run, signal.SIGINT)
    time.sleep(0.05)
    os.kill(run.pid, signal.SIGINT)
    assert run.finish(SECONDS).code == 130
    assert len(list(tmp_path.glob("saved_*"))) == 2


@pytest.mark.parametrize("mode", ["never_stop", "never_stop_in_a_wait"])
def test_a_second_ctrl_c_ends_at_once(tmp_path, mode):
    run = _start(mode, tmp_path)
    workers = _send(run, signal.SIGINT)
    time.sleep(1.2)
    assert run.poll() is None
    os.kill(run.pid, signal.SIGINT)
    assert run.finish(SECONDS).code == 130
    assert list(tmp_path.glob("done_*")) == []
    assert not workers & live_processes().keys()


def test_ctrl_c_before_the_first_step_ends_at_once(tmp_path):
    run = _start("slow_start", tmp_path)
    workers = _send(run, signal.SIGINT)
    done = run.finish(SECONDS)
    assert done.code == 130
    assert done.err.strip() == "Interrupted before the first step; nothing was saved."
    assert not workers & live_processes().keys()


def test_sigterm_to_the_launcher_ends_workers_that_do_not_stop(tmp_path):
    run = _start("never_stop_in_a_wait", tmp_path, STOP_DEADLINE="1")
    workers = _send(run, signal.SIGTERM)
    done = run.finish(SECONDS)
    assert done.code == 143, done.err
    assert "error[stopped]" in done.err and "asked for a stop 1 s ago" in done.err
    assert "The last checkpoint is what counts" in done.err
    assert not workers & live_processes().keys()


def test_workers_do_not_outlive_a_killed_launcher(tmp_path):
    process = _start_new("never_stop_in_a_wait", tmp_path)
    assert len(_processes_of(tmp_path)) == 3
    process.kill()
    process.communicate(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while _processes_of(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
