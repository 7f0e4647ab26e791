"""The split check at the start: every entry file refuses a split that computes something else."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from commands.export import make_stages
from register import import_shelf, train_model_register
from stageline.errors import UserError
from tests.helpers.small_run import ForkedRun, Job

ROOT = Path(__file__).resolve().parents[2]
TWICE = """
from pp_models import CausalLMStage
from register import train_model_register


class Twice(CausalLMStage):
    def forward(self, hidden_or_ids, *extras, **batch):
        if self.stage > 0:  # as if its model multiplied what it takes for embeddings
            hidden_or_ids = hidden_or_ids * 3.0
        return super().forward(hidden_or_ids, *extras, **batch)


class Other(CausalLMStage):
    def forward(self, hidden_or_ids, *extras, **batch):
        output = super().forward(hidden_or_ids, *extras, **batch)
        return output * 3.0 if self.is_last else output


train_model_register["twice"] = Twice.build
train_model_register["other"] = Other.build
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("STAGELINE_PROVE_SPLIT", "auto")
    monkeypatch.setenv("STAGELINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "twice.py").write_text(TWICE)
    return Job(tmp_path)


ONE = ("--total-steps", 1)


def records(job):
    return list((job.folder / "cache").rglob("*.json"))


def fork(words, job, key, *options):
    more = ["--import", job.folder / "twice.py", "--train-model", key, *options]
    return ForkedRun([*map(str, [*words, *more])], ranks=2).wait()


def refused(done):
    assert done.code == 2 and "Traceback" not in done.err, done.out + done.err
    for word in (
        "the split of llama by Twice does not compute what Llama of transformers computes",
        "stage 1 gives another loss",
        "first gradient that differs is that of model.embed_tokens.weight",
    ):
        assert word in done.err, done.err


def test_a_wrong_split_is_not_trained(job):
    done = fork(job.command("out", "--num-stages", 2)[1:], job, "twice")
    refused(done)
    assert job.checkpoints("out") == [] and records(job) == []


def test_a_wrong_split_does_not_answer(job):
    words = ("--model-path", job.model, "--num-stages", 2, "--device", "cpu")
    refused(fork([ROOT / "serve.py", *words], job, "twice"))


def test_a_wrong_split_is_not_exported(job, monkeypatch):
    import_shelf("pp_models")
    spec = importlib.util.spec_from_file_location("twice", job.folder / "twice.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # export.py has no --import
    for key in ("llama", "causal_lm"):
        entry = replace(train_model_register.entry(key), part=train_model_register["twice"])
        monkeypatch.setitem(train_model_register.data, key, entry)
    with pytest.raises(UserError, match="does not compute what Llama of transformers computes"):
        make_stages(job.model)


def test_never_says_so_loudly_and_runs(job):
    done = fork(
        job.command("out", "--num-stages", 2)[1:], job, "twice", "--prove-split", "never", *ONE
    )
    assert done.code == 0, done.err
    assert done.out.count("WARNING: --prove-split never") == 1
    assert records(job) == []


def test_a_proof_is_recorded_and_not_made_again(job):
    steps = ONE
    first = job.fork("one", *steps)
    assert first.code == 0 and "the split of llama" in first.out, first.out + first.err
    assert "equals Llama of transformers in loss" in first.out
    (record,) = records(job)
    told = json.loads(record.read_text())
    assert told["checks"]["loss and gradients"]["gradient"] <= 1e-9
    assert told["facts"]["partition"] == [1, 1]
    again = job.fork("two", *steps)
    assert again.code == 0 and "the split of llama" not in again.out
    other = job.fork("other", *steps, "--attention", "eager")  # another split
    assert "the split of llama" in other.out, other.out + other.err
    assert len(records(job)) == 2
    record.write_text(record.read_text()[:20])  # torn
    assert "the split of llama" in job.fork("torn", *steps).out
    assert len(records(job)) == 2


def test_a_part_that_differs_from_the_library_on_one_stage_too_is_compared_with_itself(job):
    done = fork(job.command("out", "--num-stages", 2, *ONE)[1:], job, "other")
    assert done.code == 0, done.err
    assert "equals the part on one stage" in done.out
