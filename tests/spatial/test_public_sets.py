"""Public formats through the real entries: a training step, evaluations, their figures.

The model is tiny and untrained. It generates all the same; then its words are replaced by written
ones, so that some are right, some wrong and some say nothing, and the figures of the report are
counted again here, only from the rows of the sample files.
"""

import json
import math

import pytest

from examples.spatial import spatial_sets
from tests.helpers.sample_runs import (
    SAMPLES,
    SETS,
    assert_refused,
    changed_copy,
    evaluate,
    make_llava,
    sample_rows,
    scripted,
    train,
)


def number_of(sample_id):
    return int(sample_id.rpartition("-")[2]) - 1


# -- what a reader of the sample files says: (right text, wrong text, groups) of a sample ----


def vsr(sample_id):
    row = sample_rows("vsr/splits/random/test.jsonl")[number_of(sample_id)]
    right, wrong = ("Yes, it is.", "not true") if row["label"] else ("That is false.", "Correct.")
    return right, wrong, {"relation": row["relation"], "category": "projective"}


def whats_up(sample_id):
    row = sample_rows("whats_up/controlled_images_dataset.json")[number_of(sample_id)]
    right, wrong, *_ = row["caption_options"]
    relation = next(word for word in ("left", "right", "on", "under") if word in right.split())
    return right, f"{wrong}.", {"relation": relation, "subset": "a"}


READERS = {"vsr": (spatial_sets.VSR, vsr), "whats_up_a": (spatial_sets.WhatsUp, whats_up)}
# answers in turn: as many right ones as of all others
TURNS = ("right", "wrong", "right", "I can't tell.", "right", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a tiny llava with random weights."""
    return make_llava(tmp_path_factory.mktemp("vlm"))


def held_out(name):
    key, options, _, _ = SETS[name]
    dataset = READERS[name][0](dataset_path=str(SAMPLES / key), split="test", **options)
    return [dataset[row][1]["id"] for row in range(len(dataset))]


def counted(ids, kinds, groups_of):
    """Right, unparsed and number of samples of each group, by a plain count."""
    counts = {}
    for sample_id, kind in zip(ids, kinds, strict=True):
        for grouping, name in [("all", "all"), *groups_of(sample_id).items()]:
            count = counts.setdefault((grouping, name), [0, 0, 0])
            count[0] += kind == "right"
            count[1] += kind not in ("right", "wrong")
            count[2] += 1
    return counts


def test_a_step_of_training(model, tmp_path):
    done = train(model, "vsr", tmp_path / "run")
    assert done.code == 0, done.out + done.err
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    (step,) = [record for record in log if record["kind"] == "train"]
    assert math.isfinite(step["loss"]) and step["grad_norm"] > 0


@pytest.mark.parametrize("name", READERS)
def test_evaluate_and_count(name, model, tmp_path):
    read = READERS[name][1]
    ids = held_out(name)
    kinds = [TURNS[index % len(TURNS)] for index in range(len(ids))]
    told = {sample_id: read(sample_id) for sample_id in ids}
    texts = [
        {"right": told[i][0], "wrong": told[i][1]}.get(kind, kind)
        for i, kind in zip(ids, kinds, strict=True)
    ]
    done = evaluate(model, name, tmp_path / "eval", *scripted(tmp_path, dict(zip(ids, texts))))
    assert done.code == 0, done.out + done.err
    report = json.loads((tmp_path / "eval/report.json").read_text())
    found = {
        (grouping, group): share
        for grouping, groups in {"all": {"all": report}, **report["groupings"]}.items()
        for group, share in groups.items()
    }
    expected = counted(ids, kinds, lambda sample_id: told[sample_id][2])
    assert set(found) == set(expected)
    for key, (right, unparsed, number) in expected.items():
        share = found[key]
        assert (share["num_samples"], share["num_unparsed"]) == (number, unparsed), key
        assert share["score"] == pytest.approx(right / number), key
        for low, high in (share["interval_95"], share["bootstrap_95"]):
            assert 0 <= low <= right / number <= high <= 1, key
    check_pairs(name, report, ids, kinds)
    for file in ("report.md", "groups.png", "predictions.png"):
        assert (tmp_path / "eval" / file).is_file()


def check_pairs(name, report, ids, kinds):
    """Pairs and sets of What'sUp's controlled pictures: all rows of a file in groups of four."""
    if name != "whats_up_a":
        assert "pair_accuracy" not in report
        return
    hits = {number_of(i): kind == "right" for i, kind in zip(ids, kinds, strict=True)}
    sets = [[hits[n] for n in range(first, first + 4)] for first in sorted(hits) if first % 4 == 0]
    pairs = [pair for four in sets for pair in (four[:2], four[2:])]
    assert (report["num_pairs"], report["num_sets"]) == (len(pairs), len(sets))
    assert report["pair_accuracy"] == sum(map(all, pairs)) / len(pairs)
    assert report["set_accuracy"] == sum(map(all, sets)) / len(sets)


def test_a_bad_row_ends_an_evaluation_or_is_left_out(model, tmp_path):
    def misspell(rows):
        rows[2]["relation"] = "lef of"

    data = changed_copy("vsr", tmp_path, "splits/random/test.jsonl", misspell)
    words = ("--dataset-path", data, *scripted(tmp_path, {"*": "true"}))
    done = evaluate(model, "vsr", tmp_path / "eval", *words, "--check-only")
    told = "test.jsonl:3: sample vsr-random-test-3: the relation 'lef of' is not known"
    assert_refused(done, 3, told, "nearest: left of", "--dataset.other_relations allow")
    done = evaluate(model, "vsr", tmp_path / "eval", *words, "--skip-bad-rows", 1)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "eval/report.json").read_text())["num_samples"] == 7
    assert "test.jsonl:3" in (tmp_path / "eval/bad_rows.jsonl").read_text()
