"""The divergence from a frozen copy of the start: that of plain transformers, in every split."""

import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stageline.modules.policy_loss import START
from stageline.training.rollouts import Rollouts
from tests.helpers.grpo_runs import (
    AHEAD,
    LORA,
    PARTS,
    REPLICAS,
    TWICE,
    ZBV,
    assert_same_but_for_sums,
    assert_same_bytes,
    records,
    run,
    samples,
    trained,
)
from tests.helpers.small_run import Job

FROZEN = (*TWICE, "--rollouts.kl_beta", 0.1)
MIXED = ("--llm-lora-num", 1)  # the head trains, too
BESIDE = {
    "full": FROZEN,
    "mixed": (*FROZEN, *MIXED),
    "ahead": (*AHEAD[:6], "--rollouts.kl_beta", 0.1),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    (folder / "parts.py").write_text(PARTS)
    made = Job(folder, num_layers=4)
    done = trained(made, "one", *TWICE, *LORA, ranks=1)
    assert "reference of the loss: adapters_off" in done.out
    return made


@pytest.fixture(scope="module")
def frozen(job):
    """Return the name of a run on one rank with a copy of the start weights, of each kind."""

    @functools.cache
    def made(kind):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rollouts, "_with_log_probs", against_plain_model(job.model))
            done = run(job, f"frozen {kind}", *BESIDE[kind], ranks=1)
        assert done.code == 0 and "reference of the loss: frozen_copy" in done.out, done.err
        return f"frozen {kind}"

    return made


def against_plain_model(folder, made=Rollouts._with_log_probs):
    """Return the method, with a check of log-probabilities against the plain start model."""

    def noted(self, batches):
        named = [pair for model in self.runner.local for pair in model.named_parameters()]
        before = [(p.detach().clone(), p.data_ptr()) for _, p in named]
        found = made(self, batches)
        for (name, parameter), (value, place) in zip(named, before, strict=True):
            assert torch.equal(parameter, value) and parameter.data_ptr() == place, name
        if self.answers.route[-1] == self.runner.pp_rank:
            plain = AutoModelForCausalLM.from_pretrained(folder).eval()
            for batch in found:
                assert_log_probs_of(plain, batch, self.options.sampling_temperature)
        return found

    return noted


@torch.no_grad()
def assert_log_probs_of(plain, batch, temperature):
    logits = plain(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    told = (logits[:, :-1] / temperature).log_softmax(-1)
    told = told.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    ours = batch[START][:, :-1]
    is_learnt = labels != -100
    assert is_learnt.any()
    torch.testing.assert_close(ours[is_learnt], told[is_learnt], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_the_divergence_from_a_copy_of_the_start(job, frozen, kind):
    steps = records(job, frozen(kind))
    assert steps[1]["kl"] == 0 and min(steps[step]["kl"] for step in (2, 3, 4)) > 1e-6
    assert steps[3]["ratio_gap"] == 0, "old log-probabilities are those of the weights"


def test_another_split_has_the_same_start(job, frozen, monkeypatch):
    """Two stages of 1f1b are in test_a_killed_run_has_the_start_of_its_first_one."""
    monkeypatch.setattr(Rollouts, "_with_log_probs", against_plain_model(job.model))
    options, ranks = ZBV
    trained(job, "frozen zbv", *BESIDE["full"], *map(str, options), ranks=ranks)
    assert_same_bytes(job, "frozen zbv", frozen("full"))


def test_replicas_have_the_same_start(job, frozen):
    name = "frozen replicas"
    trained(job, name, *BESIDE["full"], *REPLICAS, "--dp-shard", ranks=2)
    assert_same_but_for_sums(job, name, frozen("full"))
    ours, wanted = records(job, name), records(job, frozen("full"))
    for step, record in wanted.items():
        assert ours[step]["kl"] == pytest.approx(record["kl"], rel=1e-3, abs=1e-7)


def test_a_copy_of_adapters_is_as_good_as_none(job):
    """B is zero at the start: the copy gives what adapters off give, to the bit."""
    trained(job, "copied", *TWICE, *LORA, "--reference", "frozen_copy", ranks=2)
    assert_same_bytes(job, "copied", "one")


TWO_STEPS = ("--rollouts.inner_steps", 1, "--total-steps", 2, "--save-steps", 1)
ODD = {
    "tied": ("--schedule", "zbv", "--num-stages", 4),
    "random": ("--num-stages", 2, "--vocab.new_tokens", "<yes>,<no>", "--vocab.train_new"),
    "begun": ("--llm-lora-num", 1, "--parts.lm_head.frozen", "--bf16", *REPLICAS, "--dp-shard"),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_starts_are_found_again(job, kind, tmp_path):
    """Get the same bytes after a resume. Kills are in the last test."""
    made = Job(tmp_path, num_layers=4 if kind == "tied" else 2, tied=kind == "tied")
    (tmp_path / "parts.py").write_text(PARTS)
    options = (*FROZEN, *ODD[kind], *TWO_STEPS)
    if kind == "begun":
        adapter = job.folder / "one" / "checkpoints" / "step-00000004"
        options += ("--model-path", adapter, "--config-path", job.model)
    if kind == "random":
        tokenizer = ("--processor-path", made.model)
        shutil.copy(made.model / "config.json", tmp_path / "config.json")
        (made.model / "model.safetensors").unlink()
        options += ("--model-path", "", "--config-path", tmp_path / "config.json", *tokenizer)
    one = trained(made, "one", *options, ranks=2)
    assert "reference of the loss: frozen_copy" in one.out
    assert records(made, "one")[1]["kl"] == 0 and records(made, "one")[2]["kl"] > 0
    first = tmp_path / "one" / "checkpoints" / "step-00000001"
    done = trained(made, "two", *options, "--resume", first, ranks=2)
    assert "1 of 2 steps are done" in done.out
    answers = [samples(made, name).splitlines() for name in ("one", "two")]
    assert answers[1] == [line for line in answers[0] if json.loads(line)["step"] == 2]
    ours, wanted = weight_files(made, "two"), weight_files(made, "one")
    assert wanted and ours.keys() == wanted.keys()
    assert all(ours[path] == wanted[path] for path in wanted)


def weight_files(job, name):
    """Return the bytes of each file of weights and optimizer state (replicas save pieces)."""
    folder = job.folder / name / "checkpoints" / "step-00000002"
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")}


def refuses_another_start(job, name, *options, ranks):
    moved = job.folder / "another model"
    shutil.copytree(job.model, moved)
    values = load_file(moved / "model.safetensors")
    values["lm_head.weight"] += 0.01
    save_file(values, moved / "model.safetensors", metadata={"format": "pt"})
    done = run(job, name, *options, "--resume", "auto", "--model-path", moved, ranks=ranks)
    assert done.code != 0 and "start weights" in done.err, done.err


def test_a_killed_run_has_the_start_of_its_first_one(job, frozen, monkeypatch):
    """Answers are drawn ahead."""
    monkeypatch.setattr(Rollouts, "_with_log_probs", against_plain_model(job.model))
    chaos = "at=forward,rank=0,step=2,do=sigkill"
    killed = run(job, "killed", *BESIDE["ahead"], chaos=chaos, waits=True)
    assert killed.code != 0 and job.checkpoints("killed") == ["step-00000002"]
    refuses_another_start(job, "killed", *BESIDE["ahead"], ranks=2)
    done = trained(job, "killed", *BESIDE["ahead"], "--resume", "auto")
    assert "2 of 4 steps are done" in done.out
    assert_same_bytes(job, "killed", frozen("ahead"))
