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


@dataset_register("row_is_a_dict")
class RowIsADict(Rows):
    def __getitem__(self, row):
        return self.sample(row)


@dataset_register("row_is_a_dict_of_two")
class RowIsADictOfTwo(Rows):
    def __getitem__(self, row):
        return {"question": "1?", "answer": "!"}


@dataset_register("row_is_swapped")
class RowIsSwapped(Rows):
    def __getitem__(self, row):
        return self.sample(row), None


@dataset_register("row_has_paths_for_images")
class RowHasPathsForImages(Rows):
    def __getitem__(self, row):
        return ["0.png"], self.sample(row)


@dataset_register("row_is_three")
class RowIsThree(Rows):
    def __getitem__(self, row):
        return None, self.sample(row), row


@dataset_register("row_is_none")
class RowIsNone(Rows):
    def __getitem__(self, row):
        self.sample(row)


@dataset_register("sample_is_a_text")
class SampleIsAText(Rows):
    def __getitem__(self, row):
        return None, "0? !"


@dataset_register("row_has_one_image")
class RowHasOneImage(Rows):
    def __getitem__(self, row):
        from PIL import Image

        return Image.new("RGB", (24, 24)), self.sample(row)


@dataset_register("row_has_a_tensor")
class RowHasATensor(Rows):
    def __getitem__(self, row):
        return torch.zeros(3, 24, 24), self.sample(row)


@dataset_register("takes_no_path")
class TakesNoPath(Rows):
    def __init__(self, *, split="train"):
        self.number = 24


@dataset_register("has_no_len")
class HasNoLen:
    def __init__(self, *, dataset_path=None, split="train"):
        pass

    def __getitem__(self, row):
        return None, {"question": f"{row}?", "answer": "!"}


@dataset_register("has_no_getitem")
class HasNoGetitem:
    def __init__(self, *, dataset_path=None, split="train"):
        pass

    def __len__(self):
        return 24


@dataset_register("makes_none")
def makes_none(*, dataset_path=None, split="train"):
    Rows(split=split)


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


@prompt_fn_register("takes_one")
def takes_one(sample):
    return fill(sample, "[QUESTION] [ANSWER]")


@prompt_fn_register("raises_key_error")
def raises_key_error(sample, prompt, *, processor=None, for_generation=False):
    return fill({**sample, "question": sample["title"]}, prompt)


@image_token_register("image_token_str")
def image_token_str(rendered, images, *, processor):
    return rendered.text


@image_token_register("image_token_one")
def image_token_one(rendered):
    return rendered


# -- collate functions ---------------------------------------------------------------------------


@collate_fn_register("collate_none")
def collate_none(samples, *, num_stages, **common):
    """A forgotten return."""


@collate_fn_register("collate_lists")
def collate_lists(samples, *, num_stages, **common):
    batch = collate_sft(samples, num_stages=num_stages, **common)
    return {name: value.tolist() for name, value in batch.items()}


@collate_fn_register("collate_no_labels")
def collate_no_labels(samples, *, num_stages, **common):
    batch = collate_sft(samples, num_stages=num_stages, **common)
    del batch["labels"]
    return batch


@collate_fn_register("collate_no_mask")
def collate_no_mask(samples, *, num_stages, **common):
    batch = collate_sft(samples, num_stages=num_stages, **common)
    del batch["attention_mask"]
    return batch


@collate_fn_register("collate_float_ids")
def collate_float_ids(samples, *, num_stages, **common):
    batch = collate_sft(samples, num_stages=num_stages, **common)
    return {**batch, "input_ids": batch["input_ids"].float()}


@collate_fn_register("collate_short_labels")
def collate_short_labels(samples, *, num_stages, **common):
    batch = collate_sft(samples, num_stages=num_stages, **common)
    return {**batch, "labels": batch["labels"][:, 1:]}


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


@dataset_register("has_no_id")
class HasNoId(Rows):
    def sample(self, row):
        return {"question": "0?", "answer": "!"}
