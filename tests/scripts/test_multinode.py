"""The recipes for several machines: what they refuse, and a Slurm job with stand-ins for Slurm."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.ports import free_port
from tests.helpers.ready_venv import NotingVenv
from tests.helpers.small_run import Job
from tests.helpers.warm_start import WarmLauncher

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "scripts" / "train_pp_multinode.sh"
TOLD = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost", "NPROC_PER_NODE": "1"}

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv").is_dir(), reason="the scripts' environment is not there"
)


def environment(**told):
    unset = {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "NUM_STAGES"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, **{name: value for name, value in told.items() if value is not None}}


def run(command, **told):
    return subprocess.run(
        command, env=environment(**told), capture_output=True, text=True, timeout=280
    )


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"NNODES": None}, "NNODES is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2 does not fit: a whole number from 0 to 1"),
    ],
)
def test_what_a_machine_was_not_told_is_refused(changed, word):
    done = run(["bash", str(RECIPE)], **{**TOLD, **changed})
    assert done.returncode == 2
    errors = done.stderr.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and word in errors[0]


def stand_ins(folder):
    """`scontrol` that names this machine, and `srun` that starts two tasks on it."""
    folder.mkdir()
    texts = {
        # the pause: a reader that takes only the first line has closed the pipe by then
        "scontrol": (
            '[ "$*" = "show hostnames node[1-2]" ] || exit 1\n'
            "set -e; echo localhost; sleep 0.5; echo other"
        ),
        "srun": (
            "while [[ $1 == --* ]]; do shift; done\n"
            'for id in 0 1; do SLURM_NODEID=$id "$@" & done\nwait -n && wait -n'
        ),
    }
    for name, text in texts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def slurm(folder):
    return {
        "PATH": stand_ins(folder / "bin"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "77",
        "NPROC_PER_NODE": "1",
    }


def spooled(folder):
    """Slurm runs a copy of the file."""
    copy = folder / "slurm_script"
    copy.write_bytes((ROOT / "scripts" / "train_pp.slurm").read_bytes())
    return ["bash", str(copy)]


@pytest.mark.timeout(300)
def test_a_slurm_job_of_two_machines_trains(tmp_path):
    words = Job(tmp_path).command("run", "--total-steps", 1, "--warmup-steps", 0)
    words[words.index("--model-path")] = "--config-path"  # the recipe gives --model-path, too
    command = [*spooled(tmp_path), *words[2:]]
    venv = NotingVenv(tmp_path)
    told = {"MASTER_PORT": str(free_port()), "STAGELINE_VENV": str(venv.folder)}
    done = run(command, **{**slurm(tmp_path), **told})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine 0 of 2" in done.stderr and "machine 1 of 2" in done.stderr
    # the torchrun of each machine, in forks of this process
    commands = [words for words in venv.commands() if words[0] == "-m"]
    launchers = [WarmLauncher(words, {"OMP_NUM_THREADS": "1"}) for words in commands]
    ended = [launcher.finish() for launcher in launchers]
    assert [one.code for one in ended] == [0, 0], ended
    assert sum(one.out.count("step 1/1 | loss") for one in ended) == 1
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "manifest.json").is_file()
