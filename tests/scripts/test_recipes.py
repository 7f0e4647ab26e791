"""The shipped recipes: they parse, their options exist, and the default job runs end to end."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from options.answer import ChatConfig, EvaluateConfig, InferConfig
from options.corpus import ACTIONS
from options.serve import ServeConfig
from options.train import CheckConfig, RunConfig
from register import ALL_REGISTERS
from stageline.corpus.corpus_files import open_corpus
from stageline.corpus.encoder import load_encoder
from tests.helpers.forked_entry import run_entry
from tests.helpers.ready_venv import NotingVenv

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts").glob("*.slurm")])
SCRIPTS += sorted((ROOT / "examples").glob("*/*.sh"))
EXPORT_OPTIONS = {
    *("model-path", "output-path", "merge", "dtype", "verify", "trust-remote-code"),
    *("adapter-path", "adapter-weights", "max-shard-size", "overwrite"),
}
SPECIAL = {"config", "import", "help", "list"}
PROGRAMS = {
    "train_pp.py": RunConfig,
    "stageline check": CheckConfig,
    "evaluate.py": EvaluateConfig,
    "stageline infer": InferConfig,
    "stageline chat": ChatConfig,
    "serve.py": ServeConfig,
    "export.py": None,
    "corpus.py": None,
}
CORPUS_OPTIONS = {
    *(field.name.replace("_", "-") for one in ACTIONS.values() for field in fields(one)),
    *("language", "document", "dataset", "splitter"),
}


def known_options(program):
    config = PROGRAMS[program]
    if program == "corpus.py":
        return CORPUS_OPTIONS | SPECIAL
    if config is None:
        return EXPORT_OPTIONS
    names = {field.name.replace("_", "-") for field in fields(config)}
    return names | {name.replace("_", "-") for name in ALL_REGISTERS} | SPECIAL


def commands(text):
    """Yield (program, options) of each call of an entry file in a script."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        for program in PROGRAMS:
            # benchmarks/corpus.py is another one
            if re.search(rf"(?<!benchmarks/){program}", line) and not line.strip().startswith("#"):
                yield program, re.findall(r"--([a-z][a-z0-9-]+)", line.split(program, 1)[1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    "script",
    [*ROOT.glob("scripts/*.py"), *ROOT.glob("examples/*/make_*.py")],
    ids=lambda path: path.name,
)
def test_help_of_a_script_makes_no_file(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"usage: {script.name}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_options_of_a_script_exist(path):
    for program, options in commands(path.read_text(encoding="utf-8")):
        unknown = set(options) - known_options(program)
        assert not unknown, f"{program} has no {unknown}"


def run(script, *options, **environment):
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / script), *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


def run_noted(folder, script, *options, **environment):
    """Run the command lines of a script one after the other in forks of this process."""
    venv = NotingVenv(folder)
    told = run(script, *options, STAGELINE_VENV=str(venv.folder), **environment)
    assert told.returncode == 0, told.stdout + told.stderr
    for words in venv.commands():
        done = run_entry(words)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not (ROOT / ".venv").is_dir(), reason="the scripts' environment is not there")
def test_the_default_job_trains_and_is_evaluated(tmp_path):
    folder = tmp_path / "run"
    steps = ("--total-steps", "2", "--warmup-steps", "1")
    sizes = ("--batch-size", "8", "--micro-batch-size", "4", "--eval-samples", "4")
    options = (*steps, *sizes, "--timeline-step", "0", "--output-dir", str(folder))
    trained = run("train_pp.sh", *options)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    for name in ("config.yaml", "log.jsonl", "loss.png", "samples/step-00000002.png"):
        assert (folder / name).is_file(), name
    checkpoint = folder / "checkpoints" / "step-00000002"
    run_noted(tmp_path, "evaluate.sh", "--limit", "6", MODEL_PATH=str(checkpoint))
    report = json.loads((folder / "evaluation" / "report.json").read_text())
    assert report["num_samples"] == 6 and 0 <= report["score"] <= 1
    assert len((folder / "evaluation" / "predictions.jsonl").read_text().splitlines()) == 6


def test_the_guides_become_a_corpus_of_two_types(tmp_path):
    run_noted(tmp_path, "build_corpus.sh", "--num-workers", "0", SAVE_PATH=str(tmp_path))
    corpus = open_corpus(tmp_path / "guides")
    assert [kind.name for kind in corpus.header.types] == ["guides-0-english", "guides-1-chinese"]
    texts = [json.loads(line)["text"] for line in (tmp_path / "chinese.jsonl").open()]
    encoder = load_encoder(tmp_path / "tokenizer")
    documents = corpus.documents(int(corpus.type_starts[1]))
    assert [encoder.decode(corpus.document_tokens(*pair)) for pair in documents] == texts
    assert (tmp_path / "guides.stats.png").is_file()
