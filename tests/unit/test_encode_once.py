"""Each sample of a step is rendered and tokenized once, with any component, order and packing."""

import itertools
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore

import dataset as parts
from commands.train import SHELF, pipeline
from register import import_shelf
from stageline.data.batches import collate as bodies
from stageline.data.batches.collate_part import CollatePart, as_collate_part
from stageline.data.batches.loader import MicroBatchLoader
from stageline.distributed.process_group import LargestOfReplicas
from tests.helpers.collating import collate_options
from tests.helpers.tiny_models import tiny_tokenizer

import_shelf(*SHELF)
assert pipeline  # importing it registered the engine
NUM_ROWS = 24
ROLES = ("anchor", "positive", "negative")


class Rows:
    """Row i is as long as it likes."""

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, row):
        answers = {"chosen": "yes " * (1 + row % 3), "rejected": "no " * (1 + row % 4)}
        sample = {"id": str(row), "question": "Why? " * (1 + row * 7 % 11), "answer": "7 " * 3}
        group = {"contrast_group": str(row // 3), "role": ROLES[row % 3]}
        return None, {**sample, **answers, **group, "text": sample["question"], "label": True}


class Groups(Rows):
    """The same in groups of three."""

    group_size = 3


def counting(part, counts):
    """Bind the component, and count how often each sample is encoded."""
    options = collate_options(tiny_tokenizer(), prompt="[QUESTION] [ANSWER]", max_token_num=96)
    bound = as_collate_part(part).bind(**options)

    def encode(images, sample):
        counts[sample["id"]] += 1
        return bound.encode(images, sample)

    return CollatePart(bound.collate, encode=encode, pack=bound.pack)


KINDS = {
    "sft": (parts.sft, Rows, 1),
    "dpo": (parts.dpo, Rows, 2),
    "kto": (parts.kto, Rows, 1),
    "rm": (parts.rm, Rows, 2),
    "pt": (parts.pt, Rows, 1),
    "contrastive": (parts.contrastive, Groups, 1),
}
ORDERS = {"sorted": {}, "packed": {"packing": 96}}


@pytest.mark.parametrize(
    ("kind", "order"), [(k, o) for k in KINDS for o in ORDERS if o != "packed" or KINDS[k][0].pack]
)
def test_a_sample_of_an_epoch_is_encoded_once(kind, order, monkeypatch):
    part, rows, times = KINDS[kind]
    counts, rendered = Counter(), Counter()
    render = bodies.render_sample

    def counted(images, sample, **texts):
        rendered[sample["id"]] += 1
        return render(images, sample, **texts)

    monkeypatch.setattr(bodies, "render_sample", counted)
    loader = MicroBatchLoader(
        rows(), collate=counting(part, counts), batch_size=12, micro_batch_size=3, **ORDERS[order]
    )
    steps = list(itertools.islice(loader, len(loader)))
    assert len(steps) == 2 and all(steps)
    assert counts == {str(row): 1 for row in range(NUM_ROWS)}
    assert rendered == {str(row): times for row in range(NUM_ROWS)}


def test_packed_replicas_that_can_ask_encode_their_own_rows_alone(monkeypatch):
    """Encode through the store, as data workers do; micro-batches equal those without the store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setitem(os.environ, "MASTER_ADDR", "127.0.0.1")
    monkeypatch.setitem(os.environ, "MASTER_PORT", str(store.port))
    options = {"batch_size": 6, "micro_batch_size": 1, "packing": 96, "dp_degree": 2}

    def steps(rank, counts, agree):
        loader = MicroBatchLoader(
            Rows(), collate=counting(parts.sft, counts), dp_rank=rank, agree=agree, **options
        )
        return list(itertools.islice(loader, len(loader)))

    counts = [Counter(), Counter()]
    asking = [LargestOfReplicas("a", rank=rank, size=2, seconds=30) for rank in range(2)]
    # one after the other would wait for ever; rows draw nothing, so threads do no harm
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(steps, range(2), counts, asking))
    assert set((counts[0] + counts[1]).values()) == {1}
    assert not counts[0].keys() & counts[1].keys()
    for rank, own in enumerate(made):
        alone = steps(rank, Counter(), None)
        for batch, other in zip(itertools.chain(*own), itertools.chain(*alone), strict=True):
            assert batch.keys() == other.keys()
            assert all(torch.equal(batch[name], other[name]) for name in batch)
    del store
