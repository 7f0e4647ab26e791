"""Kills a random rank of a small training at random moments, many times in one run.

The run goes on by itself below `torchrun --max-restarts`, or is started again by this script
(`--launcher forked`). At the end losses, weights and optimizer state are compared, byte by byte,
with those of a run that nobody disturbed. Writes the figures beside this file.

    python benchmarks/kill_test.py [--kills 50] [--launcher torchrun] [--output kill_test.md]
"""

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from commands import train as train_pp  # noqa: F401  forked ranks run it
from tests.helpers.killing import (
    Killer,
    LaunchedRun,
    RunFolder,
    kill_below_launcher,
    kill_by_hand,
    last_tensors,
)
from tests.helpers.small_run import Job

SECONDS_TO_START = {"torchrun": 6.0, "forked": 1.0}


def run_killed(job, launcher, options, total_steps, kills):
    """The kills of one run."""
    folder = RunFolder(job.folder / "killed")
    seconds = SECONDS_TO_START[launcher]
    killer = Killer(0, folder, total_steps=total_steps, seconds_to_start=seconds)
    resume = ("--resume", "auto")
    if launcher == "forked":
        kill_by_hand(
            lambda count: job.start_forked("killed", *options, *resume), killer, kills=kills
        )
        return killer.done
    words = job.command(
        *("killed", *options, "--num-stages", 2, *resume), torchrun=(2, "--max-restarts", kills)
    )
    run = LaunchedRun(words, job.folder / "killed.txt", num_ranks=2)
    try:
        kill_below_launcher(run, killer, kills=kills)
    finally:
        run.process.terminate()
    return killer.done


def machine(load):
    """What the figures were measured on."""
    return (
        f"{os.cpu_count()} cores, load {load:.1f} at the start and {os.getloadavg()[0]:.1f} at "
        f"the end; Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}."
    )


def report(kills, *, launcher, total_steps, losses_equal, files_equal, seconds, load):
    """The figures as Markdown."""
    down = [kill.seconds_down for kill in kills]
    back = [kill.seconds_back for kill in kills if kill.seconds_back is not None]
    lines = [
        f"## {launcher}, {len(kills)} kills, {datetime.date.today()}",
        "",
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{machine(load)} Two ranks of one thread, {total_steps} steps, a checkpoint "
        f"every 2 steps, written in the background. {seconds:.0f} s in all.",
        "",
        "| kills | what the run was at |",
        "|---|---|",
        *(f"| {n} | {phase} |" for phase, n in Counter(k.phase for k in kills).most_common()),
        "",
        "| | median s | longest s |",
        "|---|---|---|",
        f"| all ranks gone | {statistics.median(down):.2f} | {max(down):.2f} |",
    ]
    if back:
        lines.append(
            f"| a further step done ({len(back)} kills; the others were killed again before) | "
            f"{statistics.median(back):.2f} | {max(back):.2f} |"
        )
    lines += [
        "",
        f"Losses of all steps equal to the undisturbed run's: {losses_equal}.",
        f"Files of weights and optimizer state equal, byte by byte: {files_equal}.",
        "After each kill every folder that is called a checkpoint verified: True.",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--launcher", choices=sorted(SECONDS_TO_START), default="torchrun")
    parser.add_argument("--output", default=str(Path(__file__).with_suffix(".md")))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = try_launcher(arguments)
    print(text)
    output = Path(arguments.output)
    title = "" if output.exists() else "# Ranks that are killed at random moments\n"
    with output.open("a") as file:
        file.write(f"{title}\n{text}")


def try_launcher(arguments):
    """The figures of a run that torchrun, or this script, starts again."""
    total_steps = 2 * arguments.kills + 20
    options = ("--total-steps", total_steps, "--keep-last", 3)
    load, started = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        whole = job.fork("whole", *options, timeout=300)
        assert whole.code == 0, whole
        kills = run_killed(job, arguments.launcher, options, total_steps, arguments.kills)
        losses_equal = job.losses("killed") == job.losses("whole")
        names = ("killed", "whole")
        files = [last_tensors(RunFolder(job.folder / name), total_steps) for name in names]
    return report(
        kills,
        launcher=arguments.launcher,
        total_steps=total_steps,
        losses_equal=losses_equal,
        files_equal=files[0] == files[1] and len(files[0]) == 4,
        seconds=time.monotonic() - started,
        load=load,
    )


if __name__ == "__main__":
    main()
