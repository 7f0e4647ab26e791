"""train_pp.py with replicas: the same run as one process with the same global batch."""

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from commands import train as train_pp  # noqa: F401 - its engines
from tests.helpers.small_run import Job
from tests.helpers.warm_start import launch

OPTIONS = (
    "--micro-batch-size 2 --total-steps 3 --learning-rate 1e-3 --eval-samples 4 --eval-steps 2"
).split()


EXACT = ("step", "num_tokens", "num_targets", "num_samples", "token_accuracy")


def test_sharded_replicas_train_and_save_what_one_process_does(tmp_path):
    """Let the number of replicas follow from that of torchrun's processes."""
    job = Job(tmp_path)
    job.train("alone", *OPTIONS, ranks=1)
    words = (*OPTIONS, "--batch-size", 4, "--num-stages", 1, "--dp-shard")
    run = launch(job, "sharded", *words, torchrun=(2,))
    done = run.finish()
    assert done.code == 0, done.out + done.err
    told = done.out.count("held-out loss"), done.out.count("saved ")
    assert told == (4, 2), "rank 0 alone speaks, at the end once more"
    for of_log in ("train", "eval"):
        records = job.records("sharded", of_log), job.records("alone", of_log)
        for ours, theirs in zip(*records, strict=True):
            assert ours.keys() == theirs.keys()
            assert [ours.get(key) for key in EXACT] == [theirs.get(key) for key in EXACT]
            for key in {"loss", "grad_norm"} & set(theirs):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-6), key
    config = yaml.safe_load((job.folder / "sharded" / "config.yaml").read_text())
    assert (config["dp-degree"], config["dp-shard"]) == (2, True)
    assert (job.folder / "sharded" / "samples" / "step-00000003.png").is_file()
    for step in job.checkpoints("alone"):
        folders = [job.folder / name / "checkpoints" / step for name in ("sharded", "alone")]
        ours, theirs = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in folders)
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6, msg=name)
