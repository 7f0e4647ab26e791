"""Rows of the public sets that can't be used: one error each, with file, line and sample."""

import json

import pytest
from PIL import Image

from register import dataset_register, import_shelf
from stageline.data.rows.bad_rows import BadRows, leaving_out
from stageline.errors import DataError
from tests.helpers.tiny_datasets import (
    make_rotate,
    make_spatial_mm,
    make_vsr,
    make_whats_up,
    write_json,
    write_lines,
)

import_shelf("dataset")
pytestmark = pytest.mark.usefixtures("parts")

# key -> makes the files, the file, what its third row is called
SETS = {
    "vsr": (make_vsr, "data/splits/random/train.jsonl", "vsr-random-train-3"),
    "spatial_mm": (make_spatial_mm, "spatial_mm_one_obj.json", "spatial_mm-one_obj-3"),
    "whats_up": (make_whats_up, "controlled_images_dataset.json", "whats_up-a-3"),
    "rotate_qa": (make_rotate, "rotate_qa.json", "rotate_qa-3"),
    "rotate_caption": (make_rotate, "rotate_caption.jsonl", "rotate_caption-3"),
}
MUG = ["A mug on a table", "A mug under a table"]
ROWS = [
    ("vsr", {"label": "maybe"}, "label is 'maybe'"),
    ("vsr", {"image": 5}, "'image' is 5"),
    ("vsr", {"image": "../x.jpg"}, "leads out"),
    ("vsr", {"relation": "lef of"}, r"relation 'lef of' is not known \(nearest: left of"),
    ("spatial_mm", {"answer": "E. up"}, "'E. up' names none of the 2 options"),
    ("spatial_mm", {"answer": "A. top left"}, "the option 'left' and the text of another"),
    ("spatial_mm", {"question": "Where?\nA. left\nB. Left"}, "'left' stands twice"),
    ("whats_up", {"caption_options": [MUG[0], *MUG]}, "stands twice"),
    ("whats_up", {"caption_options": ["A mug nigh a table", *MUG]}, "it has none of the words"),
    ("rotate_qa", {"rotation": "ninety"}, "rotation is 'ninety'"),
    ("rotate_qa", {"task": "clok"}, r"task 'clok' is not known \(nearest: clock"),
    ("rotate_qa", {"task": "clock", "answer": "left"}, "'left' does not fit the task 'clock'"),
    ("rotate_qa", {"options": ["left", "up"], "answer": "C"}, "'C' is not one of the options"),
]


def made(key, folder, change, **options):
    """Return the dataset after a change of the third row."""
    make, name, _ = SETS[key]
    make(folder)
    file = folder / name
    text = file.read_text()
    rows = json.loads(text) if file.suffix == ".json" else list(map(json.loads, text.splitlines()))
    rows[2] = {**rows[2], **change}
    (write_json if file.suffix == ".json" else write_lines)(file, rows)
    options = options if key == "vsr" else {"test_size": 0, **options}
    return dataset_register[key](dataset_path=str(folder), split="train", **options)


def place_of(key):
    _, name, sample = SETS[key]
    place = ": row 3" if name.endswith(".json") else ":3"
    return f"{name}{place}: sample {sample}: "


@pytest.mark.parametrize(("key", "change", "reason"), ROWS)
def test_bad_rows_are_named_when_the_dataset_is_made(key, change, reason, tmp_path):
    with pytest.raises(DataError, match=f"{place_of(key)}.*{reason}") as caught:
        made(key, tmp_path, change)
    assert caught.value.exit_code == 3 and "correct the row" in str(caught.value).lower()
    whole = len(made(key, tmp_path, {}))
    with leaving_out(BadRows(1)) as bad_rows:
        assert len(made(key, tmp_path, change)) == whole - 1
    assert len(bad_rows) == 1


@pytest.mark.parametrize("key", SETS)
def test_a_picture_that_is_missing_is_told_with_its_sample(key, tmp_path):
    field = {"spatial_mm": "image_name", "whats_up": "image_path"}.get(key, "image")
    dataset = made(key, tmp_path, {field: "data/mug_gone_table.jpg"})
    row = next(i for i in range(len(dataset)) if dataset.rows[i].number == 3)
    with pytest.raises(DataError, match=f"{place_of(key)[:-2]}: there is no image .*gone"):
        dataset[row]


def test_relations_are_compared_without_case_and_spaces_and_others_can_be_allowed(tmp_path):
    dataset = made("vsr", tmp_path, {"relation": " Left  of "})
    assert dataset[2][1]["relation"] == "left of"
    dataset = made("vsr", tmp_path, {"relation": "Next  Door To"}, other_relations="allow")
    assert dataset[2][1]["group"] == "next door to"


def test_pictures_of_the_same_row_are_one_cluster(tmp_path):
    make_rotate(tmp_path)
    dataset = dataset_register["rotate_qa"](dataset_path=str(tmp_path), split="train", test_size=0)
    clusters = [dataset[row][1]["cluster"] for row in range(len(dataset))]
    assert len(clusters) == 15 and len(set(clusters)) == 5
    assert isinstance(dataset[0][0][0], Image.Image)
