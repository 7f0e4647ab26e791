"""The study: its figures against plain loops, its words and pictures, the steps of its script."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image

from examples.spatial.study_spatial_report import (
    ALL,
    CONSISTENT,
    Run,
    Study,
    bootstrap,
    chance_by_group,
    read_run,
    study_figures,
)
from stageline.errors import UserError
from tests.helpers import small_run
from tests.helpers.ready_venv import mark_ready
from tests.helpers.small_run import ForkedRun

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("clock", "direction")


def made_up(accuracies, *, num_samples=200):
    """Runs whose shares of right answers are about those given: {arm: [of each seed]}."""
    draw = random.Random(1)
    ids = [f"s{number}" for number in range(num_samples)]
    groups = {name: GROUPS[number % 2] for number, name in enumerate(ids)}
    return [
        Run(arm, seed, {name: float(draw.random() < share) for name in ids}, groups, {"steps": 5})
        for arm, shares in accuracies.items()
        for seed, share in enumerate(shares)
    ]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


# -- figures -----------------------------------------------------------------------------


def test_means_and_differences_equal_a_loop():
    runs = made_up({"sft": [0.5, 0.6, 0.4], "contrastive": [0.7, 0.8, 0.6]})
    study = Study(list(reversed(runs)))
    assert study.arms == ["contrastive", "sft"] and study.seeds == [0, 1, 2]
    by = {(run.arm, run.seed): run for run in runs}
    for group in (*GROUPS, ALL):
        names = [n for n in runs[0].scores if group == ALL or runs[0].groups[n] == group]
        figure = study.accuracy("sft", group)
        for seed in range(3):
            wanted = mean(by["sft", seed].scores[name] for name in names)
            assert figure.by_seed[seed] == pytest.approx(wanted)
        assert figure.mean == pytest.approx(mean(figure.by_seed))
        assert figure.num_samples == len(names)
        center = mean(figure.by_seed)
        assert figure.spread == pytest.approx(
            math.sqrt(sum((value - center) ** 2 for value in figure.by_seed) / 2)
        )
        paired = study.difference("sft", "contrastive", group)
        wanted = mean(
            by["contrastive", seed].scores[name] - by["sft", seed].scores[name]
            for seed in range(3)
            for name in names
        )
        assert paired.mean == pytest.approx(wanted)


def test_intervals_are_those_of_theory():
    """Check that the bootstrap's interval is the normal one, and narrows by 1/sqrt."""
    generator = numpy.random.default_rng(0)
    scores = (generator.random((1, 2000)) < 0.3).astype(float)
    low, high = bootstrap(scores).over_samples
    half = 1.96 * math.sqrt(0.3 * 0.7 / 2000)
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)
    low, high = bootstrap(scores[:, :500]).over_samples
    assert (high - low) / 2 == pytest.approx(2 * half, rel=0.2)


def test_views_of_a_scene_are_judged_alone_and_together(tmp_path):
    """Two scenes of two views, written as `evaluate` does; the figures are counted by hand."""
    said = {"a": ["left", "right"], "b": ["left", "left"]}
    right = {"a": ["left", "right"], "b": ["left", "right"]}
    for arm in ("sft", "grpo"):
        folder = tmp_path / arm / "seed-0"
        (folder / "evaluation").mkdir(parents=True)
        (folder / "log.jsonl").write_text('{"kind": "train", "step": 4, "seconds": 2.0}\n')
        lines = [
            {
                "id": f"{scene}{view}",
                "prediction": "right" if arm == "grpo" else said[scene][view],
                "sample": {
                    **{"question": "Where?", "answer": right[scene][view], "task": "direction"},
                    **{"group": "direction", "contrast_group": scene},
                },
            }
            for scene in said
            for view in (0, 1)
        ]
        # an evaluation with other settings left these, and a line break does not end a line
        lines = [{"settings": "new", **line, "prompt": "a\u2028b"} for line in lines]
        left = [{**line, "settings": "old", "prediction": "behind"} for line in lines]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in left + lines)
        (folder / "evaluation/predictions.jsonl").write_text(text)
    runs = [read_run(tmp_path / arm / "seed-0") for arm in ("sft", "grpo")]
    assert runs[0].scores == {"a": 1, "b": 0.5} and runs[0].consistent == {"a": 1, "b": 0}
    study = Study(runs)
    assert study.shown == ["direction", ALL, CONSISTENT]
    assert [study.accuracy(arm).mean for arm in ("sft", "grpo")] == [0.75, 0.5]
    assert [study.accuracy(arm, CONSISTENT).mean for arm in ("sft", "grpo")] == [0.5, 0]
    assert study.accuracy("sft").num_samples == 2, "scenes are drawn, not views"
    samples = [line["sample"] for line in lines]
    assert chance_by_group(samples) == {"direction": 0.5, CONSISTENT: 0.25}
    assert CONSISTENT in study_figures(study, chance=chance_by_group(samples))["chance"]


def test_what_cannot_be_compared_is_refused():
    runs = made_up({"sft": [0.5, 0.5], "contrastive": [0.5, 0.5]})
    with pytest.raises(UserError, match="no finished run"):
        Study([])
    with pytest.raises(UserError, match="contrastive 1"):
        Study(runs[:3])
    with pytest.raises(UserError, match="missing or doubled"):
        Study([*runs, runs[0]])
    other = Run("contrastive", 1, {"x": 1.0}, {"x": "clock"})
    with pytest.raises(UserError, match="contrastive with seed 1 was evaluated on other samples"):
        Study([*runs[:3], other])


# -- the script --------------------------------------------------------------------------

# stands for python in the script: notes each command, and leaves what the next one looks for
STAND_IN = """#!{python}
import json, sys
from pathlib import Path
program, *words = sys.argv[1:]
name = Path(program).name
if name == "-m":
    raise SystemExit(0)
with open({notes!r}, "a") as file:
    file.write(json.dumps([name, *words]) + "\\n")
if name == "make_scenes_model.py":
    Path(words[0]).mkdir(parents=True)
elif name != "study_spatial_report.py":
    folder = Path(words[words.index("--output-dir") + 1])
    (folder / "checkpoints/step-00000002").mkdir(parents=True, exist_ok=True)
    (folder / "report.json").touch()
"""


def commands_of(tmp_path, *options, script="study_spatial.sh", **environment):
    """Return the commands that the script gives, without running any."""
    venv, notes = tmp_path / "venv", tmp_path / "notes.jsonl"
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    python = venv / "bin" / "python"
    python.write_text(STAND_IN.format(python=sys.executable, notes=str(notes)))
    python.chmod(0o755)
    mark_ready(venv)
    notes.write_text("")
    mine = {"STAGELINE_VENV": str(venv), "STUDY_DIR": str(tmp_path / "study"), **environment}
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        ["bash", str(ROOT / "examples/spatial" / script), *options],
        env={**kept, **mine}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done, [json.loads(line) for line in notes.read_text().splitlines()]


def test_the_commands_of_the_script_run_and_are_reported(tmp_path, monkeypatch):
    """One seed, two steps: model, both arms, evaluation, report."""
    monkeypatch.setattr(small_run, "draws", True)
    few = ("--total-steps", "2", "--warmup-steps", "1", "--device", "cpu", "--timeline-step", "0")
    more = ("--dataset.num_train", "24", "--batch-size", "8", "--micro-batch-size", "4")
    _, commands = commands_of(tmp_path, "--seeds", "0", *few, *more, NUM_TEST="10")
    folder = tmp_path / "study"
    shutil.rmtree(folder)  # the stand-in made this folder
    run_all(commands)
    text = (folder / "report.md").read_text()
    assert "| sft | 0 | 2 |" in text and "| contrastive | 0 | 2 |" in text
    assert "nothing can be said" in text, "of one seed"
    figures = json.loads((folder / "report.json").read_text())
    tasks = {"direction", "clock", "statement", "picture", "facing"}
    assert {group.removesuffix(", new") for group in figures["chance"]} == {*tasks, ALL}
    logs = [
        [json.loads(line) for line in (folder / arm / "seed-0/log.jsonl").open()]
        for arm in ("sft", "contrastive")
    ]
    first = [next(row for row in log if row["kind"] == "train") for log in logs]
    # same weights, same pictures, same order: the same next-token loss before training
    assert first[0]["loss"] == pytest.approx(first[1]["token_loss"], rel=1e-6)
    assert first[0]["num_tokens"] == first[1]["num_tokens"]
    for name in ("accuracy.png", "loss.png"):
        Image.open(folder / name).verify()


def run_all(commands):
    for name, *words in commands:
        if name == "make_scenes_model.py":
            words[0] = words[0].removesuffix(".tmp")
        is_entry = not name.startswith(("make", "study"))
        program = ROOT / name if is_entry else ROOT / "examples/spatial" / name
        ranks = 2 if name == "train_pp.py" else 1
        done = ForkedRun([str(program), *words], ranks=ranks).wait(120)
        assert done.code == 0, done.out + done.err


def test_the_rewarded_commands_run_and_are_reported(tmp_path):
    """Two steps of rewards, on random weights, with evaluation and report."""
    few = {"SEEDS": "0", "STEPS": "2", "NUM_TEST": "8"}
    short = ("--dataset.num_test", "4", "--timeline-step", "0")
    _, commands = commands_of(tmp_path, *short, script="train_grpo_scenes.sh", **few)
    folder = tmp_path / "study"
    shutil.rmtree(folder)  # the stand-in made this folder
    model, _, _, _, _, grpo, evaluated, _, _, report = commands
    grpo[grpo.index("--model-path") + 1] = str(folder / "random/seed-0")
    checkpoint = folder / "grpo/seed-0/checkpoints/step-00000002"
    evaluated[evaluated.index("--model-path") + 1] = str(checkpoint)
    run_all([model, grpo, evaluated, report])
    figures = json.loads((folder / "report.json").read_text())
    tasks = {"direction", "direction, new", "statement", "statement, new"}
    assert figures["chance"] == {**dict.fromkeys([*tasks, ALL], 0.5), CONSISTENT: 0.25}
    rows = [json.loads(line) for line in (folder / "grpo/seed-0/log.jsonl").open()]
    for row in rows:
        assert row["reward_spatial_consistency"] is not None, "views of a scene stay together"
    answers = [json.loads(line) for line in (folder / "grpo/seed-0/samples.jsonl").open()]
    pairs = [(one["id"], two["id"]) for one, two in zip(answers[::2], answers[1::2], strict=True)]
    assert all(int(b.split("-")[-1]) == int(a.split("-")[-1]) + 1 for a, b in pairs)
