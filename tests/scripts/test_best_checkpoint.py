"""--save-best through the real entry: what is kept computes the best figure of the log."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stageline.checkpoint.layout import verify
from tests.helpers.forked_entry import run_entry
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
NUM_HELD_OUT = 11  # neither whole batches nor whole micro-batches


@pytest.fixture
def folder(tmp_path):
    """A tiny llama's config and tokenizer, and rows that it learns by heart."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_config("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    for name, start, count in (("train", 0, 16), ("test", 30, NUM_HELD_OUT)):
        rows = range(start, start + count)
        lines = [{"id": str(i), "question": f"{i}?", "answer": f"{i % 7}!"} for i in rows]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def train(folder, *options):
    command = [
        *(str(ROOT / "train_pp.py"), "--train-model", "llama"),
        *("--dataset", "jsonl", "--dataset-path", str(folder), "--prompt", "question"),
        *("--prompt-fn", "fill", "--image-token", "none", "--collate-fn", "sft"),
        *("--config-path", str(folder / "model"), "--num-stages", "2", "--device", "cpu"),
        *("--batch-size", "8", "--micro-batch-size", "2", "--max-token-num", "64"),
        *("--total-steps", "12", "--eval-steps", "4", "--learning-rate", "0.05"),
        *("--lr-scheduler", "constant", "--output-dir", str(folder / "run"), *options),
    ]
    done = run_entry(command, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@torch.no_grad()
def plain_figures(checkpoint, rows):
    """Loss and accuracy over the file's rows, one by one, in plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    loss, hits, targets = 0.0, 0, 0
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        text = f"Question: {row['question']}\nAnswer: {row['answer']}{tokenizer.eos_token}"
        ids = tokenizer(text, return_tensors="pt").input_ids
        wanted = ids[0, -4:]
        assert tokenizer.decode(wanted) == f" {row['answer']}{tokenizer.eos_token}"
        logits = model(input_ids=ids).logits[0, -5:-1].double()
        loss += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
        hits += int((logits.argmax(-1) == wanted).sum())
        targets += len(wanted)
    return loss / targets, hits / targets, targets


def test_the_kept_weights_compute_the_best_figures_of_the_log(folder):
    shown = train(folder, "--save-best", "loss")
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [0, 4, 8, 12]
    best = min(evaluations, key=lambda line: line["loss"])
    assert best["step"] > 0 and best["is_best"]

    checkpoints = folder / "run" / "checkpoints"
    manifest = verify(checkpoints / "best")
    figures = {name: best[name] for name in ("loss", "perplexity", "token_accuracy", "num_targets")}
    assert manifest["best"] == {"metric": "loss", "step": best["step"], "figures": figures}
    assert plain_figures(checkpoints / "best", folder / "test.jsonl") == (
        pytest.approx(best["loss"], rel=1e-5),
        best["token_accuracy"],
        best["num_targets"],
    )
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"best", f"best-step-{best['step']:08d}", "step-00000012"}
    assert f"{best['loss']:.4f} at step {best['step']}: saved {checkpoints / 'best'}" in shown
