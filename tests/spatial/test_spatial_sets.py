"""The components of `--import examples.spatial.parts`: rows, splits and words of each dataset."""

import functools

import pytest

from register import dataset_register, import_shelf, metric_register, prompt_register
from stageline.errors import UserError
from tests.helpers.dataset_checks import (
    check_micro_batch,
    check_right_answers,
    check_rows,
    check_splits,
)
from tests.helpers.tiny_datasets import make_rotate, make_spatial_mm, make_vsr, make_whats_up

import_shelf("prompt", "prompt_fn", "dataset", "metric")
pytestmark = pytest.mark.usefixtures("parts")
# key -> makes the files, metric, template
SETS = {
    "scenes": (lambda folder: None, "rotate_qa", "vqa"),
    "vsr": (make_vsr, "vsr", "vsr"),
    "spatial_mm": (make_spatial_mm, "spatial_mm", "vqa"),
    "whats_up": (make_whats_up, "whats_up", "vqa"),
    "rotate_qa": (make_rotate, "rotate_qa", "vqa"),
    "rotate_caption": (make_rotate, "contains", "caption"),
}


def _maker(key, folder):
    SETS[key][0](folder)
    return functools.partial(dataset_register[key], dataset_path=str(folder))


def _dataset(key, folder, **options):
    return _maker(key, folder)(**options)


@pytest.mark.parametrize("key", SETS)
def test_rows_splits_right_answers_and_a_micro_batch(key, tmp_path):
    make = _maker(key, tmp_path)
    check_rows(make)
    check_splits(make)
    check_right_answers(make, metric_register[SETS[key][1]])
    check_micro_batch(make, prompt=prompt_register[SETS[key][2]], prompt_fn="chat")


def test_vsr_splits_and_words(tmp_path):
    dataset = _dataset("vsr", tmp_path, split="test", split_type="zeroshot", answers="yes_no")
    sample = dataset[1][1]
    assert sample["caption"] == "The dog is left of the zeroshot test cat."
    assert (sample["answer"], sample["label"], sample["group"]) == ("yes", 1, "left of")
    assert dataset[0][1]["answer"] == "no"
    assert sample["source"].endswith("zeroshot/test.jsonl:2")
    assert sample["groups"] == {"relation": "left of", "category": "projective"}
    assert len(_dataset("vsr", tmp_path, split="dev")) == 4


def test_spatial_mm_keeps_pictures_together_and_can_hold_out_all(tmp_path):
    whole = _dataset("spatial_mm", tmp_path, split="test", test_size=1.0)
    assert len(whole) == 10
    sample = whole[1][1]
    assert sample["choices"] == ["left", "top left"] and sample["answer_index"] == 1
    assert sample["group"] == "one_obj: in the picture"
    assert sample["groups"] == {
        "subset": "one_obj", "perspective": "in the picture", "task": "place",
        "relation": "top left",
    }  # fmt: skip
    assert whole[0][1]["group"] == "one_obj: camera"
    hop = _dataset("spatial_mm", tmp_path, split="test", subset="multihop", test_size=1.0)
    assert hop[0][1]["answer"] == "pink" and "choices" not in hop[0][1]


def test_whats_up_does_not_give_the_answer_away(tmp_path):
    dataset = _dataset("whats_up", tmp_path, split="test", test_size=1.0)
    samples = [dataset[row][1] for row in range(len(dataset))]
    assert len({sample["answer_index"] for sample in samples}) > 1, "not always the first"
    assert all(s["choices"][s["answer_index"]] == s["caption"] for s in samples)
    assert {sample["group"] for sample in samples} == {"left", "right", "on", "under"}
    coco = _dataset("whats_up", tmp_path, split="test", subset="coco_one", test_size=1.0)
    assert coco[0][0][0].size == (20, 30)


def test_whats_up_keeps_pairs_of_objects_together(tmp_path):
    sides = []
    for split in ("train", "test"):
        dataset = _dataset("whats_up", tmp_path, split=split, test_size=4)
        sides.append({dataset[row][1]["caption"].split()[1] for row in range(len(dataset))})
    assert sides[0] | sides[1] == {"mug", "book", "cap"} and not sides[0] & sides[1]


def test_rotated_pictures(tmp_path):
    dataset = _dataset("rotate_qa", tmp_path, split="train", rotate_images=True)
    for row in range(len(dataset)):
        images, sample = dataset[row]
        upright = sample["rotation"] in (0, 180)
        assert images[0].size == ((20, 30) if upright else (30, 20))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="Give that of the dataset vsr"):
        dataset_register["vsr"](dataset_path=None)
    with pytest.raises(UserError, match=r"random/train.jsonl.*--dataset-path"):
        dataset_register["vsr"](dataset_path=str(tmp_path))
