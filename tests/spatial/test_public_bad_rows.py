"""Bad rows of public sets through the real entries: one message, the exit code of its kind."""

import json
import shutil

import pytest
from PIL import Image

from tests.helpers.sample_runs import (
    assert_refused,
    changed_copy,
    evaluate,
    make_llava,
    scripted,
    train,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny llava with random weights."""
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
    assert_refused(done, 2, "--compare-with", "1 of 8 samples", "'vsr-random-test-3' among them")


@pytest.mark.parametrize(
    ("name", "file", "change", "words"),
    [
        (
            "spatial_mm", "spatial_mm_one_obj.json", {"answer": "E. up"},
            ("one_obj.json: row 1: sample spatial_mm-one_obj-1", "none of the 4 options"),
        ),
        (
            "rotate_qa", "rotate_qa.json", {"options": ["right", "below"]},
            ("rotate_qa.json: row 1: sample rotate_qa-1", "'left' is none of the options"),
        ),
        ("vsr", "splits/random/train.jsonl", {"image": "gone.jpg"},
         ("train.jsonl:1: sample vsr-random-train-1", "no image gone.jpg")),
        ("vsr", "splits/random/train.jsonl", {"image": "huge.png"},
         ("train.jsonl:1: sample vsr-random-train-1", "pixels", "huge.png")),
    ],
)  # fmt: skip
def test_bad_rows_end_a_training_run(name, file, change, words, model, tmp_path):
    data = changed_copy(name, tmp_path, file, lambda rows: rows[0].update(change))
    if "huge.png" in change.values():
        huge_picture(data / "images/huge.png")
    sizes = () if name == "vsr" else ("--dataset.test_size", 0)
    done = train(model, name, tmp_path / "run", "--dataset-path", data, *sizes, ranks=1)
    assert_refused(done, 3, *words)


def huge_picture(path):
    """More pixels than are decoded, in a small file."""
    Image.new("1", (8000, 8000)).save(path)


def test_pictures_against_places(model, tmp_path):
    """A template with two places for the one picture of a row: exit code 3, with the sample."""
    words = ("--prompt", "two_pictures", "--import", two_pictures(tmp_path))
    done = train(model, "vsr", tmp_path / "run", *words, ranks=1)
    assert_refused(done, 3, "sample vsr-random-train-1", "2 places", "1 image")


def two_pictures(folder):
    path = folder / "two_pictures_part.py"
    path.write_text(
        "from register import prompt_register\n"
        'prompt_register["two_pictures"] = "[IMAGE][IMAGE]\\n[QUESTION] [ANSWER]"\n'
    )
    return path
