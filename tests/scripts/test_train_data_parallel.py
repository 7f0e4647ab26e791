"""train_pp.py with replicas: the same run as one process with the same global batch."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from commands import train as train_pp  # noqa: F401 - its engines
from tests.helpers.forked_entry import run_entry
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer
from tests.helpers.warm_start import WarmLauncher

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OPTIONS = (
    "--train-model llama --dataset jsonl --prompt question --prompt-fn fill --image-token none "
    "--collate-fn sft --micro-batch-size 2 --total-steps 3 --device cpu --max-token-num 64 "
    "--learning-rate 1e-3 --eval-steps 2 --save-steps 2"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A folder with a tiny model and 40 rows of unequal lengths."""
    folder = tmp_path_factory.mktemp("job")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(1)
    config = tiny_config("llama", vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    rows = [{"id": str(i), "question": f"{i}?", "answer": "!" * (1 + i % 7)} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train(job, name, *options, launcher=()):
    paths = ("--model-path", job / "model", "--dataset-path", job / "rows.jsonl")
    command = [ROOT / "train_pp.py", *OPTIONS.split(), *paths, "--output-dir", job / name, *options]
    if launcher:
        ended = WarmLauncher(list(map(str, [*launcher, *command]))).finish()
        done = SimpleNamespace(returncode=ended.code, stdout=ended.out, stderr=ended.err)
    else:
        done = run_entry(command)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (job / name / "log.jsonl").read_text().splitlines()]
    return records, done.stdout


@pytest.fixture(scope="module")
def alone(job):
    records, _ = train(job, "alone", "--batch-size", "8")
    return records


EXACT = ("kind", "step", "num_tokens", "num_targets", "num_samples", "token_accuracy")
KINDS = {
    "replicated": (("--num-stages", "2", "--dp-degree", "2"), ()),
    # the number of replicas follows from that of the processes
    "sharded": (("--num-stages", "1", "--dp-shard"), TORCHRUN),
}


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_train_and_save_what_one_process_does(kind, job, alone):
    options, launcher = KINDS[kind]
    records, said = train(job, kind, "--batch-size", "4", *options, launcher=launcher)
    assert said.count("held-out loss") == 3 and said.count("saved ") == 2, "rank 0 alone speaks"
    assert [record.keys() for record in records] == [record.keys() for record in alone]
    for ours, theirs in zip(records, alone, strict=True):
        assert [ours.get(key) for key in EXACT] == [theirs.get(key) for key in EXACT]
        for key in {"loss", "grad_norm"} & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6), key
    config = yaml.safe_load((job / kind / "config.yaml").read_text())
    assert (config["dp-degree"], config["dp-shard"]) == (2, kind == "sharded")
    assert (job / kind / "samples" / "step-00000003.png").is_file()
    for step in (2, 3):
        folders = [job / name / "checkpoints" / f"step-{step:08d}" for name in (kind, "alone")]
        ours, theirs = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in folders)
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6, msg=name)
