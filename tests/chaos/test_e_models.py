"""Resuming other models: tied weights, experts, a frozen tower, adapters over a random start."""

import json
import shutil

import pytest
import torch

from stageline.checkpoint.adapter import find_base
from tests.helpers.small_run import Job, assert_same_tensors, saved_tensors
from tests.helpers.tiny_models import tiny_config, tiny_processor

STEPS = 4
SHORT = ("--total-steps", STEPS)
KILL = "at=step,step=3,do=sigkill"
RESUME = ("--resume", "auto")


def last(job, name, step=STEPS):
    return job.folder / name / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize("family", ["mixtral", "gemma2"])
def test_d12_tied_weights_and_experts_over_other_stages(family, tmp_path):
    """To the bit on the same two stages; on three but for the order of sums."""
    job = Job(tmp_path, family=family, tied=family != "mixtral", num_layers=4)
    job.train("whole", *SHORT)
    theirs = saved_tensors(last(job, "whole"))
    for name, ranks in (("two", 2), ("three", 3)):
        job.train(name, *SHORT, "--resume", last(job, "whole", 2), ranks=ranks)
        expected = {step: loss for step, loss in job.losses("whole").items() if step > 2}
        ours = saved_tensors(last(job, name))
        assert ours.keys() == theirs.keys(), "tied weights and their moments are saved once"
        if ranks == 2:
            assert job.losses(name) == expected
            assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
        assert job.losses(name) == pytest.approx(expected, rel=1e-5)
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=1e-5, msg=key)


def test_an_adapter_over_a_base_that_started_at_random(tmp_path):
    """Save the base once, next to the checkpoints, and load it from there."""
    job = Job(tmp_path)
    start = (*SHORT, "--model-path", "", "--config-path", job.model, "--llm-lora-num", 1)
    job.train("whole", *start)
    assert job.fork("parts", *start, chaos=KILL, waits=True).code != 0
    job.train("parts", *start, *RESUME, ranks=1)
    assert job.losses("parts") == job.losses("whole")
    assert_same_tensors(last(job, "parts"), last(job, "whole"))
    bases = [job.folder / name / "base" for name in ("whole", "parts")]
    assert len(saved_tensors(bases[0])) > 20
    assert_same_tensors(*bases)
    for name, base in zip(("whole", "parts"), bases, strict=True):
        assert json.loads((last(job, name) / "manifest.json").read_text())["base"] == str(base)
    # another run takes the folder of one that was moved
    (job.folder / "whole").rename(job.folder / "moved")
    shutil.rmtree(last(job, "moved"))
    job.train("whole", *start, "--seed", 5, "--total-steps", 1, ranks=1)
    assert find_base(last(job, "moved", 2)) == job.folder / "moved" / "base"
    job.train("moved", *start, *RESUME, ranks=1)
    assert job.losses("moved") == job.losses("parts")
    shutil.rmtree(job.folder / "moved" / "base")
    done = job.fork("moved", *start, *RESUME, ranks=1)
    assert done.code == 4 and "or is another one now" in done.err, done.err


def test_e12_a_frozen_tower(tmp_path):
    """A vision-language model on pictures: equal after a resume, the tower as it was."""
    job = Job(tmp_path, make_model=False)
    job.family = "internvl"
    processor = tiny_processor("internvl")
    folder = tmp_path / "vlm"
    processor.save_pretrained(folder)
    tiny_config("internvl", vocab_size=len(processor.tokenizer)).save_pretrained(folder)
    options = (
        *("--model-path", "", "--config-path", folder, "--dataset", "digits", "--parts.vit.frozen"),
        *("--prompt", "digits", "--image-token", "auto", "--dataset-path", "", "--batch-size", 4),
        *("--micro-batch-size", 2, "--max-token-num", 96, "--total-steps", 2, "--save-steps", 1),
    )
    job.train("whole", *options)
    rest = job.resume("whole", *options, step=1, ranks=1)
    assert job.losses(rest).items() <= job.losses("whole").items()
    assert_same_tensors(last(job, rest, 2), last(job, "whole", 2))
    before, after = (saved_tensors(last(job, "whole", step)) for step in (1, 2))
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert any("language_model" in name for name in moved)
    tower = [name for name in after if "vision" in name]
    assert tower and not moved & set(tower)
