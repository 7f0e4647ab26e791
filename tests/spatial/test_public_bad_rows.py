"""Bad rows of public sets through the real entries: one message, the exit code of its kind."""

import json
import shutil

import pytest

from tests.helpers.sample_runs import assert_refused, changed_copy, evaluate, make_llava, scripted


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a tiny llava with random weights."""
    return make_llava(tmp_path_factory.mktemp("vlm"))


def test_bad_rows_end_an_evaluation_or_are_left_out(model, tmp_path):
    def misspell(rows):
        rows[2]["relation"] = "lef of"

    data = changed_copy("vsr", tmp_path, "splits/random/test.jsonl", misspell)
    words = ("--dataset-path", data, *scripted(tmp_path, {}))
    done = evaluate(model, "vsr", tmp_path / "eval", *words, "--check-only")
    assert_refused(
        done, 3, "test.jsonl:3: sample vsr-random-test-3: the relation 'lef of' is not known",
        "nearest: left of", "--dataset.other_relations allow",
    )  # fmt: skip
    others = ("--dataset.other_relations", "allow", "--check-only")
    assert evaluate(model, "vsr", tmp_path / "eval", *words, *others).code == 0
    texts = {"*": "true"}
    words = ("--dataset-path", data, *scripted(tmp_path, texts), "--skip-bad-rows", 1)
    done = evaluate(model, "vsr", tmp_path / "eval", *words)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "eval/report.json").read_text())["num_samples"] == 7
    assert "test.jsonl:3" in (tmp_path / "eval/bad_rows.jsonl").read_text()
    # the same folder, other data under the same path and ids: nothing is scored with it
    shutil.rmtree(data)

    def turn_round(rows):
        misspell(rows)
        rows[0]["label"] = 1 - rows[0]["label"]

    changed_copy("vsr", tmp_path, "splits/random/test.jsonl", turn_round)
    done = evaluate(model, "vsr", tmp_path / "eval", *words)
    assert_refused(done, 2, "sample 'vsr-random-test-1' was made for answer", "--output-dir")
    compared = ("--compare-with", tmp_path / "eval/predictions.jsonl", "--check-only")
    done = evaluate(model, "vsr", tmp_path / "third", *words, *others[:2], *compared)
    assert_refused(done, 2, "--compare-with", "1 of 8 samples", "such as 'vsr-random-test-3'")
