"""Each public format through the real entries: a training step, an evaluation, its figures.

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
    evaluate,
    make_llava,
    sample_rows,
    scripted,
    train,
)

CLASSES = {
    "vsr": spatial_sets.VSR,
    "spatial_mm": spatial_sets.SpatialMM,
    "whats_up": spatial_sets.WhatsUp,
    "rotate_qa": spatial_sets.RotateQA,
    "rotate_caption": spatial_sets.RotateCaption,
}


def number_of(sample_id):
    return int(sample_id.rpartition("-")[2]) - 1


# -- what a reader of the sample files says: (right text, wrong text, groups) of a sample ----


def vsr(sample_id):
    row = sample_rows("vsr/splits/random/test.jsonl")[number_of(sample_id)]
    right, wrong = ("Yes, it is.", "not true") if row["label"] else ("That is false.", "Correct.")
    return right, wrong, {"relation": row["relation"], "category": "projective"}


def spatial_mm(sample_id):
    _, subset, _ = sample_id.split("-")
    row = sample_rows(f"spatial_mm/spatial_mm_{subset}.json")[number_of(sample_id)]
    letter, _, text = row["answer"].partition(". ")
    is_verdict = text in ("yes", "no")
    wrong = {"yes": "no", "no": "Yes.", "left": "On the right", "right": "left"}.get(text, "left")
    question = row["question"]
    whose = "camera" if "camera's" in question else "in the picture"
    groups = {
        "subset": subset,
        "perspective": whose if "perspective" in question else "not said",
        "task": "yes or no" if is_verdict else "place",
        "relation": text,
    }
    return f"The answer is ({letter}).", wrong, groups


def whats_up(sample_id):
    _, subset, _ = sample_id.split("-")
    name = {"a": "controlled_images", "b": "controlled_clevr"}.get(subset)
    if name:
        row = sample_rows(f"whats_up/{name}_dataset.json")[number_of(sample_id)]
        captions = row["caption_options"]
    else:
        _, *captions = sample_rows("whats_up/coco_qa_two_obj.json")[number_of(sample_id)]
    words = captions[0].split()
    relation = next(
        word for word in ("left", "right", "front", "behind", "on", "under", "above", "below")
        if word in words
    )  # fmt: skip
    return captions[0], f"{captions[1]}.", {"relation": relation, "subset": subset}


def rotate_qa(sample_id):
    row = sample_rows("rotate_qa/rotate_qa.json")[number_of(sample_id)]
    groups = {"task": row["task"], "rotation": f"{row['rotation']} degrees"}
    answer = str(row["answer"])
    other = {"left": "right", "right": "left", "above": "below", "below": "above"}
    if row["task"] == "clock":
        hour = int(answer.split()[0])
        words = {3: "three", 6: "six", 9: "nine", 12: "twelve"}
        return f"At {words[hour]} o'clock", f"At {hour % 12 + 1} o'clock", groups
    if row["task"] == "angle":
        return f"By {answer}\u00b0", "45 degrees", groups
    return f"It is {answer}, not {other[answer]}.", other[answer], groups


def rotate_caption(sample_id):
    row = sample_rows("rotate_caption/rotate_caption.jsonl")[number_of(sample_id)]
    return row["caption"].upper(), "A dog.", {"rotation": f"{row['rotation']} degrees"}


READERS = {
    "vsr": vsr,
    "spatial_mm": spatial_mm,
    "whats_up_a": whats_up,
    "whats_up_coco": whats_up,
    "rotate_qa": rotate_qa,
    "rotate_caption": rotate_caption,
}
# answers in turn: as many right ones as of all others
TURNS = ("right", "wrong", "right", "I can't tell.", "right", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a tiny llava with random weights."""
    return make_llava(tmp_path_factory.mktemp("vlm"))


def held_out(name):
    key, options, _, _ = SETS[name]
    dataset = CLASSES[key](dataset_path=str(SAMPLES / key), split="test", **options)
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
    read = READERS[name]
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


def test_continued_limited_and_compared(model, tmp_path):
    """Answer, keep, repeat and refuse samples in evaluations of VSR's format."""
    ids = held_out("vsr")
    texts = {sample_id: vsr(sample_id)[0] for sample_id in ids}
    path = tmp_path / "eval/predictions.jsonl"
    some = evaluate(model, "vsr", tmp_path / "eval", *scripted(tmp_path, texts), "--limit", 5)
    assert some.code == 0, some.err
    report = json.loads((tmp_path / "eval/report.json").read_text())
    assert (report["num_samples"], report["num_rows"], report["score"]) == (5, len(ids), 1.0)
    kept = path.read_text()
    # the rest, in batches of another size; the first five are not asked again
    words = scripted(tmp_path, {sample_id: texts[sample_id] for sample_id in ids[5:]})
    rest = evaluate(model, "vsr", tmp_path / "eval", *words, "--batch-size", 2)
    assert rest.code == 0, rest.err
    assert path.read_text().startswith(kept)
    report = json.loads((tmp_path / "eval/report.json").read_text())
    assert (report["num_samples"], report["score"]) == (len(ids), 1.0)
    # the order of lines makes no difference; nothing is asked a third time
    lines = path.read_text().splitlines()
    path.write_text("\n".join(reversed(lines)) + "\n")
    again = evaluate(model, "vsr", tmp_path / "eval", *words)
    assert again.code == 0 and f"holds all {len(ids)} predictions" in again.out, again.err
    assert json.loads((tmp_path / "eval/report.json").read_text()) == report

    # another run, with three wrong answers, is compared sample by sample
    for index in (0, 2, 5):
        texts[ids[index]] = vsr(ids[index])[1]
    other = evaluate(
        model, "vsr", tmp_path / "other", *scripted(tmp_path, texts), "--compare-with", path
    )
    assert other.code == 0, other.err
    found = json.loads((tmp_path / "other/report.json").read_text())["comparison"]
    assert found["difference"] == pytest.approx(-3 / len(ids))
    assert (found["num_better"], found["num_worse"], found["p_value"]) == (0, 3, 0.25)
    relations = [vsr(ids[index])[2]["relation"] for index in (0, 2, 5)]
    for relation, part in found["groupings"]["relation"].items():
        assert part["num_worse"] == relations.count(relation)
    assert (
        "difference" in other.out and "Compared with" in (tmp_path / "other/report.md").read_text()
    )
