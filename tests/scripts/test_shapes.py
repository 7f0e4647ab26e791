"""Packing from the command line: the same batch, so the same loss; or a clear refusal."""

import functools
import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig

from dataset import sft
from loss_fn import sft as sft_loss
from pp_models import CausalLMStage
from prompt_fn import fill, none
from register import import_shelf, prompt_register
from stageline.checkpoint.init import init_split_model
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.rows.json_lines import JsonLines
from tests.helpers.forked_entry import run_entry
from tests.helpers.tiny_datasets import write_lines
from tests.helpers.tiny_models import tiny_tokenizer

import_shelf("prompt")
ROOT = Path(__file__).resolve().parents[2]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    tokenizer = tiny_tokenizer()
    vocab_size = len(tokenizer)
    for name, config in {
        "llama": LlamaConfig(**SMALL, vocab_size=vocab_size, intermediate_size=24),
        "mamba": transformers.MambaConfig(
            vocab_size=vocab_size, hidden_size=16, num_hidden_layers=2
        ),
    }.items():
        tokenizer.save_pretrained(folder / name)
        config.save_pretrained(folder / name)
    rows = [
        {"question": "Why? " * (1 + 5 * i % 11), "answer": "yes " * (1 + i % 3), "id": str(i)}
        for i in range(48)
    ]
    write_lines(folder / "rows.jsonl", rows)
    return folder


def train(folder, name, *options, model="llama"):
    command = [str(ROOT / "train_pp.py"), "--num-stages", "2"]
    command += ["--train-model", "causal_lm", "--config-path", str(folder / model)]
    command += ["--dataset", "jsonl", "--dataset-path", str(folder / "rows.jsonl")]
    command += ["--prompt", "vqa", "--prompt-fn", "fill", "--image-token", "none"]
    command += ["--collate-fn", "sft", "--batch-size", "8", "--max-token-num", "96"]
    command += ["--total-steps", "1", "--eval-samples", "0", "--device", "cpu"]
    command += ["--output-dir", str(folder / name), *options]
    result = run_entry(command, timeout=120)
    if result.returncode:
        return result, []
    lines = (folder / name / "log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return result, [record for record in records if record["kind"] == "train"]


def first_loss(folder):
    """The unsplit model on the samples of the first step, one sample a row in the drawn order."""
    tokenizer = tiny_tokenizer()
    collate = functools.partial(
        sft,
        prompt=prompt_register["vqa"],
        prompt_fn=fill,
        image_token=none,
        processor=tokenizer,
        pad_token_id=tokenizer.pad_token_id,
        max_token_num=96,
        stage=0,
        num_stages=1,
    )
    dataset = JsonLines(dataset_path=str(folder / "rows.jsonl"), split="train")
    loader = MicroBatchLoader(
        dataset, collate=collate, batch_size=8, micro_batch_size=8, order="given"
    )
    (batch,) = next(iter(loader))
    whole = CausalLMStage(LlamaConfig.from_pretrained(folder / "llama"), stage=0, num_stages=1)
    init_split_model(whole, seed=0, device="cpu", dtype=torch.float32)
    logits = whole(batch["input_ids"], attention_mask=batch["attention_mask"])
    loss = sft_loss(logits, batch, num_targets=(batch["labels"][:, 1:] != -100).sum())
    return loss.item(), int(batch["attention_mask"].sum())


def test_packing_trains_on_the_same_batch(folder):
    options = ["--packing", "--rows.pad_to_multiple_of", "8", "--num-workers", "1"]
    result, records = train(folder, "packed", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    loss, num_tokens = first_loss(folder)
    assert records[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert records[0]["num_tokens"] == num_tokens


def test_a_model_that_cannot_be_packed_is_refused_at_the_start(folder):
    result, _ = train(folder, "refused", "--packing", model="mamba")
    assert result.returncode == 2
    output = result.stdout + result.stderr
    assert "--packing: stage" in output and "a token sees tokens of another sample" in output
    assert "Traceback" not in output
