"""check_model.py: right splits pass; each kind of wrong one fails, and the report says why."""

import json
import re
from pathlib import Path

import pytest

from commands import check as check_model
from parse_args import parse_check_args
from pp_models import CausalLMStage
from register import import_shelf, train_model_register
from stageline.data.text.processor import save_processor
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_config, tiny_processor, tiny_tokenizer

import_shelf(*check_model.SHELF)
ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "add_a_model.md"


def check(folder, words, *, model=None):
    """Return (exit code, report) of a check with these options."""
    options = [*words.split(), "--output-dir", str(folder / "out")]
    if model is not None:
        options += ["--model-path", str(model)]
    code = check_model.check(*check_model.resolve_schedule(parse_check_args(options)))
    return code, json.loads((folder / "out" / "check.json").read_text())


def failed(report):
    """Name -> what is said about it, of the rows that failed."""
    return {
        row["name"]: "\n".join([row["figure"], *row["details"]])
        for row in report["checks"]
        if row["result"] == "FAILED"
    }


def assert_passed(code, report):
    assert (code, failed(report)) == (0, {}), report
    assert report["passed"] and len(report["checks"]) >= 7
    assert {row["result"] for row in report["checks"]} == {"ok"}


@pytest.fixture
def llama(tmp_path):
    tiny_whole("llama", tmp_path / "llama", max_shard_size="1GB")
    return tmp_path / "llama"


def test_a_right_split_passes(llama, tmp_path):
    """One norm over adapters and a head, with several stages a rank."""
    words = "--num-stages 4 --schedule interleaved_1f1b --llm-lora-num 1 --lora.dropout 0.1"
    code, report = check(tmp_path, f"--train-model causal_lm {words}", model=llama)
    assert_passed(code, report)
    assert report["facts"]["compared with"].startswith("LlamaForCausalLM of transformers")
    for row in report["checks"]:
        if row["name"].startswith(("weights", "hidden states", "loss of", "gradients")):
            assert "equal to the bit" in row["figure"]


def test_tied_weights_pass_within_the_tolerance(tmp_path):
    tiny_whole("qwen3", tmp_path / "tied", tied=True)
    words = "--train-model qwen3 --num-stages 3 --partition 1,2,1"
    assert_passed(*check(tmp_path, words, model=tmp_path / "tied"))


def test_a_vision_model_is_checked_with_random_pictures_and_fewer_layers(tmp_path):
    processor = tiny_processor("internvl")
    save_processor(processor, tmp_path / "model")
    sizes = {"vocab_size": len(processor.tokenizer), "max_position_embeddings": 512}
    tiny_config("internvl", **sizes).save_pretrained(tmp_path / "model")
    words = f"--train-model internvl --config-path {tmp_path / 'model'} --check.layers 2"
    code, report = check(tmp_path, words)
    assert_passed(code, report)
    assert "image changes the loss" in [row["name"] for row in report["checks"]]
    assert "cut from 4 to 2 layers" in report["notes"][0]


# -- parts with a mistake -----------------------------------------------------------------------


class ScalesAtTheBorder(CausalLMStage):
    def forward(self, hidden_or_ids, **batch):
        output = super().forward(hidden_or_ids, **batch)
        return output if self.is_last else output * 1.001


class CutsTheGraph(CausalLMStage):
    def forward(self, hidden_or_ids, **batch):
        cut = hidden_or_ids if self.is_first else hidden_or_ids.detach()
        return super().forward(cut, **batch)


class LosesTheFirstToken(CausalLMStage):
    """Each token sees itself alone, and the first one is another."""

    def forward(self, hidden_or_ids, **batch):
        if self.is_first:
            hidden_or_ids = hidden_or_ids.clone()
            hidden_or_ids[:, 0] = 9
        return super().forward(hidden_or_ids, **batch)


class SeesPadding(CausalLMStage):
    def forward(self, hidden_or_ids, **batch):
        output = super().forward(hidden_or_ids, **batch)
        return output if self.is_last else output + output.mean(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("part", "row", "said"),
    [
        (ScalesAtTheBorder, "hidden states between stages", "stage 0 -> 1 (stage 0): "),
        (CutsTheGraph, "gradients of 1 steps", "model.embed_tokens.weight (stage 0): step 1"),
        (LosesTheFirstToken, "first token changes the loss", "->"),
        (SeesPadding, "padding changes nothing", "apart"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_part_fails_and_the_report_says_what(part, row, said, llama, tmp_path):
    train_model_register["wrong"] = part.build
    words = "--train-model wrong --num-stages 2 --check.steps 1"
    code, report = check(tmp_path, words, model=llama)
    assert code == 1 and not report["passed"]
    assert said in failed(report)[row], report


# -- components of a user, without a model of transformers ---------------------------------------


@pytest.fixture
def guide(tmp_path):
    """Return the model folder of docs/add_a_model.md, and its file's text."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "my_model")
    config = {"model_type": "gru_lm", "vocab_size": len(tokenizer)}
    (tmp_path / "my_model" / "config.json").write_text(json.dumps(config))
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[0]


def test_a_parameter_that_nothing_uses_is_named(guide, tmp_path):
    part = guide.replace('"gru_lm"', '"gru_with_more"').replace(
        "        self.to(self.dtype)",
        "                self.unused = nn.Linear(3, 3)\n        self.to(self.dtype)",
    )
    (tmp_path / "my_parts_with_more.py").write_text(part)
    config = (tmp_path / "my_model" / "config.json").read_text().replace("lm", "with_more")
    (tmp_path / "my_model" / "config.json").write_text(config)
    words = f"--import {tmp_path / 'my_parts_with_more.py'} --train-model gru_with_more"
    code, report = check(tmp_path, f"{words} --config-path {tmp_path / 'my_model'}")
    assert code == 1 and list(failed(report)) == ["trained ones have a gradient"]
    assert "unused.weight (stage 1) has none" in failed(report)["trained ones have a gradient"]
