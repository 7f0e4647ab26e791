"""infer.py --engine vllm, with a stand-in of the package, against --engine device_map."""

import json
import sys
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from stageline.data.text.processor import save_processor
from tests.helpers import fake_vllm
from tests.helpers.forked_entry import run_entry
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("Which digit is this?", "Is the statement true?")


@pytest.fixture
def adapter(tmp_path):
    """Return an adapter, which vLLM gets merged."""
    tokenizer = tiny_tokenizer()
    tiny_whole("llama", tmp_path / "base", vocab_size=len(tokenizer), noise=0.3)
    save_processor(tokenizer, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter))
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def answers(engine, adapter, tmp_path):
    out = tmp_path / engine
    words = ["--engine", engine, "--model-path", adapter, "--output-dir", out, "--device", "cpu"]
    for text in TEXTS:
        words += ["--text", text]
    words += ["--max-new-tokens", 8]
    # a fork: it has the stand-in; the export lands in the cache of HOME
    done = run_entry(["-m", "stageline", "infer", *words], env={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (out / "predictions.jsonl").read_text().splitlines()
    return {record["id"]: record["prediction"] for record in map(json.loads, lines)}


def test_an_adapter_is_exported_and_answers_as_ever(adapter, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm.make_module())
    expected = answers("device_map", adapter, tmp_path)
    assert answers("vllm", adapter, tmp_path) == expected
    assert len(set(expected.values())) == len(TEXTS)
    (exported,) = (tmp_path / ".cache" / "stageline" / "exported").iterdir()
    assert not (exported / "adapter_config.json").exists()
