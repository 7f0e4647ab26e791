"""Chaos, group A: what a launcher has a part in. A rank that says nothing, ports, restarts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from commands import train as train_pp  # noqa: F401 - its engines, before a fixture keeps registers as they are
from stageline.distributed.failure_record import LAUNCHER
from tests.helpers.small_run import Job
from tests.helpers.warm_start import launch

ENTRY = Path(__file__).resolve().parents[1] / "distributed" / "failing_entry.py"
ROOT = ENTRY.parents[2]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize(
    ("do", "words"),
    [
        pytest.param("sigkill", "killed by signal 9 (SIGKILL; the system may", id="a06_sigkill"),
        pytest.param("sigsegv", "killed by signal 11 (SIGSEGV; threads: ", id="a07_sigsegv"),
    ],
)
def test_the_launcher_speaks_for_a_rank_that_said_nothing(job, do, words):
    fault = f"at=forward,rank=1,step=3,do={do}"
    done = launch(job, do, "--num-stages", 2, "--sync-save", chaos=fault).finish()
    assert done.code == 9, done.err
    lines = done.err.splitlines()
    assert lines == [lines[0]] and lines[0].startswith(f"error[crash] rank=1 stage=1: {words}")
    assert job.checkpoints(do) == ["step-00000002"]
    assert (job.folder / do / "failure.json").is_file()
    if do == "sigsegv":
        log = (job.folder / do / "failures" / "rank-1.log").read_text()
        assert "Fatal Python error: Segmentation fault" in log and "train_pp.py" in log


def test_a_worker_whose_launcher_died_while_it_started_ends_at_once():
    """The launcher's number comes with the environment, not from a parent that may be gone."""
    orphan = "from stageline.distributed import launch; launch.launch_if_needed(2); print('on')"
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    told = {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    for launcher, code, said in ((gone.stdout.strip(), 9, ""), (str(os.getpid()), 0, "on\n")):
        environment = {**os.environ, **told, LAUNCHER: launcher}
        words = [sys.executable, "-c", orphan]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, said), done.stderr


def test_a16_a_port_in_use_is_named():
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        names |= {"PYTHONPATH": str(ROOT), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
        done = subprocess.run(
            [sys.executable, str(ENTRY), "ok", "/nowhere", "2"],
            env={**os.environ, **names},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error[usage]: port {port} of localhost (MASTER_PORT) is in use")
    assert "Traceback" not in done.stderr
