"""Stages whose names do not add up to the whole model are refused before step 1, and on save."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import nn

from pp_models import StageModel
from stageline.checkpoint.files import weight_files
from stageline.checkpoint.save import save_split_model
from stageline.errors import UserError
from tests.helpers.forked_entry import run_entry
from tests.helpers.small_run import ForkedRun, Job
from tests.helpers.tiny_models import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = (
    "--train-model gru_lm --dataset counting --loss-fn smoothed --prompt text --prompt-fn fill "
    "--image-token none --collate-fn sft --batch-size 8 --micro-batch-size 2 --total-steps 2 "
    "--save-steps 2 --device cpu --num-stages 2 --output-dir run"
)
START = ("--config-path", "my_model")


def guide():
    text = (ROOT / "docs" / "add_a_model.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the model of docs/add_a_model.md, its tokenizer and config."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "my_model")
    config = {"model_type": "gru_lm", "vocab_size": len(tokenizer)}
    (tmp_path / "my_model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "my_parts.py").write_text(guide())
    return tmp_path


def change(folder, *pairs):
    """Changes the part: (text, what comes in its place)."""
    text = (folder / "my_parts.py").read_text()
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after)
    (folder / "my_parts.py").write_text(text)


def train(folder, *options):
    command = [str(ROOT / "train_pp.py"), "--import", "my_parts.py", *OPTIONS.split()]
    return run_entry([*command, *options], cwd=folder)


def refused(folder, done, *words, code=2):
    """Return the output of a run that was refused before step 1."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert not list((folder / "run").glob("checkpoints/step-*"))
    log = folder / "run" / "log.jsonl"
    assert not log.exists() or "train" not in log.read_text()
    return done.stderr


PLACES = "GruBlock(config.width) if index in self.layers else PassThrough()"


def test_stages_that_own_the_same_layers_are_refused(folder):
    change(folder, (PLACES, "GruBlock(config.width)"))
    said = refused(folder, train(folder, *START), "blocks.0.norm.weight on stages 0, 1")
    assert "24 names on several stages" in said and "ModuleList" in said


TIE = (
    ("if self.is_first:\n                self.embed", "if self.is_first or self.is_last:\n"
     "                self.embed"),
    ("self.head = nn.Linear(config.width, config.vocab_size)", "pass"),
    ("self.head(hidden) if", "nn.functional.linear(hidden, self.embed.weight) if"),
)  # fmt: skip


def test_a_tie_has_to_be_declared(folder):
    change(folder, *TIE)
    refused(folder, train(folder, *START), "embed.weight on stages 0, 1", "shared_names")
    change(folder, ('    def parts(self)', '    shared_names = frozenset({"embed.weight"})\n\n'
                    "    def parts(self)"))  # fmt: skip
    done = train(folder, *START)
    assert done.returncode == 0, done.stderr
    saved = {}
    for file in (folder / "run").glob("checkpoints/*2/*.safetensors"):
        saved.update(load_file(file))
    assert len(saved) == 25 and "embed.weight" in saved


FORGETS = """
from pp_models import CausalLMStage
from register import train_model_register
from stageline.modules.pass_through import PassThrough


class Forgets(CausalLMStage):
    def prune(self, whole):
        super().prune(whole)
        if self.num_stages > 1:
            whole.model.layers[2] = PassThrough()


train_model_register["forgets"] = Forgets.build
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "forgets.py").write_text(FORGETS)
    return Job(tmp_path, num_layers=4)


def test_a_library_model_without_a_layer_does_not_answer(job):
    """Training and all that answers build their stages by one function."""
    words = "--engine pipeline --model generate --metric exact_match --prompt question --num-stages"
    words += " 2 --prompt-fn fill --dataset jsonl --image-token none --device cpu"
    words += f" --import {job.folder / 'forgets.py'} --train-model forgets"
    paths = ("--model-path", job.model, "--dataset-path", job.rows)
    words = [ROOT / "evaluate.py", *words.split(), *paths, "--output-dir", job.folder / "out"]
    done = ForkedRun([*map(str, words)], ranks=2).wait()
    assert done.code == 2 and "Traceback" not in done.err, done.err
    assert "9 on no stage (model.layers.2.self_attn.q_proj.weight, " in done.err


def test_stages_that_do_not_add_up_are_not_saved(tmp_path):
    """Refuse in the save itself: two stages hold the same names, and a folder has each once."""
    stages = [Own(None, stage=stage, num_stages=2) for stage in range(2)]
    for model in stages:
        model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    with pytest.raises(UserError, match="4 names on several stages .layers.0.weight on stages"):
        save_split_model(stages, None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    Own.shared_names = frozenset(stages[0].state_dict())
    save_split_model(stages, None, tmp_path / "out")
    assert set(weight_files(tmp_path / "out")) == Own.shared_names


class Own(StageModel):
    def num_layers(self):
        return 4

    def parts(self):
        return {"llm": ["layers"]}


def test_a_resumed_run_is_refused_before_it_loads(folder):
    assert train(folder, *START).returncode == 0
    before = sorted((folder / "run" / "checkpoints").iterdir())
    change(folder, (PLACES, "GruBlock(config.width)"))
    done = train(folder, *START, "--resume", "auto", "--total-steps", "4", "--allow-changes")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "blocks.0.norm.weight on stages 0, 1" in done.stderr
    assert sorted((folder / "run" / "checkpoints").iterdir()) == before
