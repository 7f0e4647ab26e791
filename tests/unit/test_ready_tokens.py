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
    # transformers separates packed samples by positions only
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


def test_rows_of_packed_samples_are_known():
    lengths = ((3, 4), (5,), (2, 2, 2), (6,))
    rows = [sample(*of_row, is_packed=True) for of_row in lengths]
    options = {"batch_size": 4, "micro_batch_size": 2, "order": "given", "shuffle": False}
    step = next(iter(MicroBatchLoader(rows, collate=part(), **options)))
    assert [batch["loss_packed_rows"].tolist() for batch in step] == [[0, 0, 1], [2, 2, 2, 3]]
    assert all("loss_rows" not in batch for batch in step)
