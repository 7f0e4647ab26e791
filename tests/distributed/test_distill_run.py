"""Runs against a teacher: the same in every split, after a kill, and as plain PyTorch has it."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from register import (
    collate_fn_register,
    dataset_register,
    image_token_register,
    import_shelf,
    prompt_fn_register,
    prompt_register,
)
from stageline.data.batches.collate_part import as_collate_part
from tests.helpers.grpo_runs import ZBV
from tests.helpers.small_run import Job, assert_same_tensors
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer

import_shelf("prompt", "prompt_fn", "dataset")
GIVEN = "--loss-fn distill --total-steps 4 --save-steps 2 --learning-rate 3e-3".split()
OWN = "--teacher.lmbda 0.5 --rollouts.max_completion_length 8".split()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    made = Job(tmp_path_factory.mktemp("distill"), num_layers=4)
    sizes = {"vocab_size": len(tiny_tokenizer()), "num_hidden_layers": 5, "hidden_size": 48}
    tiny_whole("llama", made.folder / "teacher", noise=0.3, **sizes)
    train(made, "own", *OWN, ranks=1)
    return made


def train(job, name, *options, **more):
    path = ("--teacher.path", job.folder / "teacher")
    return job.train(name, *GIVEN, *path, *options, **more)


def collated(rows, numbers):
    """Return rows of the job's file as one micro-batch."""
    tokenizer = tiny_tokenizer()
    return as_collate_part(collate_fn_register["sft"])(
        [rows[row] for row in numbers],
        **{"prompt": prompt_register["question"], "prompt_fn": prompt_fn_register["fill"]},
        **{"image_token": image_token_register["none"], "processor": tokenizer, "stage": 0},
        **{"pad_token_id": tokenizer.pad_token_id, "max_token_num": 64, "num_stages": 1},
    )


def test_a_killed_run_of_another_split_learns_the_same(job):
    """Kill it on zbv; the rest runs on two stages of 1f1b."""
    fault = "at=decoding,rank=0,step=2,do=sigkill"
    path = ("--teacher.path", job.folder / "teacher")
    split, ranks = ZBV
    killed = job.fork("killed", *GIVEN, *path, *OWN, *split, ranks=ranks, chaos=fault, waits=True)
    assert killed.code != 0 and job.checkpoints("killed") == ["step-00000002"]
    train(job, "killed", *OWN, "--resume", "auto")
    step = "checkpoints/step-00000004"
    assert_same_tensors(*(job.folder / name / step for name in ("killed", "own")))


def test_replicas_lora_packing_chunks_and_evaluation(job):
    """Compare with one rank and whole logits of unpacked rows, to the rounding of other sums."""
    lora = ("--llm-lora-num", 1, "--parts.lm_head.frozen", *OWN, "--eval-samples", "all")
    train(job, "lora", *lora, "--teacher.top_k", 3, ranks=1)
    replicas = ("--dp-degree", 2, "--num-stages", 1, "--batch-size", 4)
    more = ("--logits-chunk", 5, "--engine", "torch", "--packing", "--max-token-num", 96)
    train(job, "replicas", *lora, "--teacher.top_k", 3, *replicas, *more)
    ours, theirs = (job.losses(name) for name in ("replicas", "lora"))
    assert ours == pytest.approx(theirs, rel=1e-4)
    [first, last] = job.records("lora", "eval")
    assert last["loss"] < first["loss"]


def test_the_loss_is_the_divergence_of_the_two_whole_models(job):
    options = ("--eval-samples", "all", "--total-steps", 1, "--save-steps", 0)
    train(job, "whole", *options, "--loss-fn.beta", 0.3)
    rows = dataset_register["jsonl"](dataset_path=str(job.rows), split="test")
    batch = collated(rows, range(len(rows)))
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        q, p = (
            AutoModelForCausalLM.from_pretrained(job.folder / name)(**ids)
            .logits[:, :-1]
            .softmax(-1)
            for name in ("model", "teacher")
        )
    mixture = 0.7 * q + 0.3 * p
    both = 0.3 * p * (p / mixture).log() + 0.7 * q * (q / mixture).log()
    wanted = both.sum(-1)[batch["labels"][:, 1:] != -100].mean()
    [record, *_] = job.records("whole", "eval")
    [own, *_], [given] = job.records("own"), job.records("whole")
    assert own["num_targets"] != given["num_targets"], "half of the rows have answers of their own"
    assert record["step"] == 0 and record["loss"] == pytest.approx(wanted.item(), rel=1e-5)


def test_a_table_of_the_likeliest_tokens_is_the_same_teacher(job):
    """Write it as docs/distillation.md does, from another program's forward."""
    train(job, "top", "--teacher.top_k", 3, ranks=1)
    told = (job.folder / "top" / "run.log").read_text()
    assert "teacher, the 3 likeliest tokens, the rest lumped into one" in told
    rows = dataset_register["jsonl"](dataset_path=str(job.rows), split="train")
    teacher = AutoModelForCausalLM.from_pretrained(job.folder / "teacher")
    table = {}
    for row in range(len(rows)):
        batch = collated(rows, [row])
        with torch.no_grad():
            logits = teacher(batch["input_ids"]).logits[0, :-1]
        best = logits[batch["labels"][0, 1:] != -100].log_softmax(-1).topk(3)
        table |= {f"{row}.ids": best.indices, f"{row}.log_probs": best.values}
    save_file(table, job.folder / "table.safetensors")
    given = ("--teacher.table", job.folder / "table.safetensors", "--eval-samples", 0)
    job.train("table", *GIVEN, *given)
    assert job.losses("table") == pytest.approx(job.losses("top"), rel=1e-5)
    told = (job.folder / "table" / "run.log").read_text()
    assert "table.safetensors, the likeliest tokens, the rest lumped into one" in told
    save_file({"0.ids": best.indices}, job.folder / "table.safetensors")
    refused = job.fork("table", *GIVEN, *given, "--resume", "auto", ranks=2)
    assert refused.code == 4 and "files of model and tokenizer" in refused.err
    refused = job.fork("no table", *GIVEN, *given, ranks=1)
    assert refused.code == 2 and "has no distributions for the" in refused.err


def test_a_teacher_of_another_vocabulary_is_refused(job):
    tiny_whole("llama", job.folder / "other", vocab_size=len(tiny_tokenizer()) + 8)
    refused = job.fork("other", *GIVEN, "--teacher.path", job.folder / "other", ranks=1)
    assert refused.code == 2 and "vocabulary of" in refused.err
    refused = job.fork("other", *GIVEN, ranks=1)
    assert refused.code == 2 and "requires a teacher" in refused.err
