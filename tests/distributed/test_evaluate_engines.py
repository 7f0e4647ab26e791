"""evaluate.py writes the same predictions with any engine, and continues with another one."""

import json

import pytest

from stageline.evaluation.predictions import find_shards
from tests.helpers.small_run import GENERATE, Job, evaluated

CHOICES = "--model loglikelihood --prompt question --prompt-fn fill".split()
TEXTS = "--model perplexity --model.max_length 9 --model.stride 4".split()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    made = Job(tmp_path_factory.mktemp("job"), num_rows=0, num_layers=4)
    rows = [
        {
            "id": str(number),
            "question": f"{number}{' of the cat' * (number % 4)}?",
            "choices": ["yes", "not true", "d" * (1 + number % 3)],
            "answer": "yes",
            "text": "The cat is left of the dog. " * (1 + number % 3),
        }
        for number in range(9)
    ]
    made.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def evaluate(job, name, *options, engine="device_map", stages=1, replicas=1):
    words = ["--engine", engine, "--num-replicas", replicas, *options]
    if engine == "pipeline":
        words += ["--num-stages", stages, "--num-groups", 2]
    found = evaluated(job, job.folder / name, *words, ranks=stages * replicas)
    assert find_shards(job.folder / name / "predictions.jsonl") == []
    return found


def test_generated_answers_agree_and_are_gone_on_with(job):
    wanted = evaluate(job, "whole", *GENERATE)
    assert len(wanted) == 9 and len({record["prediction"] for record in wanted.values()}) > 3
    half = job.folder / "half" / "predictions.jsonl"
    half.parent.mkdir()
    kept = (job.folder / "whole" / "predictions.jsonl").read_text().splitlines()[:3]
    half.write_text("".join(line + "\n" for line in kept))
    assert evaluate(job, "half", *GENERATE, engine="pipeline", stages=2, replicas=2) == wanted
    assert half.read_text().splitlines()[:3] == kept
    facts = json.loads((half.parent / "report.json").read_text())["engine"]
    assert (facts["engine"], facts["num_stages"], facts["num_replicas"]) == ("pipeline", 2, 2)


@pytest.mark.parametrize("task", [CHOICES, TEXTS], ids=["choices", "texts"])
def test_likelihoods_agree(task, job):
    name = task[1]
    wanted = evaluate(job, f"{name}-whole", *task)
    found = evaluate(job, f"{name}-stages", *task, engine="pipeline", stages=2)
    assert found.keys() == wanted.keys()
    for sample_id, record in wanted.items():
        own = found[sample_id]
        for logprob, other in zip(logprobs(record), logprobs(own), strict=True):
            assert logprob == pytest.approx(other, abs=1e-4)
        assert own["prediction"] == record["prediction"] and own["settings"] == record["settings"]
    reports = [
        json.loads((job.folder / f"{name}-{kind}" / "report.json").read_text())
        for kind in ("whole", "stages")
    ]
    assert reports[0]["score"] == pytest.approx(reports[1]["score"], abs=1e-4)


def logprobs(record):
    choices = record.get("choice_scores", [record])
    return [choice["logprob"] for choice in choices]
