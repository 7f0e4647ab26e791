"""Groups of samples stay whole: drawn, sorted, shared out, filled up, left out."""

import functools
import itertools
import json

import pytest
import torch
from torch.utils.data import Subset

from dataset import sft
from prompt_fn import fill, none
from register import dataset_register
from stageline.data.batches.collate_part import CollatePart, EncodedSample
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.batches.sampler import (
    StepSampler,
    check_batch_sizes,
    group_size_of,
    some_rows,
    whole_groups,
)
from stageline.data.rows.bad_rows import BadRows, leaving_out
from stageline.errors import DataError, UserError
from tests.helpers.tiny_datasets import group_row, write_json, write_lines
from tests.helpers.tiny_models import tiny_tokenizer

SIZE = 3


class Numbers:
    """Row i is the number i, in groups of three; lengths differ within a group."""

    group_size = SIZE

    def __init__(self, num_groups):
        self.num_groups = num_groups

    def __len__(self):
        return self.num_groups * SIZE

    def __getitem__(self, row):
        return None, {"id": str(row), "number": row}


def collate(samples):
    numbers = torch.tensor([[sample["number"]] for _, sample in samples])
    return {"input_ids": numbers, "labels": numbers.clone()}


def encode(images, sample):
    return EncodedSample(images, sample, [], 1 + sample["number"] * 7 % 23, [])


collate_sorted = CollatePart(collate, encode=encode)


def loader_of(num_groups, *, collate=collate, **options):
    options = {"batch_size": 12, "micro_batch_size": 6, **options}
    return MicroBatchLoader(Numbers(num_groups), collate=collate, **options)


def groups_in(batch):
    """Return numbers of the groups of a micro-batch; they are whole and in order."""
    rows = batch["input_ids"][:, 0].tolist()
    assert len(rows) % SIZE == 0
    for start in range(0, len(rows), SIZE):
        first = rows[start]
        assert first % SIZE == 0 and rows[start : start + SIZE] == [first, first + 1, first + 2]
    return [row // SIZE for row in rows[::SIZE]]


@pytest.mark.parametrize(("collate", "dp_degree"), [(collate, 2), (collate_sorted, 1)])
def test_steps_hold_whole_groups_and_an_epoch_each_once(collate, dp_degree):
    seen = []
    for rank in range(dp_degree):
        loader = loader_of(16, collate=collate, dp_rank=rank, dp_degree=dp_degree)
        for step in itertools.islice(loader, len(loader)):
            assert len(step) == 2
            seen += [group for batch in step for group in groups_in(batch)]
    assert sorted(seen) == list(range(16))
    assert seen != sorted(seen), "shuffled"


def test_sorting_moves_groups_of_near_length_together():
    given = next(iter(loader_of(16, batch_size=48, order="given")))
    ordered = next(iter(loader_of(16, batch_size=48, collate=collate_sorted)))
    assert len(given) == len(ordered) == 8

    def cost(step):
        lengths = [
            [encode(None, {"number": int(n)}).length for n in batch["input_ids"][:, 0]]
            for batch in step
        ]
        return sum(len(row) * max(row) for row in lengths)

    assert cost(ordered) < cost(given)
    found = sorted(group for batch in ordered for group in groups_in(batch))
    assert found == sorted(group for batch in given for group in groups_in(batch))


@pytest.mark.parametrize("num_groups", [3, 5])
def test_an_evaluation_fills_up_with_whole_groups_without_labels(num_groups):
    steps = list(loader_of(num_groups, eval=True, shuffle=False))
    assert len(steps) == -(-num_groups // 4)
    seen = []
    for batch in itertools.chain(*steps):
        for place, group in enumerate(groups_in(batch)):
            labels = batch["labels"][place * SIZE : (place + 1) * SIZE, 0].tolist()
            rows = batch["loss_rows"][place * SIZE : (place + 1) * SIZE].tolist()
            if -100 in labels:
                assert labels == [-100] * SIZE and rows == [-1] * SIZE
            else:
                seen.append(group)
    assert seen == list(range(num_groups))


def test_without_groups_the_order_is_what_it_was():
    generator = torch.Generator().manual_seed((3 << 20) + 1)
    expected = torch.randperm(10, generator=generator).tolist()
    assert StepSampler(10, step_samples=2, seed=3).order(1) == expected


def test_a_run_goes_on_from_any_step():
    full = list(itertools.islice(loader_of(10), 5))
    rest = list(itertools.islice(loader_of(10, start_step=2), 3))
    for ours, theirs in zip(rest, full[2:], strict=True):
        assert all(
            torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(ours, theirs, strict=True)
        )


@pytest.mark.parametrize(
    ("batch", "micro", "size", "wanted"),
    [
        (16, 4, 3, ["--batch-size 16 and --micro-batch-size 4", "groups of 3", "multiples of 3"]),
        (12, 2, 4, ["multiples of 4"]),
        (10, 5, 5, None),
        (8, 4, 1, None),
    ],
)  # fmt: skip
def test_batches_that_cut_groups(batch, micro, size, wanted):
    options = {"batch_size": batch, "micro_batch_size": micro, "group_size": size}
    if wanted is None:
        return check_batch_sizes(**options)
    with pytest.raises(UserError) as error:
        check_batch_sizes(**options)
    assert error.value.exit_code == 2
    assert all(text in str(error.value) for text in wanted), str(error.value)


def test_the_loader_refuses_them_too_and_packing():
    with pytest.raises(UserError, match="do not both hold whole groups of 3"):
        loader_of(8, batch_size=8, micro_batch_size=4)
    with pytest.raises(UserError, match="--packing does not work with a dataset of groups of 3"):
        loader_of(8, packing=64)


def test_a_dataset_whose_last_group_is_cut():
    class Cut(Numbers):
        def __len__(self):
            return 7

    with pytest.raises(UserError, match="7 rows and group_size 3"):
        group_size_of(Cut(3))
    assert group_size_of([1, 2]) == 1
    assert group_size_of(Subset(Numbers(4), [0, 1, 2])) == SIZE


def test_rows_are_left_out_with_their_group():
    assert whole_groups([4, 5, 10], SIZE) == [3, 4, 5, 9, 10, 11]
    assert whole_groups([4, 9], 1) == [4, 9]


@pytest.mark.parametrize(("count", "groups"), [(1, [0]), (6, [0, 6]), (7, [0, 6]), (99, range(8))])
def test_some_rows_are_whole_groups_spread_over_the_set(count, groups):
    chosen = some_rows(Numbers(8), count)
    assert [row // SIZE for row in chosen.indices[::SIZE]] == list(groups)
    assert len(chosen) == SIZE * len(groups) and group_size_of(chosen) == SIZE


# -- the dataset part ----------------------------------------------------------------------


def groups(path, **options):
    return dataset_register["groups"](dataset_path=str(path), **options)


def test_a_line_becomes_rows_in_order(tmp_path):
    rows = [{**group_row(0), "image": [], "scene": "kitchen"}, group_row(1)]
    rows[0]["negatives"][1]["id"] = "mine"
    rows[0]["anchor"]["scene"] = "hall"
    write_lines(tmp_path / "g.jsonl", rows)
    dataset = groups(tmp_path / "g.jsonl", test_size=0)
    assert dataset.group_size == 4 and len(dataset) == 8
    samples = [dataset[row][1] for row in range(8)]
    assert [sample["role"] for sample in samples] == [
        "anchor", "positive", "negative", "negative"
    ] * 2  # fmt: skip
    assert [sample["contrast_group"] for sample in samples] == ["group0"] * 4 + ["group1"] * 4
    assert [sample["id"] for sample in samples[:4]] == [
        "group0-anchor", "group0-positive", "group0-negative-1", "mine"
    ]  # fmt: skip
    assert [sample.get("scene") for sample in samples[:5]] == ["hall", *["kitchen"] * 3, None]
    assert samples[4]["answer"] == "it is right" and samples[4]["group"] == "all"
    assert dataset.describe(5).endswith("g.jsonl:2")


def test_a_list_and_fewer_negatives_and_a_split_by_groups(tmp_path):
    write_json(tmp_path / "g.json", [group_row(i, num_negatives=2 + i % 2) for i in range(10)])
    options = {"num_negatives": 1, "test_size": 3}
    train = groups(tmp_path / "g.json", split="train", **options)
    test = groups(tmp_path / "g.json", split="test", **options)
    assert train.group_size == 3 and (len(train), len(test)) == (21, 9)
    names = [{part[row][1]["contrast_group"] for row in range(len(part))} for part in (train, test)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 10
    assert train.fingerprint() != test.fingerprint()


@pytest.mark.parametrize(
    ("change", "options", "wanted"),
    [
        ({"anchor": None}, {}, "g.jsonl:2: 'anchor' is missing"),
        ({"positive": "left"}, {}, "g.jsonl:2: 'positive' is 'left'"),
        ({"negatives": ["left"]}, {}, "a list of objects"),
        ({"negatives": [{"answer": "a"}]}, {}, "2: the group has 1 negatives, not 2 .*g.jsonl:1"),
        ({"negatives": [{"answer": "a"}]}, {"num_negatives": 2}, "num_negatives says"),
        (
            {"negatives": [{"question": "q"}] * 2},
            {},
            "g.jsonl:2 \\(negative 1\\): the row has no 'ans",
        ),
        ({"anchor": {"answer": "a", "image": 3}}, {}, "g.jsonl:2 \\(anchor\\): the image is 3"),
    ],
)
def test_bad_lines_are_named_and_may_be_left_out_as_a_whole(tmp_path, change, options, wanted):
    write_lines(tmp_path / "g.jsonl", [group_row(0), {**group_row(1), **change}, group_row(2)])
    with pytest.raises(DataError, match=wanted):
        groups(tmp_path / "g.jsonl", test_size=0, **options)
    with leaving_out(BadRows(1)) as bad_rows:
        dataset = groups(tmp_path / "g.jsonl", test_size=0, **options)
    assert len(bad_rows) == 1 and len(dataset) == 8
    assert {dataset[row][1]["contrast_group"] for row in range(8)} == {"group0", "group2"}


def test_less_than_one_negative(tmp_path):
    write_lines(tmp_path / "g.jsonl", [group_row(0)])
    with pytest.raises(UserError, match="num_negatives is 0. Give at least 1") as error:
        groups(tmp_path / "g.jsonl", num_negatives=0)
    assert error.value.exit_code == 2


def test_sft_trains_on_groups_as_on_rows(tmp_path):
    (tmp_path / "g.jsonl").write_text("".join(json.dumps(group_row(i)) + "\n" for i in range(6)))
    part = functools.partial(
        sft,
        prompt="[QUESTION]\n[ANSWER]",
        prompt_fn=fill,
        image_token=none,
        processor=tiny_tokenizer(),
        pad_token_id=0,
        max_token_num=64,
        stage=0,
        num_stages=1,
    )
    dataset = groups(tmp_path / "g.jsonl", test_size=0)
    loader = MicroBatchLoader(dataset, collate=part, batch_size=8, micro_batch_size=4)
    for batch in next(iter(loader)):
        rows = batch["loss_rows"].tolist()
        assert rows == list(range(rows[0], rows[0] + 4)) and rows[0] % 4 == 0
        assert "loss_marks" not in batch
