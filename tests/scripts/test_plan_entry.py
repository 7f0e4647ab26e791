"""`--plan`, measured and refused runs through the entry file, without any weights on disk."""

import json

import pytest
import yaml

from tests.helpers.forked_entry import run_entry
from tests.helpers.small_run import Job
from tests.helpers.tiny_datasets import write_lines


@pytest.fixture
def job(tmp_path):
    """Its model has config and tokenizer, and weights that cannot be read."""
    job = Job(tmp_path, num_layers=4)
    (job.model / "model.safetensors").write_bytes(b"no weights")
    rows = [{"id": str(i), "question": f"{i}?", "answer": f"{i}!"} for i in range(40)]
    write_lines(job.rows, rows)
    return job


def train(job, *options, source="--config-path"):
    words = job.command("run", "--num-stages", 2, "--total-steps", 1, *options)[1:]
    words[words.index("--model-path")] = source
    return run_entry(words, timeout=200)


def test_plan_prints_and_stops_without_weights(job):
    done = train(job, "--plan", "--partition", "parameters", source="--model-path")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("--schedule 1f1b, 2 stages on 2 ranks, 4 micro-batches", "0-1 (2)", "peak"):
        assert word in done.stdout
    assert "by simulation (a transfer between ranks taken as " in done.stdout
    assert "bubble" in done.stdout and "--micro-batch-size" in done.stdout
    assert not (job.folder / "run").exists()


GRPO = (
    "--collate-fn grpo --loss-fn grpo --reward contains --rollouts.group_size 4 "
    "--rollouts.max_completion_length 16 --max-token-num 64"
).split()


def test_a_check_tries_the_rewards_and_names_a_row_without_an_answer(job):
    words = ("--reward", "contains,format,length,remote", "--check-only")
    done = train(job, *GRPO, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "reward contains: 1 for a row's own answer, 0 for an empty one" in said
    assert "format: 0 for a row's own answer, 0 for an empty one, on average; the same" in said
    assert "reward remote: not tried" in said
    rows = job.folder / "rows.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    del lines[2]["answer"]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = train(job, *GRPO, "--check-only")
    assert done.returncode == 3 and "rows.jsonl:3: the row has no 'answer'" in done.stderr
    rows.write_text(rows.read_text().replace('"question": "2?"', '"question": "2?", "answer": "2"'))
    done = train(job, *GRPO, "--reward", "choice", "--check-only")
    assert done.returncode == 3 and "rows.jsonl:1 has no list of `choices`" in done.stderr


def test_a_measured_run_trains_and_saves_its_numbers(job):
    done = train(job, "--partition", "measured")
    assert done.returncode == 0, done.stdout + done.stderr
    saved = yaml.safe_load((job.folder / "run" / "config.yaml").read_text())
    assert len(saved["partition"]) == 2 and sum(saved["partition"]) == 4


def test_a_run_that_cannot_fit_is_refused_with_figures(job):
    done = train(job, "--device-memory", "0.0001", "--partition", "measured")
    assert done.returncode == 2, done.stdout + done.stderr
    for word in ("rank 0 needs", "rank 1 needs", "KiB", "--plan"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    left = {path.name for path in (job.folder / "run").iterdir()}
    assert left <= {"run.lock", "run.log", "failures"}
