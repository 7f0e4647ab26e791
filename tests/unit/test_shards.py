"""Predictions of several replicas become one file: after a kill, with other numbers of them."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError
from stageline.evaluation.predictions import (
    Asking,
    PredictionFile,
    find_shards,
    merge_shards,
    predict,
    shard_path,
)
from tests.helpers.small_run import ForkedRun, Job

ROOT = Path(__file__).resolve().parents[2]


def line(sample_id, text=None, settings="k", **more):
    record = {"settings": settings, "id": sample_id, "prediction": text, **more}
    return json.dumps(record) + "\n"


def write(path, *lines, at=None):
    path.write_text("".join(lines))
    if at is not None:
        os.utime(path, (at, at))


# -- merging ---------------------------------------------------------------------------------


def test_the_newest_answer_counts_and_an_answer_before_a_failure(tmp_path):
    path = tmp_path / "predictions.jsonl"
    write(path, line("a", "old"), line("a", "kept", settings="other"), line("e", error="no"))
    write(shard_path(path, 0), line("b", "first"), line("c", "one"), line("c", "two"), at=100)
    write(shard_path(path, 7), line("b", "second"), line("a", "new"), at=200)
    write(
        shard_path(path, 3), line("b", error="memory"), line("d", error="x"), line("d", "y"), at=300
    )
    write(shard_path(path, 4), line("d", error="later"), '{"id": "z", "predic', at=400)
    write(tmp_path / "predictions-old.jsonl", line("f", "another file"))
    assert merge_shards(path) == 4
    own = PredictionFile(path, settings_key="k")
    found = {key: record["prediction"] for key, record in own.records.items()}
    assert found == {"a": "new", "b": "second", "c": "two", "d": "y"}
    assert own.errors == {"e": "no"}
    assert PredictionFile(path, settings_key="other").records["a"]["prediction"] == "kept"
    assert find_shards(path) == [] and (tmp_path / "predictions-old.jsonl").exists()
    before = path.read_bytes()
    assert merge_shards(path) == 0 and path.read_bytes() == before


def test_killed_between_the_file_and_the_shards(tmp_path):
    path = tmp_path / "predictions.jsonl"
    write(shard_path(path, 0), line("a", "x"), line("b", "y"))
    lines = shard_path(path, 0).read_text()
    merge_shards(path)
    write(shard_path(path, 0), lines)  # the merged file is there, and the shard too
    merge_shards(path)
    assert sorted(path.read_text().splitlines()) == sorted(lines.splitlines())


def test_a_damaged_line_of_a_shard_is_named_and_nothing_is_lost(tmp_path):
    path = tmp_path / "predictions.jsonl"
    write(shard_path(path, 1), line("a", "x"), '{"id": 3}\n', line("b", "y"))
    with pytest.raises(DataError, match=r"predictions-1\.jsonl:2: .*is not a prediction"):
        merge_shards(path)
    assert shard_path(path, 1).exists() and not path.exists()


# -- batches ---------------------------------------------------------------------------------

LENGTHS = [3, 9, 1, 7, 5, 2, 8]
ROWS = [(None, {"id": str(i), "question": "x" * n}) for i, n in enumerate(LENGTHS)]
TEXTS = {
    "prompt": "",
    "prompt_fn": lambda sample, prompt, **_: Rendered((Piece(sample["question"]),)),
    "image_token": lambda rendered, images, **_: rendered,
}


def ask(path, answer, **asking):
    file = PredictionFile(path, settings_key="k")
    asking = Asking(**{"batch_size": 3, "length_of": lambda r, images: len(r.text), **asking})
    options = {"texts": TEXTS, "processor": None, "file": file, "asking": asking}
    return predict(ROWS, range(7), answer=answer, **options), file


def test_batches_are_even_and_the_longest_come_first(tmp_path):
    seen = []

    def answer(*, images, prompts, samples, batch_size):
        seen.append([len(prompt.text) for prompt in prompts])
        assert batch_size == len(prompts) == len(samples)
        return [{"text": sample["id"]} for sample in samples]

    hands_over = frozenset({"samples", "batch_size"})
    _, file = ask(tmp_path / "p.jsonl", answer, hands_over=hands_over)
    assert seen == [[9, 8, 7], [5, 3, 2], [1]]
    assert {key: record["prediction"] for key, record in file.records.items()} == {
        str(i): str(i) for i in range(7)
    }


@pytest.mark.parametrize("streams", [False, True])
def test_full_memory_halves_the_batch_and_nothing_is_asked_twice(streams, tmp_path, capsys):
    seen = []

    def stream(prompts):
        for place, prompt in enumerate(prompts):
            if len(prompts) > 1 and place == 1:
                raise torch.OutOfMemoryError("no memory left")
            yield place, {"text": prompt.text}

    def answer(*, images, prompts):
        seen.append(len(prompts))
        if streams:
            return stream(prompts)
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("no memory left")
        return [{"text": prompt.text} for prompt in prompts]

    _, file = ask(tmp_path / "p.jsonl", answer, batch_size=5)
    assert len(file.records) == 7 == len(file.path.read_text().splitlines())
    assert seen == ([5, 2, 1, 1, 1, 1, 1] if streams else [5, 2, 2, 2, 1])
    assert "memory was full with 5 samples at once; continuing with 2" in capsys.readouterr().out


def test_an_engine_with_batches_of_its_own_gets_a_window_at_once(tmp_path):
    seen = []

    def answer(*, images, prompts):
        seen.append(len(prompts))
        return reversed([(place, {"text": "a"}) for place in range(len(prompts))])

    _, file = ask(tmp_path / "p.jsonl", answer, has_own_batches=True, length_of=None)
    assert seen == [7] and len(file.records) == 7


# -- through evaluate.py ---------------------------------------------------------------------

SLOW = """
import time
from register import model_register
from stageline.inference import generation

@model_register("slow", without_effect=("seconds",))
def slow(model, processor, *, images, prompts, seconds: float = 0.0, **options):
    time.sleep(seconds)
    options = {name: options[name] for name in ("max_new_tokens", "temperature", "seed")}
    return generation.generate(model, processor, prompts=prompts, images=images, **options)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "slow_parts.py").write_text(SLOW)
    return Job(folder, num_rows=24)


def start(job, name, *options, ranks=1, seconds=0.0):
    words = [
        ROOT / "evaluate.py", "--model-path", job.model, "--dataset", "jsonl", "--dataset-path",
        job.rows, "--dataset.test_size", "1.0", "--prompt", "question", "--prompt-fn", "fill",
        "--image-token", "none", "--metric", "exact_match", "--device", "cpu", "--output-dir",
        job.folder / name, "--import", job.folder / "slow_parts.py", "--model", "slow", "--builder",
        "auto", "--max-new-tokens", 4, "--batch-size", 2, "--model.seconds", seconds,
        "--num-replicas", ranks, "--bootstrap.resamples", 10, *options,
    ]  # fmt: skip
    return ForkedRun(list(map(str, words)), ranks=ranks)


def lines_of(folder):
    files = [folder / "predictions.jsonl", *find_shards(folder / "predictions.jsonl")]
    return {
        file.name: [json.loads(text) for text in file.read_text().splitlines()]
        for file in files
        if file.exists()
    }


def test_killed_replicas_are_gone_on_with_by_other_numbers_of_them(job):
    whole = start(job, "whole").wait(120)
    assert whole.code == 0, whole.out + whole.err
    wanted = {r["id"]: r for r in lines_of(job.folder / "whole")["predictions.jsonl"]}
    folder = job.folder / "killed"
    first = start(job, "killed", ranks=2, seconds=0.2)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        found = lines_of(folder) if folder.exists() else {}
        if all(found.get(f"predictions-{n}.jsonl") for n in (0, 1)):
            break
        assert first.is_running(), first.wait().err
        time.sleep(0.02)
    for pid in first.pids.values():
        os.kill(pid, signal.SIGKILL)
    first.wait(20)
    left = lines_of(folder)
    answered = {r["id"] for name, records in left.items() for r in records}
    assert 0 < len(answered) < 24 and not left.get("predictions.jsonl")
    with shard_path(folder / "predictions.jsonl", 1).open("a") as shard:
        shard.write('{"id": "torn')
    second = start(job, "killed", ranks=3).wait(120)
    assert second.code == 0, second.out + second.err
    found = lines_of(folder)
    assert set(found) == {"predictions.jsonl"}, "no shard is left"
    records = {record["id"]: record for record in found["predictions.jsonl"]}
    assert len(found["predictions.jsonl"]) == 24 and records == wanted
    report = json.loads((folder / "report.json").read_text())
    assert report["engine"]["num_replicas"] == 3 and report["engine"]["dtype"] == "fp32"
    assert report["score"] == json.loads((job.folder / "whole/report.json").read_text())["score"]
    before = (folder / "predictions.jsonl").read_bytes()
    third = start(job, "killed").wait(60)
    assert third.code == 0 and "holds all 24 predictions already" in third.out
    assert (folder / "predictions.jsonl").read_bytes() == before


def test_replicas_of_what_has_none_are_refused(job):
    done = start(job, "refused", "--engine", "api", "--num-replicas", "2", ranks=1).wait(30)
    assert done.code == 2 and "--num-replicas does not go with --engine api" in done.err
