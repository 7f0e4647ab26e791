"""Checks that every dataset component passes: rows, splits, right answers, micro-batches."""

from collections.abc import Callable
from typing import Any

from register import collate_fn_register, image_token_register, prompt_fn_register
from tests.helpers.tiny_models import tiny_processor

Make = Callable[..., Any]  # split=... -> the dataset


def check_rows(make: Make) -> None:
    """Check that rows are pictures and samples with texts and ids of their own."""
    for split in ("train", "test"):
        dataset = make(split=split)
        assert len(dataset) > 0
        ids = set()
        for row in range(min(len(dataset), 40)):
            images, sample = dataset[row]
            assert all(image.size for image in images)
            assert isinstance(sample["question"], str) and isinstance(sample["answer"], str)
            assert isinstance(dataset.describe(row), str)
            ids.add(sample["id"])
        assert len(ids) == min(len(dataset), 40), "ids are unique"


def check_splits(make: Make, *, by_files: bool = False) -> None:
    """Check that train and test share nothing, unless the files set it, and that test is stable."""
    sides = []
    for split in ("train", "test"):
        dataset = make(split=split)
        sides.append({dataset[row][1]["id"] for row in range(len(dataset))})
    if not by_files:
        assert not sides[0] & sides[1]
    again = make(split="test")
    assert sides[1] == {again[row][1]["id"] for row in range(len(again))}


def check_right_answers(make: Make, metric: Callable[..., dict[str, Any]]) -> None:
    """Check that the metric accepts every answer of the dataset."""
    dataset = make(split="train")
    samples = [dataset[row][1] for row in range(min(len(dataset), 40))]
    predictions = [{"prediction": sample["answer"]} for sample in samples]
    result = metric(predictions, samples)
    assert result["score"] == 1.0
    grouped = sorted(i for rows in result["groups"].values() for i in rows)
    assert grouped == list(range(len(samples)))


def check_micro_batch(make: Make, *, prompt: str, prompt_fn: str) -> None:
    """Check that two rows become a micro-batch whose labels are their answers."""
    dataset = make(split="train")
    processor = tiny_processor("internvl")
    batch = collate_fn_register["sft"](
        [dataset[0], dataset[1]],
        prompt=prompt,
        prompt_fn=prompt_fn_register[prompt_fn],
        image_token=image_token_register["auto"],
        processor=processor,
        pad_token_id=0,
        max_token_num=500,
        stage=0,
        num_stages=2,
    )
    assert batch["labels"].shape == batch["input_ids"].shape
    for row, labels in enumerate(batch["labels"]):
        learnt = processor.tokenizer.decode(labels[labels != -100], skip_special_tokens=True)
        assert learnt.strip() == dataset[row][1]["answer"]
