"""Kills a random rank of a small training at random moments, many times in one run.

The run goes on by itself below `torchrun --max-restarts`, or is started again by this script
(`--launcher forked`). At the end losses, weights and optimizer state are compared, byte by byte,
with those of a run that nobody disturbed. Writes the figures beside this file.

`--launcher elastic` has four ranks, one of which is lost with each kill and comes back later. Then
each start is done again, undisturbed, on the same stages from the same checkpoint, and the losses
are compared.

    python benchmarks/kill_test.py [--kills 50] [--launcher torchrun] [--output kill_test.md]
"""

import argparse
import datetime
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from commands import train as train_pp  # noqa: F401  forked ranks run it
from stageline.checkpoint.writer import step_name
from stageline.distributed import elastic, launch
from tests.helpers.killing import (
    CardsInAFile,
    ElasticRun,
    Killer,
    LaunchedRun,
    RunFolder,
    kill_and_bring_back,
    kill_below_launcher,
    kill_by_hand,
    last_tensors,
    log_records,
)
from tests.helpers.small_run import Job
from tests.helpers.warm_start import launch as launch_elastic

SECONDS_TO_START = {"torchrun": 6.0, "forked": 1.0, "elastic": 2.0}
NUM_CARDS = 4
# a length of its own for each start that is done again, and so a rate that knows no length
ELASTIC = ("--lr-scheduler", "constant", "--save-steps", 4, "--keep-last", 10_000)


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


def kill_elastic(job, kills):
    """The kills of one run with --elastic, and its starts."""
    CardsInAFile.file = job.folder / "cards.txt"
    for name in ("__init__", "usable"):
        setattr(elastic.Accelerators, name, getattr(CardsInAFile, name))
    launch.SECONDS_BETWEEN_LOOKS = 0.5  # for cards that are back
    more = ("--num-stages", NUM_CARDS, "--elastic", "--max-restarts", 10 * kills)
    launcher = launch_elastic(job, "killed", *ELASTIC, *more, "--total-steps", 10**6)
    run = ElasticRun(launcher, NUM_CARDS)
    killer = Killer(
        0,
        RunFolder(job.folder / "killed"),
        total_steps=10**6,
        seconds_to_start=SECONDS_TO_START["elastic"],
    )
    kill_and_bring_back(run, killer, kills=kills, all_cards=NUM_CARDS)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.finish().code == 143
    return killer.done, run.starts


def stretches_of(records):
    """(steps of the checkpoint that it began with, training records) of each start with a step."""
    found = [(0, [])]
    for record in records:
        if record["kind"] == "resume":
            found.append((record["step"], []))
        elif record["kind"] == "train":
            if found[-1][1] and record["step"] <= found[-1][1][-1]["step"]:
                found.append((0, []))  # before the first checkpoint, where no mark is written
            found[-1][1].append(record)
    return [(step, steps) for step, steps in found if steps]


def do_again(job, stretches, starts):
    """Each start once more without a kill; the largest difference of a loss, and of how many."""
    worst, count = 0.0, 0
    for number, (step, records) in enumerate(stretches):
        num_ranks = [s.num_ranks for s in starts if s.at <= records[0]["time"]][-1]
        saved = job.folder / "killed" / "checkpoints" / step_name(step)
        name, resume = f"again {number}", ("--resume", saved) if step else ()
        last = ("--total-steps", records[-1]["step"])
        done = job.fork(name, *ELASTIC, *last, *resume, ranks=num_ranks, timeout=300)
        assert done.code == 0, done
        losses = job.losses(name)
        for record in records:
            worst = max(worst, abs(losses[record["step"]] - record["loss"]))
            count += 1
    return worst, count


def report_elastic(kills, starts, stretches, *, worst, count, seconds, load):
    """The figures as Markdown."""
    begun = [start.num_ranks for start in starts]
    pauses = pauses_of(stretches, kills)
    after_kills = [pause for pause in pauses if pause.is_kill]
    rows = {
        "all ranks gone, s after a kill": [kill.seconds_down for kill in kills],
        f"the next step done, s after a kill ({len(kills) - len(after_kills)} more were killed "
        "again before)": [pause.seconds for pause in after_kills],
        "the next step done, s after the last one before a rank came back": [
            pause.seconds for pause in pauses if not pause.is_kill
        ],
        "steps to do again after a kill": [pause.steps for pause in after_kills],
        "steps to do again after a rank came back": [
            pause.steps for pause in pauses if not pause.is_kill
        ],
    }
    phases = Counter(kill.phase for kill in kills).most_common()
    lines = [
        f"## elastic, {len(kills)} kills, {datetime.date.today()}",
        "",
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{machine(load)} {NUM_CARDS} ranks of one thread, a stage each, a core in the place of a "
        "card; a checkpoint every 4 steps, written in the background; cards are looked for every "
        "0.5 s. Starts are forks of a process that has imported everything, which a start of its "
        f"own does in some 6 s. {seconds:.0f} s in all, with the starts that were done again.",
        "",
        f"A kill takes a rank away: {NUM_CARDS} -> {NUM_CARDS - 1}; later it is back. Starts: "
        f"{begun.count(NUM_CARDS)} on {NUM_CARDS} ranks, {begun.count(NUM_CARDS - 1)} on "
        f"{NUM_CARDS - 1}; {len(stretches)} of them did a step. Kills while the run was at: "
        f"{', '.join(f'{phase} {n}' for phase, n in phases)}.",
        "",
        "| | median | most |",
        "|---|---|---|",
        *(f"| {n} | {statistics.median(f):.2f} | {max(f):.2f} |" for n, f in rows.items()),
        "",
        f"Losses of {count} steps against those of the same start done again, undisturbed, on the "
        f"same stages from the same checkpoint: largest difference {worst:.1e}.",
        "Each start went on from the newest checkpoint that was there (one that was being written "
        "at a kill is none); after each kill every folder that is called a checkpoint verified: "
        "True.",
    ]
    return "\n".join(lines) + "\n"


class Pause(NamedTuple):
    """Between the last step of a start and the first one of the next start that did one.

    Attributes:
        seconds: after the last kill in between; where there was none, after that last step.
        steps: those that were logged and done again.
    """

    is_kill: bool
    seconds: float
    steps: int


def pauses_of(stretches, kills):
    """All pauses of a run."""
    found = []
    for (_, before), (step, after) in pairwise(stretches):
        begin, end = before[-1]["time"], after[0]["time"]
        inside = [kill.time for kill in kills if before[0]["time"] < kill.time < end]
        steps = max(0, before[-1]["step"] - step)
        found.append(Pause(bool(inside), end - max(inside, default=begin), steps))
    return found


def check_no_loss(stretches, kills):
    """Raises where a start went on from an older checkpoint than the last kill had left."""
    for kill in kills:
        later = [step for step, records in stretches if records[0]["time"] > kill.time]
        assert later[0] >= kill.newest, (kill, later[0])


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
    test = try_elastic if arguments.launcher == "elastic" else try_launcher
    text = test(arguments)
    print(text)
    output = Path(arguments.output)
    title = "" if output.exists() else "# Ranks that are killed at random moments\n"
    with output.open("a") as file:
        file.write(f"{title}\n{text}")


def try_elastic(arguments):
    """The figures of a run that loses ranks and gets them back."""
    load, started = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), num_layers=NUM_CARDS)
        kills, starts = kill_elastic(job, arguments.kills)
        stretches = stretches_of(log_records(job.folder / "killed" / "log.jsonl"))
        check_no_loss(stretches, kills)
        worst, count = do_again(job, stretches, starts)
    seconds = time.monotonic() - started
    return report_elastic(
        kills, starts, stretches, worst=worst, count=count, seconds=seconds, load=load
    )


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
