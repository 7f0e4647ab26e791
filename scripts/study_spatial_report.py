"""Writes the report of scripts/study_spatial.sh: report.md, report.json, accuracy.png, loss.png.

Usage: study_spatial_report.py FOLDER, whose runs lie in FOLDER/ARM/seed-N.
"""

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from register import import_shelf, metric_register
from stageline.evaluation.report import write_report
from stageline.evaluation.study import Run, Study, study_figures, study_markdown
from stageline.plotting.curves import plot_accuracy, plot_losses
from stageline.run_records import read_log

METRIC = "rotate_qa"


def read_predictions(folder: Path) -> list[dict[str, Any]]:
    """A record a held-out sample."""
    lines = (folder / "evaluation" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "prediction" in record]


def answers_of(folder: Path) -> dict[str, set[str]]:
    """Group -> its right answers; they are equally frequent, so who guesses has one in so many."""
    answers: dict[str, set[str]] = {}
    for record in read_predictions(folder):
        answers.setdefault(record["sample"]["group"], set()).add(record["sample"]["answer"])
    return answers


def read_run(folder: Path) -> Run:
    """Scores of one run, from its predictions: the metric is computed again."""
    records = read_predictions(folder)
    samples = [record["sample"] for record in records]
    scores = metric_register[METRIC](records, samples)["per_sample"]
    ids = [record["id"] for record in records]
    steps, _ = read_log(folder / "log.jsonl")
    facts = {
        "steps": steps[-1]["step"],
        "seconds of training": round(sum(step["seconds"] for step in steps)),
    }
    return Run(
        arm=folder.parent.name,
        seed=int(folder.name.removeprefix("seed-")),
        scores=dict(zip(ids, scores, strict=True)),
        groups={name: sample["group"] for name, sample in zip(ids, samples, strict=True)},
        facts=facts,
    )


def run_folders(folder: Path) -> list[Path]:
    """Evaluated runs; `sft` first, since it is what others are compared with."""
    found = [path.parents[1] for path in folder.glob("*/seed-*/evaluation/report.json")]
    return sorted(found, key=lambda path: (path.parent.name != "sft", str(path)))


def describe(folder: Path) -> dict[str, Any]:
    """Date, machine and what the runs have in common."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    names = ("dataset", "batch-size", "total-steps", "learning-rate", "num-stages", "device")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {device}",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        **{name: config[name] for name in names if name in config},
    }


def main(target: str) -> None:
    import_shelf("metric")
    folder = Path(target)
    folders = run_folders(folder)
    study = Study([read_run(path) for path in folders])
    chance = {group: 1 / len(answers) for group, answers in answers_of(folders[0]).items()}
    figures = study_figures(study, chance=chance)
    logs: dict[str, list[list[dict]]] = {}
    for path in folders:
        logs.setdefault(path.parent.name, []).append(read_log(path / "log.jsonl")[0])
    plot_accuracy(figures, folder / "accuracy.png")
    plot_losses(logs, folder / "loss.png")
    text = study_markdown(figures, title="Spatial study", settings=describe(folders[0]))
    write_report(figures, folder / "report.json")
    (folder / "report.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"report.md, report.json, accuracy.png and loss.png are in {folder}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
