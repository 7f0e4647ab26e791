"""Resuming other models: tied weights, experts, a frozen tower, adapters over a random start."""

import json
import shutil

import pytest
import torch

from stageline.checkpoint.adapter import find_base
from tests.helpers.small_run import Job, saved_tensors
from tests.helpers.tiny_models import tiny_config, tiny_processor

KILL = "at=step,step={},do=sigkill"
RESUME = ("--resume", "auto")


def last(job, name, step=12):
    return job.folder / name / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize("family", ["mixtral", "gemma2"])
def test_d12_tied_weights_and_experts_over_other_stages(family, tmp_path):
    """Two stages, then three: as one stage throughout, but for the order of sums."""
    job = Job(tmp_path, family=family, tied=family != "mixtral", num_layers=4)
    job.train("whole", ranks=1)
    assert job.fork("parts", ranks=2, chaos=KILL.format(7), waits=True).code != 0
    done = job.fork("parts", *RESUME, ranks=3)
    assert done.code == 0 and "6 of 12 steps are done" in done.out, done.err
    assert job.losses("parts") == pytest.approx(job.losses("whole"), rel=1e-5)
    ours, theirs = saved_tensors(last(job, "parts")), saved_tensors(last(job, "whole"))
    assert ours.keys() == theirs.keys(), "tied weights and their moments are saved once"
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-5, msg=name)


def test_tied_weights_stay_equal_to_the_bit_on_the_same_stages(tmp_path):
    """Both copies of a tied weight, and their moments, come from one."""
    job = Job(tmp_path, tied=True, num_layers=4)
    job.train("whole", ranks=2)
    rest = job.resume("whole", step=4, ranks=2)
    ours, theirs = saved_tensors(last(job, rest)), saved_tensors(last(job, "whole"))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert job.losses(rest).items() <= job.losses("whole").items()


def test_an_adapter_over_a_base_that_started_at_random(tmp_path):
    """Save the base once, next to the checkpoints, and load it from there."""
    job = Job(tmp_path, num_layers=4)
    start = ("--model-path", "", "--config-path", job.model, "--llm-lora-num", 1)
    assert job.fork("whole", *start, ranks=2).code == 0
    assert job.fork("parts", *start, ranks=2, chaos=KILL.format(7), waits=True).code != 0
    done = job.fork("parts", *start, *RESUME, ranks=1)
    assert done.code == 0, done.err
    assert job.losses("parts") == job.losses("whole")
    ours, theirs = saved_tensors(last(job, "parts")), saved_tensors(last(job, "whole"))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    bases = [job.folder / name / "base" for name in ("whole", "parts")]
    whole, parts = map(saved_tensors, bases)
    assert len(whole) > 20 and all(torch.equal(parts[name], whole[name]) for name in whole)
    for name in ("whole", "parts"):
        manifest = json.loads((last(job, name) / "manifest.json").read_text())
        assert manifest["base"] == str(job.folder / name / "base")
    # another run takes the folder of one that was moved
    (job.folder / "whole").rename(job.folder / "moved")
    shutil.rmtree(last(job, "moved"))
    assert job.fork("whole", *start, "--seed", 5, "--total-steps", 1, ranks=1).code == 0
    assert find_base(last(job, "moved", 10)) == job.folder / "moved" / "base"
    done = job.fork("moved", *start, *RESUME, ranks=1)
    assert done.code == 0 and job.losses("moved") == job.losses("parts"), done.err
    shutil.rmtree(job.folder / "moved" / "base")
    done = job.fork("moved", *start, *RESUME, ranks=1)
    assert done.code == 4 and "or is another one now" in done.err, done.err


def test_e12_a_frozen_tower(tmp_path):
    """A vision-language model on pictures: equal after a resume, the tower as it was."""
    job = Job(tmp_path, num_layers=4)
    job.family = "internvl"
    processor = tiny_processor("internvl")
    folder = tmp_path / "vlm"
    processor.save_pretrained(folder)
    config = tiny_config("internvl", vocab_size=len(processor.tokenizer))
    config.save_pretrained(folder)
    options = (
        *("--model-path", "", "--config-path", folder, "--dataset", "digits", "--parts.vit.frozen"),
        *("--prompt", "digits", "--image-token", "auto", "--dataset-path", "", "--batch-size", 8),
        *("--max-token-num", 96, "--total-steps", 4, "--save-steps", 2),
    )
    job.train("whole", *options, ranks=2)
    rest = job.resume("whole", *options, step=2, ranks=1)
    assert job.losses(rest).items() <= job.losses("whole").items()
    before = saved_tensors(last(job, "whole", 2))
    ours, theirs = saved_tensors(last(job, rest, 4)), saved_tensors(last(job, "whole", 4))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    moved = {name for name in theirs if not torch.equal(before[name], theirs[name])}
    assert any("language_model" in name for name in moved)
    tower = [name for name in theirs if "vision" in name]
    assert tower and not moved & set(tower)
