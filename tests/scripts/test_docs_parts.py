"""The worked example of docs/add_a_part.md: its file and its commands, from another folder."""

import functools
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig

from prompt_fn import fill, none
from register import import_parts
from stageline.data.batches.loader import MicroBatchLoader
from tests.helpers.forked_entry import run_entry
from tests.helpers.registers import restored_registers
from tests.helpers.tiny_models import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ENGLISH = (DOCS / "add_a_part.md").read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    """my_parts.py of the guide, with the files that its commands name."""
    (tmp_path / "my_parts.py").write_text(blocks(ENGLISH, "python")[0])
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "my_model")
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(tmp_path / "my_model")
    pairs = [(left, right) for left in range(8) for right in range(5, 13)]
    (tmp_path / "sums.txt").write_text("".join(f"{left} + {right}\n" for left, right in pairs))
    return tmp_path


def run(command, folder):
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "stageline"
    return run_entry(
        ["-m", *words, "--device", "cpu"],
        cwd=folder,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def commands():
    return [command for command in blocks(ENGLISH, "bash")[0].split("\n\n") if command.strip()]


def test_the_commands_of_the_guide_run(folder):
    train, evaluate = commands()
    done = run(train, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (folder / "runs/sums/log.jsonl").open()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 20 and losses[-1] < losses[0]
    done = run(evaluate, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "runs/sums/evaluation/report.json").read_text())
    predictions = [
        json.loads(line) for line in (folder / "runs/sums/evaluation/predictions.jsonl").open()
    ]
    predictions = [record for record in predictions if "prediction" in record]
    assert report["num_samples"] == len(predictions) == 64 // 5
    assert set(report["groups"]) == {"carry", "plain"}
    prompt = "1 + 1 = 2\n1 + 1 = 2\n"  # num_examples 2, and no answer
    assert all(record["prompt"].startswith(prompt) for record in predictions)
    assert all(record["prompt"].rstrip().endswith("=") for record in predictions)


def test_both_forms_of_a_collate_part(folder):
    class Rows:
        def __len__(self):
            return 8

        def __getitem__(self, row):
            question = "Why? " * (1 + 5 * row % 7)
            return None, {"id": str(row), "question": question, "answer": "7"}

    (folder / "two_parts.py").write_text(blocks(ENGLISH, "python")[1])
    with restored_registers():
        module = import_parts([str(folder / "two_parts.py")])[0]
    texts = {"prompt": "[QUESTION] [ANSWER]", "prompt_fn": fill, "image_token": none}
    common = {**texts, "processor": tiny_tokenizer(), "pad_token_id": 0, "max_token_num": 64}
    steps = {}
    kinds = [(module.all_learnt, None), (module.all_learnt, 64), (module.as_drawn, None)]
    for part, packing in kinds:
        collate = functools.partial(part, **common, stage=0, num_stages=1)
        loader = MicroBatchLoader(
            Rows(), collate=collate, batch_size=8, micro_batch_size=2, packing=packing
        )
        steps[part, packing] = next(iter(loader))
    learnt, packed, drawn = (
        sum(int((batch["labels"] != -100).sum()) for batch in step) for step in steps.values()
    )
    num_tokens = sum(int(batch["attention_mask"].sum()) for batch in steps[module.all_learnt, None])
    assert learnt == num_tokens and packed == num_tokens - 8, "a first token is not predicted"
    assert 0 < drawn < learnt
    widths = [batch["input_ids"].shape[1] for batch in steps[module.all_learnt, None]]
    assert len(set(widths)) > 1, "sorted"
