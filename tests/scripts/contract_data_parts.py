"""Datasets, texts and collate parts that break their contract, one way each."""

import torch

from dataset import sft as collate_sft
from prompt_fn import fill
from register import (
    collate_fn_register,
    dataset_register,
    image_token_register,
    metric_register,
    prompt_fn_register,
)

# -- datasets ------------------------------------------------------------------------------------


class Rows:
    """Good rows; each one below breaks one thing.

    Args:
        number: of rows.
    """

    def __init__(self, *, dataset_path=None, split="train", number: int = 24):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, row):
        if not 0 <= row < self.number:
            raise IndexError(row)
        return None, self.sample(row)

    def sample(self, row):
        return {"id": str(row), "question": f"{row}?", "answer": "!" * (1 + row % 5)}


dataset_register["rows"] = Rows


def other_rows(key, change):
    """A dataset with other rows: change(sample)."""

    class OtherRows(Rows):
        def __getitem__(self, row):
            return change(self.sample(row))

    dataset_register[key] = OtherRows


other_rows("row_is_none", lambda sample: None)
other_rows("row_is_a_dict", lambda sample: sample)
other_rows("row_is_three", lambda sample: (None, sample, 0))
other_rows("row_is_a_dict_of_two", lambda sample: {"question": "1?", "answer": "!"})
other_rows("has_no_id", lambda sample: (None, {"question": "0?", "answer": "!"}))
other_rows("sample_is_a_text", lambda sample: (None, "0? !"))
other_rows("row_has_paths_for_images", lambda sample: (["0.png"], sample))
other_rows("row_has_a_tensor", lambda sample: (torch.zeros(3, 24, 24), sample))


@dataset_register("row_is_swapped")
class RowIsSwapped(Rows):
    def __getitem__(self, row):
        return self.sample(row), None


@dataset_register("takes_no_path")
class TakesNoPath(Rows):
    def __init__(self, *, split="train"):
        self.number = 24


@dataset_register("has_no_getitem")
class HasNoGetitem:
    def __init__(self, *, dataset_path=None, split="train"):
        pass

    def __len__(self):
        return 24


@dataset_register("long_test_rows")
class LongTestRows(Rows):
    def __init__(self, *, dataset_path=None, split="train"):
        self.number, self.is_test = 24, split == "test"

    def sample(self, row):
        return {**super().sample(row), "answer": "!" * (90 if self.is_test else 1 + row % 5)}


@dataset_register("some_long_rows")
class SomeLongRows(Rows):
    def sample(self, row):
        return {**super().sample(row), "answer": "!" * (3 if row % 5 == 0 else 90)}


# -- texts ---------------------------------------------------------------------------------------


@prompt_fn_register("gives_none")
def gives_none(sample, prompt, *, processor=None, for_generation=False):
    """A forgotten return."""


@prompt_fn_register("gives_pieces")
def gives_pieces(sample, prompt, *, processor=None, for_generation=False):
    return list(fill(sample, prompt))


@prompt_fn_register("raises_key_error")
def raises_key_error(sample, prompt, *, processor=None, for_generation=False):
    return fill({**sample, "question": sample["title"]}, prompt)


@image_token_register("image_token_one")
def image_token_one(rendered):
    return rendered


# -- collate functions ---------------------------------------------------------------------------


def other_batches(key, change):
    """A collate part with other batches: change(batch)."""

    @collate_fn_register(key)
    def collate(samples, *, num_stages, **common):
        return change(collate_sft(samples, num_stages=num_stages, **common))


other_batches("collate_none", lambda batch: None)
other_batches("collate_lists", lambda batch: {n: v.tolist() for n, v in batch.items()})
other_batches("collate_no_mask", lambda batch: {n: batch[n] for n in ("input_ids", "labels")})
other_batches("collate_float_ids", lambda batch: {**batch, "input_ids": batch["input_ids"].float()})
other_batches("collate_short_labels", lambda batch: {**batch, "labels": batch["labels"][:, 1:]})


@collate_fn_register("collate_fewer_rows")
def collate_fewer_rows(samples, *, num_stages, **common):
    batch = collate_sft(samples, num_stages=num_stages, **common)
    return {name: value[:-1] for name, value in batch.items()} if len(samples) > 1 else batch


@collate_fn_register("collate_no_test_targets")
def collate_no_test_targets(samples, *, num_stages, **common):
    batch = collate_sft(samples, num_stages=num_stages, **common)
    is_test = any(len(sample["answer"]) > 20 for _, sample in samples)
    return {**batch, "labels": torch.full_like(batch["labels"], -100)} if is_test else batch


# -- metrics -------------------------------------------------------------------------------------


@metric_register("metric_number")
def metric_number(predictions, samples):
    return 0.5
