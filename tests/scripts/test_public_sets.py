"""Each public format through the real entries: a training step, an evaluation, its figures.

The model is tiny and knows nothing. It generates all the same; then its words are replaced by
written ones, so that some are right, some wrong and some say nothing, and the figures of the report
are counted again here, from the rows of the sample files alone.
"""

import importlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration

from register import dataset_register, import_shelf
from stageline.testing.small_run import ForkedRun
from stageline.testing.tiny_models import tiny_config
from stageline.testing.tiny_processors import tiny_processor

import_shelf("dataset")
# forked processes need not import these again
for module in ("pipeline.runner", "training.report", "inference.generation", "plotting.groups"):
    importlib.import_module(f"stageline.{module}")

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "tests" / "samples"
SCRIPTED = '''
"""Generates, and then says what is written in a file."""

import json
from pathlib import Path

from register import model_register
from stageline.inference import generation


@model_register("scripted")
def scripted(model, processor, *, images, prompts, max_new_tokens, temperature, seed, texts: str):
    """Answers line by line.

    Args:
        texts: file with a list of texts.
    """
    answers = generation.generate(
        model, processor, prompts=prompts, images=images, max_new_tokens=max_new_tokens
    )
    said = json.loads(Path(texts).read_text())
    scripted.place = getattr(scripted, "place", 0)
    for answer, image in zip(answers, images, strict=True):
        assert len(image) == 1 and isinstance(answer["text"], str)
        answer["text"] = said[scripted.place]
        scripted.place += 1
    return answers
'''


def rows_of(file):
    text = (SAMPLES / file).read_text()
    return json.loads(text) if file.endswith(".json") else [*map(json.loads, text.splitlines())]


def number_of(sample_id):
    return int(sample_id.rpartition("-")[2]) - 1


# -- what a reader of the sample files says: (right text, wrong text, groups) of a sample ----


def vsr(sample_id):
    row = rows_of("vsr/splits/random/test.jsonl")[number_of(sample_id)]
    right, wrong = ("Yes, it is.", "not true") if row["label"] else ("That is false.", "Correct.")
    return right, wrong, {"relation": row["relation"], "category": "projective"}


def spatial_mm(sample_id):
    _, subset, _ = sample_id.split("-")
    row = rows_of(f"spatial_mm/spatial_mm_{subset}.json")[number_of(sample_id)]
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
        row = rows_of(f"whats_up/{name}_dataset.json")[number_of(sample_id)]
        captions = row["caption_options"]
    else:
        _, *captions = rows_of("whats_up/coco_qa_two_obj.json")[number_of(sample_id)]
    words = captions[0].split()
    relation = next(
        word for word in ("left", "right", "front", "behind", "on", "under", "above", "below")
        if word in words
    )  # fmt: skip
    return captions[0], f"{captions[1]}.", {"relation": relation, "subset": subset}


def rotate_qa(sample_id):
    row = rows_of("rotate_qa/rotate_qa.json")[number_of(sample_id)]
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
    row = rows_of("rotate_caption/rotate_caption.jsonl")[number_of(sample_id)]
    return row["caption"].upper(), "A dog.", {"rotation": f"{row['rotation']} degrees"}


# name -> dataset options, prompt, metric, reader of the files
SETS = {
    "vsr": ((), "vsr", "vsr", vsr),
    "spatial_mm": (("--dataset.test_size", 8), "vqa", "spatial_mm", spatial_mm),
    "whats_up_a": (("--dataset.test_size", 8), "vqa", "whats_up", whats_up),
    "whats_up_coco": (
        ("--dataset.test_size", 4, "--dataset.subset", "coco_two"), "vqa", "whats_up", whats_up,
    ),
    "rotate_qa": (("--dataset.test_size", 12), "vqa", "rotate_qa", rotate_qa),
    "rotate_caption": (("--dataset.test_size", 4), "caption", "exact_match", rotate_caption),
}  # fmt: skip
# answers in turn: right, wrong, nothing (twice as many right ones)
TURNS = ("right", "wrong", "right", "I can't tell.", "right", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny llava with random weights."""
    folder = tmp_path_factory.mktemp("vlm")
    processor = tiny_processor("llava")
    processor.save_pretrained(folder)
    torch.manual_seed(0)
    config = tiny_config("llava", vocab_size=len(processor.tokenizer), max_position_embeddings=512)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


def dataset_words(name):
    options, prompt, _, _ = SETS[name]
    key = "whats_up" if name.startswith("whats_up") else name
    words = ["--dataset", key, "--dataset-path", SAMPLES / key, *options]
    texts = ("--prompt", prompt, "--prompt-fn", "fill", "--image-token", "auto")
    return [*words, *texts, "--device", "cpu"]


def run(program, *words, ranks=1):
    return ForkedRun([str(word) for word in (ROOT / program, *words)], ranks=ranks).wait(60)


def train(model, name, folder):
    return run(
        *("train_pp.py", "--train-model", "llava", "--model-path", model, *dataset_words(name)),
        *("--collate-fn", "sft", "--num-stages", 2, "--batch-size", 4, "--micro-batch-size", 2),
        *("--total-steps", 1, "--max-token-num", 400, "--eval-samples", 0, "--timeline-step", 0),
        *("--learning-rate", 1e-2, "--output-dir", folder),
        ranks=2,
    )


def evaluate(model, name, folder, *words):
    return run(
        *("evaluate.py", "--builder", "auto", "--model-path", model, *dataset_words(name)),
        *("--metric", SETS[name][2], "--output-dir", folder, "--batch-size", 3),
        *("--max-new-tokens", 3, *words),
    )


def scripted(folder, texts):
    """The words of a command that answers so."""
    (folder / "scripted_part.py").write_text(SCRIPTED)
    (folder / "texts.json").write_text(json.dumps(texts))
    part = ("--import", folder / "scripted_part.py", "--model", "scripted")
    return (*part, "--model.texts", folder / "texts.json")


def held_out(name):
    options, _, _, _ = SETS[name]
    key = "whats_up" if name.startswith("whats_up") else name
    names = [option.removeprefix("--dataset.") for option in options[::2]]
    kwargs = dict(zip(names, options[1::2], strict=True))
    dataset = dataset_register[key](dataset_path=str(SAMPLES / key), split="test", **kwargs)
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


@pytest.mark.parametrize("name", SETS)
def test_train_evaluate_and_count(name, model, tmp_path):
    done = train(model, name, tmp_path / "run")
    assert done.code == 0, done.out + done.err
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    (step,) = [record for record in log if record["kind"] == "train"]
    assert math.isfinite(step["loss"]) and step["grad_norm"] > 0
    trained = tmp_path / "run/checkpoints/step-00000001"

    read = SETS[name][3]
    ids = held_out(name)
    kinds = [TURNS[index % len(TURNS)] for index in range(len(ids))]
    told = {sample_id: read(sample_id) for sample_id in ids}
    texts = [
        {"right": told[i][0], "wrong": told[i][1]}.get(kind, kind)
        for i, kind in zip(ids, kinds, strict=True)
    ]
    done = evaluate(trained, name, tmp_path / "eval", *scripted(tmp_path, texts))
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
    """What an evaluation answers, keeps, answers anew and refuses, on VSR's format."""
    ids = held_out("vsr")
    texts = [vsr(sample_id)[0] for sample_id in ids]
    path = tmp_path / "eval/predictions.jsonl"
    some = evaluate(model, "vsr", tmp_path / "eval", *scripted(tmp_path, texts[:5]), "--limit", 5)
    assert some.code == 0, some.err
    report = json.loads((tmp_path / "eval/report.json").read_text())
    assert (report["num_samples"], report["num_rows"], report["score"]) == (5, len(ids), 1.0)
    kept = path.read_text()
    # the rest, in batches of another size; the first five are not asked again
    words = scripted(tmp_path, texts[5:])
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
        texts[index] = vsr(ids[index])[1]
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


def changed_copy(name, folder, file, change):
    """A copy of a sample set in which one row of a file is changed."""
    shutil.copytree(SAMPLES / name, folder / name)
    path = folder / name / file
    rows = rows_of(f"{name}/{file}")
    change(rows)
    lines = map(json.dumps, rows)
    path.write_text(json.dumps(rows) if file.endswith(".json") else "\n".join(lines) + "\n")
    return folder / name


def refused(done, code, *words):
    assert done.code == code, done.out + done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("error[")]
    assert "Traceback" not in done.err
    for word in words:
        assert word in line, line


def test_bad_rows_end_an_evaluation_or_are_left_out(model, tmp_path):
    def misspell(rows):
        rows[2]["relation"] = "lef of"

    data = changed_copy("vsr", tmp_path, "splits/random/test.jsonl", misspell)
    words = ("--dataset-path", data, *scripted(tmp_path, []))
    done = evaluate(model, "vsr", tmp_path / "eval", *words, "--check-only")
    refused(
        done, 3, "test.jsonl:3: sample vsr-random-test-3: the relation 'lef of' is not known",
        "nearest: left of", "--dataset.other_relations allow",
    )  # fmt: skip
    others = ("--dataset.other_relations", "allow", "--check-only")
    assert evaluate(model, "vsr", tmp_path / "eval", *words, *others).code == 0
    texts = ["true"] * 7
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
    refused(done, 2, "sample 'vsr-random-test-1' was made for answer", "--output-dir")
    compared = ("--compare-with", tmp_path / "eval/predictions.jsonl", "--check-only")
    done = evaluate(model, "vsr", tmp_path / "third", *words, *others[:2], *compared)
    refused(done, 2, "--compare-with", "1 of 8 samples", "'vsr-random-test-3' among them")


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
    options = ("--dataset-path", data, "--dataset.test_size", 0)
    done = run(
        *("train_pp.py", "--train-model", "llava", "--model-path", model, *dataset_words(name)),
        *("--collate-fn", "sft", "--num-stages", 1, "--batch-size", 4, "--micro-batch-size", 2),
        *("--total-steps", 1, "--max-token-num", 400, "--output-dir", tmp_path / "run"),
        *(options if name != "vsr" else options[:2]),
    )
    refused(done, 3, *words)


def huge_picture(path):
    """More pixels than are decoded, in a small file."""
    Image.new("1", (8000, 8000)).save(path)


def test_pictures_against_places(model, tmp_path):
    """A template with two places for the one picture of a row: exit code 3, with the sample."""
    done = run(
        *("train_pp.py", "--train-model", "llava", "--model-path", model, *dataset_words("vsr")),
        *("--prompt", "two_pictures", "--collate-fn", "sft", "--num-stages", 1),
        *("--batch-size", 4, "--micro-batch-size", 2, "--total-steps", 1),
        *("--output-dir", tmp_path / "run", "--import", two_pictures(tmp_path)),
    )
    refused(done, 3, "sample vsr-random-train-1", "2 places", "1 image")


def two_pictures(folder):
    path = folder / "two_pictures_part.py"
    path.write_text(
        "from register import prompt_register\n"
        'prompt_register["two_pictures"] = "[IMAGE][IMAGE]\\n[QUESTION] [ANSWER]"\n'
    )
    return path


def test_the_samples_are_small():
    files = [path for path in SAMPLES.rglob("*") if path.suffix != ".py" and path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200_000
