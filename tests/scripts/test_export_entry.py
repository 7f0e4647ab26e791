"""The entry file export.py: what it prints, and how it refuses."""

import json
from pathlib import Path

import peft
import pytest

from options.fields import num_bytes
from parse_args import parse_export_args
from tests.helpers.forked_entry import run_entry as launch_entry
from tests.helpers.tiny_checkpoints import auto_class, tiny_whole

ROOT = Path(__file__).resolve().parents[2]


def run_entry_file(*arguments):
    command = [str(ROOT / "export.py"), *map(str, arguments)]
    return launch_entry(command, timeout=120)


def test_the_entry_file(tmp_path):
    tiny_whole("llama", tmp_path / "base")
    base = auto_class("llama").from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    run = tmp_path / "run"
    peft.get_peft_model(base, config).save_pretrained(run)
    written = json.loads((run / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")
    options = ("--model-path", run, "--output-path", tmp_path / "out", "--merge")
    done = run_entry_file(*options, "--dtype", "float16")
    assert done.returncode == 0, done.stderr
    assert f"exported the model to {tmp_path / 'out'}" in done.stdout
    assert "%|" not in done.stderr  # no bars
    check = ("-m", "stageline", "check", "--model-path", run, "--exported", tmp_path / "out")
    checked = launch_entry([*map(str, check)], timeout=120)
    assert checked.returncode == 0, checked.stderr
    assert "compared with its 2 stages (text): logits differ by" in checked.stdout
    assert "logits differ by" in checked.stdout
    again = run_entry_file(*options)
    assert again.returncode == 2
    assert "exists, and a checkpoint is never" in again.stderr
    assert "Traceback" not in again.stderr
    options += ("--dtype", "auto", "--overwrite")
    sharded = run_entry_file(*options, "--max-shard-size", "20KB")
    assert sharded.returncode == 0, sharded.stderr
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    whole = auto_class("llama").from_pretrained(tmp_path / "out", dtype="auto")
    assert whole.dtype == base.dtype


def test_sizes(tmp_path):
    for text, expected in {"5GB": 5 * 10**9, "123456": 123456, "1.5MiB": 1572864}.items():
        assert num_bytes(text, "--max-shard-size") == expected
    with pytest.raises(ValueError, match="'5 cats' is not a size"):
        words = [f"--model-path={tmp_path}", "--output-path=b", "--max-shard-size=5 cats"]
        parse_export_args(words)
