"""The worked examples of docs/add_a_model.md and docs/from_python.md, outside of the repository,
and the loops of one's own in examples/.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import stageline
from tests.helpers.forked_entry import run_entry
from tests.helpers.small_run import TORCHRUN
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer
from tests.helpers.warm_start import WarmLauncher

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("10 11", "2 3 4")
OPTIONS = (
    "--train-model gru_lm --dataset counting --loss-fn smoothed --prompt text --prompt-fn fill "
    "--image-token none --collate-fn sft --config-path my_model --batch-size 8 "
    "--micro-batch-size 2 --total-steps 3 --device cpu --dataset.longest 5"
)


def run(folder, *options):
    command = [str(ROOT / "train_pp.py"), "--import", "my_parts.py"]
    return run_entry([*command, *OPTIONS.split(), *options], cwd=folder, timeout=240)


def losses(folder):
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records]


def test_parts_of_a_user_train_the_same_on_one_and_two_stages(tmp_path):
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "add_a_model.md").read_text(), re.DOTALL
    )
    (tmp_path / "my_parts.py").write_text(blocks[0])
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "my_model")
    config = {"model_type": "gru_lm", "vocab_size": len(tokenizer)}
    (tmp_path / "my_model" / "config.json").write_text(json.dumps(config))
    for stages in (1, 2):
        done = run(tmp_path, "--num-stages", str(stages), "--output-dir", f"run{stages}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "run1")) == 5  # before, three steps, after
    assert losses(tmp_path / "run1") == losses(tmp_path / "run2")
    saved = [
        {
            name: tensor
            for file in (tmp_path / f"run{stages}").glob("checkpoints/*3/*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for stages in (1, 2)
    ]
    assert saved[0].keys() == saved[1].keys() and "blocks.3.gru.weight_hh_l0" in saved[0]
    assert all((saved[0][name] == saved[1][name]).all() for name in saved[0])
    again = run(tmp_path, "--config", "run2/config.yaml", "--output-dir", "run3")
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "run3") == losses(tmp_path / "run2")
    answers = [answers_of(tmp_path, stages) for stages in (1, 2)]
    assert answers[0] == answers[1]
    assert answers[0] == [greedy(tmp_path, text) for text in TEXTS]
    (tmp_path / "my_parts.py").write_text("\n\n".join(blocks[:2]))  # with the class to export
    words = ("--output-path", "exported", "--import", "my_parts.py")
    exported = run_command(tmp_path, "export", *words)
    assert exported.returncode == 0, exported.stderr
    parts = ("--import", "my_parts.py", "--train-model", "gru_lm")
    checked = run_command(tmp_path, "check", "--exported", "exported", *parts)
    assert checked.returncode == 0, checked.stderr
    assert "compared with its 2 stages" in checked.stdout
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == saved[0].keys()


def run_command(folder, command, *options):
    checkpoint = next((folder / "run1" / "checkpoints").glob("*3"))
    words = ["-m", "stageline", command, "--model-path", str(checkpoint), *options]
    return run_entry(words, cwd=folder, timeout=240)


def answers_of(folder, stages):
    """Answers of the trained checkpoint, its stages decoding in a pipeline."""
    checkpoint = next((folder / "run1" / "checkpoints").glob("*3"))
    texts = [word for text in TEXTS for word in ("--text", text)]
    options = (
        "--engine pipeline --train-model gru_lm --prompt-fn fill --prompt question --image-token "
        f"none --max-new-tokens 6 --device cpu --num-stages {stages} --output-dir said{stages}"
    )
    entry = ["-m", "stageline", "infer", "--import", "my_parts.py", "--model-path", str(checkpoint)]
    done = run_entry([*entry, *options.split(), *texts], cwd=folder, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / f"said{stages}" / "predictions.jsonl").read_text().splitlines()
    records = sorted(map(json.loads, lines), key=lambda record: record["prompt"])
    return [record["token_ids"] for record in records]


def greedy(folder, text):
    """Return the same in plain PyTorch: the whole row through the whole model for each token."""
    weights = {
        name: tensor
        for file in (folder / "run1").glob("checkpoints/*3/*.safetensors")
        for name, tensor in load_file(file).items()
    }
    tokenizer = tiny_tokenizer()
    lines = (folder / "said1" / "predictions.jsonl").read_text().splitlines()
    prompt = next(p for line in lines if text in (p := json.loads(line)["prompt"]))
    ids = tokenizer(prompt)["input_ids"]
    found = []
    for _ in range(6):
        found.append(int(logits(weights, torch.tensor([ids + found]))[0, -1].argmax()))
        if found[-1] == tokenizer.eos_token_id:
            return found[:-1]
    return found


def logits(weights, ids):
    hidden = weights["embed.weight"][ids]
    width = hidden.shape[-1]
    for layer in range(4):
        own = {
            name.split(".", 2)[2]: value
            for name, value in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        gru = torch.nn.GRU(width, width, batch_first=True)
        gru.load_state_dict({k[4:]: v for k, v in own.items() if k.startswith("gru.")})
        normed = torch.nn.functional.layer_norm(
            hidden, (width,), own["norm.weight"], own["norm.bias"]
        )
        hidden = hidden + gru(normed)[0]
    return hidden @ weights["head.weight"].T + weights["head.bias"]


def test_a_loop_of_ones_own_equals_the_loop_over_the_whole_model(tmp_path):
    block = re.search(
        r"```python\n(.*?)```", (ROOT / "docs" / "from_python.md").read_text(), re.DOTALL
    )[1]
    (tmp_path / "my_loop.py").write_text(block)
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(tiny_config("llama", vocab_size=len(tokenizer)))
    whole.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    done = run_entry(["my_loop.py", "model", "my_run"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs = {"__name__": "my_loop"}
    exec(block, theirs)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    loader = stageline.MicroBatchLoader(
        theirs["Rows"](), collate=theirs["collate"], batch_size=8, micro_batch_size=2
    )
    lines = []
    for step, batches in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        losses = [
            theirs["loss_fn"](whole(batch["input_ids"]).logits, batch, num_targets=8 * 11)
            for batch in batches
        ]
        sum(losses).backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        lines.append(f"step {step + 1}: loss {sum(losses):.6f}, norm {norm:.4f}")
    assert [line for line in done.stdout.splitlines() if line.startswith("step")] == lines
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "my_run").state_dict()
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-6)


def test_a_loop_over_a_schedule_of_torch_equals_the_loop_over_the_whole_model(tmp_path):
    path = ROOT / "examples" / "own_loop.py"
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = tiny_config("llama", vocab_size=len(tokenizer), tie_word_embeddings=True)
    whole = AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    torchrun = [*TORCHRUN, "2", str(path), "model", "my_run", "Schedule1F1B"]
    done = WarmLauncher(torchrun, enter=lambda: os.chdir(tmp_path)).finish()
    assert done.code == 0, done.err
    theirs = {"__name__": "own_loop"}
    exec(path.read_text(), theirs)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    lines = []
    for step in range(3):
        batches = list(theirs["micro_batches"](step))
        assert len({batch["input_ids"].shape for batch in batches}) > 1
        count = sum(batch["labels"][:, 1:].numel() for batch in batches)
        optimizer.zero_grad()
        losses = [whole(**batch, num_items_in_batch=count).loss for batch in batches]
        sum(losses).backward()
        optimizer.step()
        lines.append(f"step {step + 1}: loss {sum(losses):.6f}")
    assert [line for line in done.out.splitlines() if line.startswith("step")] == lines
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "my_run").state_dict()
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-6)


def test_the_names_of_the_package_exist_and_are_imported_when_they_are_asked_for():
    page = (ROOT / "docs" / "from_python.md").read_text()
    for name in stageline.__all__:
        assert getattr(stageline, name).__name__ == name and f"`{name}" in page
    with pytest.raises(AttributeError, match="Pipelinerunner"):
        stageline.Pipelinerunner  # noqa: B018
    code = "import stageline, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
