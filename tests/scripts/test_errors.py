"""Bad input: one clear error, the right exit code, no traceback, before any model is loaded."""

import json
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers import small_run
from tests.helpers.forked_entry import run_entry
from tests.helpers.tiny_models import tiny_config, tiny_processor, tiny_tokenizer
from tests.helpers.warm_start import WarmLauncher

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path):
    """A folder with a tiny llama's config and a tokenizer."""
    folder = tmp_path / "model"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_config("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path):
    """A JSONL file of 40 good rows."""
    path = tmp_path / "rows.jsonl"
    lines = [{"id": str(i), "question": f"{i}?", "answer": f"{i}!"} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def train(model, rows, *options, key="llama", num_stages=1, image_token="none", launches=False):
    """Runs the entry file; with `launches` below the real launcher."""
    command = [
        *(str(ROOT / "train_pp.py"), "--train-model", key, "--dataset", "jsonl"),
        *("--dataset-path", str(rows), "--prompt", "question", "--prompt-fn", "fill"),
        *("--image-token", image_token, "--collate-fn", "sft", "--config-path", str(model)),
        *("--num-stages", str(num_stages), "--batch-size", "8", "--micro-batch-size", "2"),
        *("--total-steps", "2", "--device", "cpu", "--max-token-num", "64"),
        *("--output-dir", str(model.parent / "run"), *options),
    ]
    if not launches:
        return run_entry(command)
    done = WarmLauncher(command).finish()
    return subprocess.CompletedProcess(command, done.code, done.out, done.err)


def assert_refused(done, code, *words):
    """One message with all the words, no traceback, nothing trained."""
    assert done.returncode == code, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert len(set(errors)) == 1, done.stderr  # the last line of several repeats the first
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert "held-out loss" not in done.stdout and "step 1/" not in done.stdout


def test_a_good_run_ends_with_0(model, rows, monkeypatch):
    monkeypatch.setattr(small_run, "draws", True)
    done = train(model, rows, num_stages=2, launches=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (model.parent / "run" / "loss.png").is_file()
    assert list((model.parent / "run" / "checkpoints").glob("step-*/manifest.json"))


def test_sample_longer_than_the_context(model, rows):
    with rows.open("a") as file:
        file.write(json.dumps({"id": "long", "question": "1 " * 80, "answer": "2"}) + "\n")
    assert_refused(train(model, rows), 3, "rows.jsonl:41", "--max-token-num", "answer")


def test_image_that_does_not_decode(rows, tmp_path):
    folder = tmp_path / "vlm"
    processor = tiny_processor("llava")
    processor.save_pretrained(folder)
    tiny_config("llava", vocab_size=len(processor.tokenizer)).save_pretrained(folder)
    Image.new("RGB", (16, 16)).save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "torn.png").write_bytes(whole[: len(whole) // 2])
    names = ["good.png"] * 24
    names[5] = "torn.png"
    lines = [
        {"id": str(i), "image": name, "question": "?", "answer": "!"}
        for i, name in enumerate(names)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = train(folder, rows, "--prompt", "vqa", key="llava", image_token="auto")
    assert_refused(done, 3, "torn.png", "rows.jsonl:6")


def test_more_stages_than_layers(model, rows):
    tiny_config("llama", vocab_size=400, num_hidden_layers=1).save_pretrained(model)
    done = train(model, rows, num_stages=2)
    assert_refused(done, 2, "1 layers can't fill 2 stages", "--num-stages")


def test_wrong_architecture_for_the_key(model, rows):
    assert_refused(train(model, rows, key="qwen2"), 2, "'llama'", "qwen2")


def test_everything_frozen(model, rows):
    done = train(model, rows, "--parts.llm.frozen", "--parts.lm_head.frozen")
    assert_refused(done, 2, "frozen", "--llm-lora-num")
