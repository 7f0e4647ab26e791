"""Sorted and packed steps of the loader, with the shipped collate part and a real tokenizer."""

import functools
import itertools

import pytest
import torch

from commands.train_data import epoch_steps, left_over_rows
from dataset import sft
from options.data import RowSettings
from options.train import RunConfig
from prompt_fn import fill, none
from stageline.data.batches.collate_part import as_collate_part
from stageline.data.batches.loader import MicroBatchLoader
from stageline.errors import UserError
from stageline.pipeline.schedules import make_schedule
from stageline.training.evaluation import evaluate
from tests.helpers.tiny_models import tiny_tokenizer

MAX_TOKENS = 48


class Sentences:
    """Row i asks a question of its own length."""

    def __init__(self, count=40):
        self.rows = [
            {
                "id": str(i),
                "question": f"{i} " + "What? " * (i * 7 % 13),
                "answer": "yes " * (i % 5),
            }
            for i in range(count)
        ]
        for row in self.rows:
            row["answer"] += "7"

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return None, self.rows[row]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def collate_of(tokenizer, **options):
    return functools.partial(
        sft,
        prompt="[QUESTION]\n[ANSWER]",
        prompt_fn=fill,
        image_token=none,
        processor=tokenizer,
        pad_token_id=0,
        max_token_num=MAX_TOKENS,
        stage=0,
        num_stages=2,
        **options,
    )


def make_loader(tokenizer, *, collate=None, dataset=None, **options):
    options = {"batch_size": 8, "micro_batch_size": 2, **options}
    collate = collate or collate_of(tokenizer)
    return MicroBatchLoader(dataset or Sentences(), collate=collate, **options)


def steps_of(loader, count=4):
    return list(itertools.islice(loader, count))


def samples_in(step):
    """(ids, labels of all but the first token) of each sample of a step, in a fixed order."""
    found = []
    for batch in step:
        mask = batch["attention_mask"].bool()
        ids_of = batch.get("sample_ids", torch.where(mask, 0, -1))
        for ids, labels, numbers in zip(batch["input_ids"], batch["labels"], ids_of, strict=True):
            for number in range(int(numbers.max()) + 1):
                own = numbers == number
                found.append((tuple(ids[own].tolist()), tuple(labels[own].tolist()[1:])))
    return sorted(found)


def targets_in(step):
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)


def equal_steps(left, right):
    for step, other in zip(left, right, strict=True):
        for batch, same in zip(step, other, strict=True):
            assert batch.keys() == same.keys()
            assert all(torch.equal(batch[name], same[name]) for name in batch)


@pytest.mark.parametrize("options", [{}, {"packing": MAX_TOKENS}, {"accumulate_steps": 2}])
def test_the_samples_of_a_step_do_not_change(tokenizer, options):
    given = make_loader(tokenizer, order="given", **{**options, "packing": None})
    other = make_loader(tokenizer, **options)
    for step, drawn in zip(steps_of(other), steps_of(given), strict=True):
        assert samples_in(step) == samples_in(drawn)
        assert targets_in(step) == targets_in(drawn) > 0


def test_last_rows_of_an_epoch_are_dropped_or_padded(tokenizer):
    dataset = Sentences(19)
    for last_rows, num_steps, told in (("drop", 2, "each epoch leaves out 3 of 19 rows"),
                                       ("pad", 3, "each epoch repeats 5 of 19 rows")):  # fmt: skip
        run = RunConfig(batch_size=8, rows=RowSettings(last=last_rows))
        assert epoch_steps(run, dataset) == num_steps
        assert left_over_rows(run, dataset).startswith(told)
        loader = make_loader(tokenizer, dataset=dataset, pads=last_rows == "pad")
        assert len(loader) == num_steps
        seen = [sample for step in steps_of(loader, num_steps) for sample in samples_in(step)]
        assert len(seen) == 8 * num_steps and len(set(seen)) == min(19, len(seen))
    evaluations = [
        make_loader(tokenizer, dataset=dataset, pads=p, eval=True) for p in (True, False)
    ]
    equal_steps(*evaluations)


def test_sorting_leaves_less_padding_in_as_many_micro_batches(tokenizer):
    padded = {}
    for order in ("given", "sorted"):
        steps = steps_of(make_loader(tokenizer, order=order))
        assert {len(step) for step in steps} == {4}
        padded[order] = sum(batch["input_ids"].numel() for step in steps for batch in step)
        for batch in itertools.chain(*steps):
            assert batch["attention_mask"].any(dim=0).all(), "wider than its longest row"
    real = sum(int(b["attention_mask"].sum()) for step in steps for b in step)
    assert real < padded["sorted"] < 1.15 * real < padded["given"]


def test_loss_rows_name_the_rows(tokenizer):
    dataset = Sentences()
    for batch in itertools.chain(*steps_of(make_loader(tokenizer, dataset=dataset))):
        for row, ids in zip(batch["loss_rows"].tolist(), batch["input_ids"], strict=True):
            assert tokenizer.decode(ids).startswith(dataset.rows[row]["question"][:4].strip())


def test_workers_make_the_same_steps(tokenizer):
    options = {"packing": MAX_TOKENS}
    alone = steps_of(make_loader(tokenizer, **options), 6)
    equal_steps(steps_of(make_loader(tokenizer, num_workers=2, **options), 6), alone)


def test_a_part_that_knows_no_lengths_keeps_the_order(tokenizer):
    plain = functools.partial(lambda samples, **common: collate_of(tokenizer)(samples), stage=0)
    assert as_collate_part(plain).encode is None
    left = steps_of(make_loader(tokenizer, collate=plain))
    equal_steps(left, steps_of(make_loader(tokenizer, order="given")))
    with pytest.raises(UserError, match="with `encode` and `pack`.*--collate-fn sft"):
        make_loader(tokenizer, collate=plain, packing=MAX_TOKENS)


def test_widths_are_rounded_up_to_what_is_legal(tokenizer):
    plain = steps_of(make_loader(tokenizer))
    for options in ({}, {"packing": MAX_TOKENS}):
        collate = collate_of(tokenizer, pad_to_multiple_of=20)
        rounded = steps_of(make_loader(tokenizer, collate=collate, **options))
        widths = {batch["input_ids"].shape[1] for batch in itertools.chain(*rounded)}
        assert widths <= {20, 40, MAX_TOKENS} and len(widths) > 1
        assert [samples_in(step) for step in rounded] == [samples_in(step) for step in plain]


def test_packed_rows_are_full(tokenizer):
    steps = steps_of(make_loader(tokenizer, packing=MAX_TOKENS, batch_size=20), 2)
    for step in steps:
        assert all(batch["input_ids"].shape[1] <= MAX_TOKENS for batch in step)
        widths = sum(batch["input_ids"].numel() for batch in step)
        real = sum(int(batch["attention_mask"].sum()) for batch in step)
        assert real > 0.85 * widths
    assert sum(map(len, steps)) < 2 * 10


@pytest.mark.parametrize(("dp_degree", "multiple"), [(1, 4), (3, 1), (2, 4)])
def test_replicas_reach_the_same_legal_count_alone(tokenizer, dp_degree, multiple):
    def legal(count):
        assert count > 0
        return -(-count // multiple) * multiple

    options = {"packing": MAX_TOKENS, "legal_counts": legal, "micro_batch_size": 1}
    options.update(batch_size=4, dp_degree=dp_degree)
    replicas = [
        steps_of(make_loader(tokenizer, dp_rank=rank, **options)) for rank in range(dp_degree)
    ]
    whole = steps_of(make_loader(tokenizer, batch_size=4 * dp_degree, order="given"))
    for step, *parts in zip(whole, *replicas, strict=True):
        assert len({len(part) for part in parts}) == 1
        assert all(len(part) % multiple == 0 for part in parts)
        joined = [batch for part in parts for batch in part]
        assert samples_in(joined) == samples_in(step)
        assert targets_in(joined) == targets_in(step)


def test_missing_micro_batches_weigh_nothing(tokenizer):
    loader = make_loader(
        tokenizer, batch_size=2, packing=MAX_TOKENS, legal_counts=lambda count: max(count, 5)
    )
    for step in steps_of(loader):
        assert len(step) == 5
        empty = [batch for batch in step if not batch["attention_mask"].any()]
        assert len(empty) == 4
        for batch in empty:
            assert batch["input_ids"].shape == (2, 2) and (batch["labels"] == -100).all()


class LabelRunner:
    """Stands for a pipeline that predicts each label right."""

    device = torch.device("cpu")
    schedule = make_schedule("gpipe", num_ranks=1)
    group = None

    def evaluate(self, micro_batches, *, on_output, recorder):
        for batch in micro_batches:
            shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=0)[:, 1:].clamp(min=0)
            on_output(torch.nn.functional.one_hot(shifted, 500).float(), batch)


@pytest.mark.parametrize("order", ["given", "sorted"])
def test_predictions_belong_to_the_rows_of_the_dataset(tokenizer, order):
    dataset = Sentences(21)
    loader = make_loader(tokenizer, dataset=dataset, eval=True, shuffle=False, order=order)
    result = evaluate(
        LabelRunner(), loader, loss_fn=lambda logits, batch, num_targets: logits.sum() * 0, keep=10
    )
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in result.predicted]
    assert texts == [row["answer"] for row in dataset.rows[:10]]
    assert result.token_accuracy == 1.0
    whole = make_loader(tokenizer, dataset=dataset, eval=True, shuffle=False, batch_size=42)
    assert result.num_targets == targets_in(next(iter(whole)))
