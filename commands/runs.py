"""Compare the runs below a folder, in a table and a plot: options that differ, figures, state.

`stageline runs FOLDER --sweep lr=1e-4,1e-3 seed=0,1 -- JOB.yaml NAME=VALUE --option VALUE` trains
every combination first, one run after the other. What follows -- is what `stageline train` takes.
"""

import argparse
import itertools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from commands.command_line import OVERRIDE, ROOT, TRAIN, rewritten
from options.command_line import command_words, shortened
from stageline.errors import INTERRUPTED, PREEMPTED, UserError
from stageline.run_records import read_log, read_object
from stageline.tables import format_table, natural_key

MOST_COLUMNS = 8  # columns of options that differ
SHORT = {"lr": "learning-rate"}
FATAL = (UserError.exit_code, INTERRUPTED, PREEMPTED)  # the next run would end in the same way


def main() -> int:
    """Train the runs of a sweep, print the table, and draw the plot."""
    words = command_words()
    place = words.index("--") if "--" in words else len(words)
    own, job = words[:place], words[place + 1 :]
    parser = argparse.ArgumentParser(
        prog="stageline runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="its run folders are one or two levels below")
    parser.add_argument("--metric", default="loss", help="held-out figure to compare (loss)")
    parser.add_argument(
        "--sweep", nargs="+", default=[], metavar="NAME=V1,V2", help="train every combination"
    )
    given = parser.parse_args(own)
    if ("--" in words) != bool(given.sweep):
        raise UserError(
            "--sweep and a job belong together. Write stageline runs FOLDER --sweep "
            "seed=0,1 -- JOB.yaml, or leave out both to compare runs that are there."
        )
    code = sweep(given.folder, given.sweep, job) if given.sweep else 0
    paths = [*given.folder.glob("*/config.yaml"), *given.folder.glob("*/*/config.yaml")]
    folders = {str(path.parent.relative_to(given.folder)): path.parent for path in paths}
    found = {
        name: read_run(folders[name], given.metric) for name in sorted(folders, key=natural_key)
    }
    runs = [{**run, "name": name} for name, run in found.items() if run]
    if not runs:
        raise UserError(
            f"{given.folder} has no runs: no config.yaml one or two levels below it. Name the "
            "folder in which run folders are, such as runs."
        )
    evaluations = [record for run in runs for record in run["log"][1]]
    known = {name for record in evaluations for name in record if type(record[name]) is float}
    if evaluations and given.metric not in known:
        raise UserError(
            f"--metric {given.metric} is in no evaluation of these runs. Choose one of "
            f"{', '.join(sorted(known - {'time'}))}."
        )
    from stageline.plotting.figures import runs_figure
    from stageline.plotting.pictures import save_figure

    print(table(runs, given.metric))
    picture = given.folder / "runs.png"
    save_figure(runs_figure({run["name"]: run["log"] for run in runs}, given.metric), picture)
    print(f"\n{picture}")
    return code


def combinations(sweep: Sequence[str]) -> dict[str, list[str]]:
    """Return the runs of a sweep: folder -> options. The last name changes fastest."""
    axes = []
    for word in sweep:
        match = OVERRIDE.fullmatch(word)
        if match is None or not all(match[3].split(",")):
            raise UserError(
                f"--sweep {word} is not NAME=VALUE,VALUE. Name an option and its values, "
                "such as lr=1e-4,1e-3."
            )
        name = SHORT.get(match[1], match[1].replace("_", "-")) + match[2]
        axes.append([(match[1] + match[2], name, value) for value in match[3].split(",")])
    runs: dict[str, list[str]] = {}
    for chosen in itertools.product(*axes):
        folder = ",".join(f"{short}={value}" for short, _, value in chosen).replace("/", "-")
        if folder in runs:
            raise UserError(
                f"--sweep {' '.join(sweep)} has two runs with the folder {folder}. Give each name "
                "and each value once."
            )
        runs[folder] = [f"--{name}={value}" for _, name, value in chosen]
    return runs


def sweep(folder: Path, words: Sequence[str], job: Sequence[str]) -> int:
    """Train all runs that are not done, one by one; return the exit code of the first failure.

    Run again, it continues: finished runs are left as they are, others resume.
    """
    failed = 0
    runs = combinations(words)
    for number, (name, options) in enumerate(runs.items(), 1):
        output = folder / name
        is_begun = any(output.glob("checkpoints/step-*"))
        found = read_run(output)
        if found is not None and found["state"] == "done":
            print(f"run {number} of {len(runs)}: {name} is done", flush=True)
            continue
        print(f"run {number} of {len(runs)}: {name}", flush=True)
        more = [*options, f"--output-dir={output}", *(["--resume=auto"] if is_begun else [])]
        code = subprocess.run(
            [sys.executable, str(ROOT / TRAIN), *rewritten(job), *more]
        ).returncode
        failed = failed or code
        if code in FATAL:
            raise SystemExit(code)
    return failed


def read_run(folder: Path, metric: str = "loss") -> dict[str, Any] | None:
    """Return config, log, state, last loss, best evaluation and seconds of a training run.

    None: the folder is of no training run.
    """
    from stageline.checkpoint.resume import is_claimed
    from stageline.training.evaluation import is_better

    config = read_object(folder / "config.yaml", yaml.safe_load)
    if "total-steps" not in config:
        return None
    log = folder / "log.jsonl"
    steps, evaluations = read_log(log) if log.exists() else ([], [])
    done, total = steps[-1]["step"] if steps else 0, config["total-steps"]
    state = "done" if done >= total else f"{done} of {total} steps"
    if is_claimed(folder):
        state += ", running"
    elif (folder / "failure.json").is_file():
        state += ", failed"
    best = None
    for record in evaluations:
        value = record.get(metric)
        if value is not None and (best is None or is_better(value, best[metric], metric=metric)):
            best = record
    return {
        "config": config,
        "log": (steps, evaluations),
        "state": state,
        "loss": steps[-1]["loss"] if steps else None,
        "best": best,
        "seconds": sum(step["seconds"] for step in steps),
    }


def table(runs: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Return a line a run, with the options that differ between runs."""
    configs = [run["config"] for run in runs]
    names = [
        name
        for name in dict.fromkeys(name for config in configs for name in config)
        if name != "output-dir" and any(one.get(name) != configs[0].get(name) for one in configs)
    ]
    shown, rest = names[:MOST_COLUMNS], names[MOST_COLUMNS:]
    figures = ["loss", f"best held-out {metric}", "at step", "seconds"]
    rows = [["run", *shown, "state", *figures]]
    for run in runs:
        best, values = run["best"], [run["config"].get(name) for name in shown]
        rows.append(
            [
                run["name"],
                *("-" if value is None else shortened(str(value)) for value in values),
                run["state"],
                "-" if run["loss"] is None else f"{run['loss']:.4f}",
                *(("-", "-") if best is None else (f"{best[metric]:.4f}", str(best["step"]))),
                f"{run['seconds']:.0f}",
            ]
        )
    more = f"\n{len(rest)} more options differ: {', '.join(rest)}" if rest else ""
    return format_table(rows, num_texts=len(shown) + 2) + more
