"""Samples that are token ids already: rows of segments, packed rows, and who draws them."""

import functools

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from loss_fn import sft
from register import collate_fn_register, import_shelf
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.text import limit
from stageline.errors import DataError
from tests.helpers.tiny_batches import count_targets
from tests.helpers.tiny_models import tiny_config

import_shelf()
PAD = 0
LENGTHS = (5, 9, 1, 7)


def segment(length, seed=0):
    return numpy.random.default_rng(seed + length).integers(3, 60, length)


def sample(*lengths, is_packed=False, name="7"):
    known = {"id": name, "source": "folder/corpus", "segments": [segment(n) for n in lengths]}
    return None, {**known, "is_packed": True} if is_packed else known


def part(**changes):
    options = {
        **{"prompt": "[TEXT]", "prompt_fn": None, "image_token": None, "processor": None},
        **{"pad_token_id": PAD, "max_token_num": 16, "num_stages": 2, "stage": 0},
        **changes,
    }
    return functools.partial(collate_fn_register["pt"], **options)


def test_a_segment_a_row_all_of_it_learnt():
    batch = part()([sample(length) for length in LENGTHS])
    assert batch["input_ids"].shape == (4, 9) and "sample_ids" not in batch
    for row, length in enumerate(LENGTHS):
        ids = segment(length).tolist()
        assert batch["input_ids"][row].tolist() == ids + [PAD] * (9 - length)
        assert batch["labels"][row].tolist() == ids + [-100] * (9 - length)
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (9 - length)
    assert part(pad_to_multiple_of=8)([sample(9)])["input_ids"].shape == (1, 16)


def test_the_loss_of_packed_rows_is_the_librarys_on_each_segment_alone():
    rows = [sample(5, 9, is_packed=True), sample(7, is_packed=True), sample(1, 3, is_packed=True)]
    batch = part()(rows)
    assert batch["sample_ids"].tolist()[2][:4] == [0, 1, 1, 1]
    assert batch["position_ids"][0, :14].tolist() == [*range(5), *range(9)]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float64)
    # the library keeps packed samples apart by positions alone
    logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    count = count_targets([batch])
    loss = sft(logits, batch, num_targets=torch.tensor(float(count)))
    total = number = 0
    for length in (5, 9, 7, 3):
        ids = torch.tensor(segment(length))[None]
        total += model(ids, labels=ids).loss.item() * (length - 1)
        number += length - 1
    assert number == count
    assert loss.item() == pytest.approx(total / number, rel=1e-6)


def test_what_is_too_long_is_refused_cut_or_dropped(monkeypatch):
    monkeypatch.setattr(limit, "_has_warned", set())
    with pytest.raises(DataError, match="folder/corpus: sample 7: 17 tokens"):
        part()([sample(17)])
    with pytest.warns(UserWarning, match="keeps its first 16 tokens"):
        batch = part(overlong="cut")([sample(17)])
    assert batch["labels"][0].tolist() == segment(17)[:16].tolist()
    with pytest.warns(UserWarning, match="is dropped"):
        assert not count_targets([part(overlong="drop")([sample(17)])])
    with pytest.raises(DataError, match="2 segments of 18 tokens do not fit"):
        part(overlong="cut")([sample(9, 9, is_packed=True)])


class Rows:
    """A dataset that draws its rows itself: backwards, and from where `position` says."""

    def __init__(self, lengths, is_packed=False):
        self.samples = [sample(*n, is_packed=is_packed, name=str(i)) for i, n in enumerate(lengths)]
        self.asked = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, row):
        return self.samples[row]

    def make_sampler(self, *, batch_size, step_samples, dp_rank, dp_degree, seed, **options):
        self.asked.append((batch_size, step_samples, dp_degree, options["position"]))
        return Backwards(len(self), step_samples, dp_degree, options["position"])


class Backwards:
    def __init__(self, num_rows, step_samples, dp_degree, position):
        self.num_rows, self.size, self.dp_degree = num_rows, step_samples, dp_degree
        self.position = position

    def __len__(self):
        return self.num_rows // (self.size * self.dp_degree)

    def shares(self, start_step=0):
        done = start_step if self.position is None else self.position["done"]
        order = list(range(self.num_rows))[::-1]
        for step in range(done, len(self)):
            rows = order[step * self.size * self.dp_degree :][: self.size * self.dp_degree]
            yield [rows[rank :: self.dp_degree] for rank in range(self.dp_degree)]

    def state_after(self, step):
        return {"done": step}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_may_draw_its_own_rows(num_workers):
    dataset = Rows([(length,) for length in range(1, 13)])
    options = {"collate": part(), "batch_size": 2, "micro_batch_size": 1, "dp_degree": 2}
    common = {**options, "order": "given", "num_workers": num_workers}
    drawn = [
        [
            [batch["loss_rows"].item() for batch in step]
            for step in MicroBatchLoader(dataset, **common, dp_rank=rank)
        ]
        for rank in range(2)
    ]
    assert drawn == [[[11, 9], [7, 5], [3, 1]], [[10, 8], [6, 4], [2, 0]]]
    loader = MicroBatchLoader(dataset, **common, start_step=2, position={"done": 1})
    assert [batch["loss_rows"].item() for batch in next(iter(loader))] == [7, 5]
    assert loader.state_after(5) == {"done": 5} and len(loader) == 3
    assert dataset.asked == [(2, 2, 2, None)] * 2 + [(2, 2, 2, {"done": 1})]
    assert loader.step_maker.rows._known == {}, "a billion lengths would not fit"
    held_out = MicroBatchLoader(dataset, **options, eval=True, shuffle=False, order="given")
    rows = [batch["loss_rows"].item() for step in held_out for batch in step]
    assert rows == [0, 1, 4, 5, 8, 9] and held_out.state_after(1) is None


def test_rows_of_packed_samples_are_known_and_segments_are_packed_as_they_come():
    packed = Rows([(3, 4), (5,), (2, 2, 2), (6,)], is_packed=True)
    loader = MicroBatchLoader(
        packed, collate=part(), batch_size=4, micro_batch_size=2, order="given"
    )
    (step,) = loader
    assert [batch["loss_packed_rows"].tolist() for batch in step] == [[3, 2, 2, 2], [1, 0, 0]]
    assert all("loss_rows" not in batch for batch in step)
    single = Rows([(length,) for length in (9, 7, 8, 8, 10, 6, 12, 4)])
    loader = MicroBatchLoader(single, collate=part(), batch_size=8, micro_batch_size=1, packing=16)
    (step,) = loader
    assert len(step) == 4, "64 tokens fill 4 rows of 16"
    assert count_targets(step) == 64 - 8
