"""The entry file export.py: what it prints, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import peft

from stageline.testing.tiny_checkpoints import auto_class, tiny_whole

ROOT = Path(__file__).resolve().parents[2]


def run_entry_file(*arguments):
    command = [sys.executable, str(ROOT / "export.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


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
    assert "logits differ by" in done.stdout
    again = run_entry_file(*options)
    assert again.returncode == 2
    assert "exists, a new folder was expected" in again.stderr
    assert "Traceback" not in again.stderr
