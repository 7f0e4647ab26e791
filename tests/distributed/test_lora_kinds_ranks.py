"""DoRA, PiSSA, modules trained whole, initial adapters and noise: through train_pp, resumed."""

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from stageline.checkpoint.plain_model import load_plain
from tests.helpers.small_run import Job, saved_tensors

KINDS = (
    "--llm-lora-num 1 --lora.rank 2 --lora.init pissa --lora.use_rslora --lora.use_dora "
    "--lora.dropout 0.1 "
    "--lora.exclude o_proj --lora.modules_to_save embed_tokens --parts.lm_head.frozen "
    "--neftune-alpha 5 --total-steps 4 --save-steps 2"
).split()
IDS = torch.arange(12).reshape(2, 6) + 3


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("job"))
    for ranks in (1, 2):
        job.train(f"on{ranks}", *KINDS, ranks=ranks)
    return job


def checkpoint(job, name, step=4):
    return job.folder / name / "checkpoints" / f"step-{step:08d}"


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **tolerance, msg=lambda m, n=name: n + m)


def test_two_ranks_train_as_one(job):
    one, two = (saved_tensors(checkpoint(job, name)) for name in ("on1", "on2"))
    kept = {name: value for name, value in one.items() if not name.startswith("training_state")}
    found = {name: value for name, value in two.items() if not name.startswith("training_state")}
    assert any("lora_magnitude_vector" in name for name in kept)
    assert any("embed_tokens" in name for name in kept)
    assert not any("o_proj" in name for name in kept)
    assert_same(found, kept, rtol=1e-5, atol=1e-6)


def test_resumed_it_ends_the_same(job):
    job.train("resumed", *KINDS, "--resume", checkpoint(job, "on2", step=2))
    expected, found = (saved_tensors(checkpoint(job, name)) for name in ("on2", "resumed"))
    assert_same(found, expected, rtol=0, atol=0)


def test_peft_puts_it_on_the_first_base(job):
    folder = checkpoint(job, "on2")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(job.model.resolve())
    base = AutoModelForCausalLM.from_pretrained(job.model)
    found = logits(peft.PeftModel.from_pretrained(base, folder))
    torch.testing.assert_close(found, logits(load_plain(folder)), rtol=1e-4, atol=1e-5)


def test_a_run_on_adapters_merges_goes_on_and_resumes(job):
    first = checkpoint(job, "on2")
    words = ["--adapter-path", f"{checkpoint(job, 'on1', step=2)},{first}"]
    words += "--parts.lm_head.frozen --total-steps 4 --save-steps 2".split()
    done = job.train("next", *words)
    assert "merged " in done.out
    assert "decides: DoRA on" in done.out
    folder = checkpoint(job, "next")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(job.folder / "next" / "base")
    job.train("next_resumed", *words, "--resume", checkpoint(job, "next", step=2))
    expected, found = (saved_tensors(checkpoint(job, name)) for name in ("next", "next_resumed"))
    assert_same(found, expected, rtol=0, atol=0)
    base = AutoModelForCausalLM.from_pretrained(job.folder / "next" / "base")
    theirs = logits(peft.PeftModel.from_pretrained(base, folder))
    torch.testing.assert_close(theirs, logits(load_plain(folder)), rtol=1e-4, atol=1e-5)
