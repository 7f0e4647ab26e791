"""`--plan`, measured and refused runs through the entry file, without any weights on disk."""

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers.forked_entry import run_entry
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path):
    """A folder with config and tokenizer, whose weights cannot be read."""
    folder = tmp_path / "model"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_config("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    lines = [{"id": str(i), "question": f"{i}?", "answer": f"{i}!"} for i in range(40)]
    rows = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "rows.jsonl").write_text(rows)
    return folder


def train(model, *options, source="--config-path"):
    command = [
        *(str(ROOT / "train_pp.py"), "--train-model", "llama"),
        *("--dataset", "jsonl", "--dataset-path", str(model.parent / "rows.jsonl")),
        *("--prompt", "question", "--prompt-fn", "fill", "--image-token", "none"),
        *("--collate-fn", "sft", source, str(model), "--num-stages", "2"),
        *("--batch-size", "8", "--micro-batch-size", "2", "--total-steps", "1"),
        *("--eval-samples", "0", "--timeline-step", "0"),
        *("--device", "cpu", "--output-dir", str(model.parent / "run"), *options),
    ]
    return run_entry(command, timeout=200)


def test_plan_prints_and_stops_without_weights(model):
    done = train(model, "--plan", "--partition", "parameters", source="--model-path")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("--schedule 1f1b, 2 stages on 2 ranks, 4 micro-batches", "0-1 (2)", "peak"):
        assert word in done.stdout
    assert "by simulation (a transfer between ranks taken as " in done.stdout
    assert "bubble" in done.stdout and "--micro-batch-size" in done.stdout
    assert not (model.parent / "run").exists()


GRPO = (
    "--collate-fn grpo --loss-fn grpo --reward contains --rollouts.group_size 4 "
    "--rollouts.max_completion_length 16 --max-token-num 64"
).split()


def test_a_run_that_answers_is_planned_with_its_keys_and_values(model):
    done = train(model, *GRPO, "--plan", "--partition", "2,2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not counted" not in done.stdout
    head = next(line for line in done.stdout.splitlines() if " answering " in line)
    assert head.split().index("cache") == 5
    # 8 rows and the 4 of the prompt that joins, 64 columns, one head of 8 numbers, keys and values
    # in float32, 2 layers a rank: 96 KiB
    ranks = [line.split() for line in done.stdout.partition(head)[2].splitlines()[2:4]]
    assert all("96.0 KiB" in " ".join(line) for line in ranks), done.stdout
    # weights and state leave a little; answering needs the most
    done = train(model, *GRPO, "--rollouts.prompts_together", "1", "--device-memory", "0.00004")
    assert done.returncode == 2 and "--rollouts.prompts_together" in done.stderr


def test_a_check_tries_the_rewards_and_names_a_row_without_an_answer(model):
    words = ("--reward", "contains,format,length,remote", "--check-only")
    done = train(model, *GRPO, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "reward contains: 1 for a row's own answer, 0 for an empty one" in said
    assert "format: 0 for a row's own answer, 0 for an empty one, on average; the same" in said
    assert "reward remote: not tried" in said
    rows = model.parent / "rows.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    del lines[2]["answer"]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = train(model, *GRPO, "--check-only")
    assert done.returncode == 3 and "rows.jsonl:3: the field 'answer'" in done.stderr
    rows.write_text(rows.read_text().replace('"question": "2?"', '"question": "2?", "answer": "2"'))
    done = train(model, *GRPO, "--reward", "choice", "--check-only")
    assert done.returncode == 3 and "rows.jsonl:1 has no `choices`" in done.stderr


def test_a_measured_run_trains_and_saves_its_numbers(model):
    done = train(model, "--partition", "measured")
    assert done.returncode == 0, done.stdout + done.stderr
    saved = yaml.safe_load((model.parent / "run" / "config.yaml").read_text())
    assert len(saved["partition"]) == 2 and sum(saved["partition"]) == 4


def test_a_run_that_cannot_fit_is_refused_with_figures(model):
    done = train(model, "--device-memory", "0.0001", "--partition", "measured")
    assert done.returncode == 2, done.stdout + done.stderr
    for word in ("rank 0 needs", "rank 1 needs", "KiB", "--plan"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    left = {path.name for path in (model.parent / "run").iterdir()}
    assert left <= {"run.lock", "run.log", "failures"}
