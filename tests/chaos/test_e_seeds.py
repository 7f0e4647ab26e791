"""Random numbers of data and dropout: equal with other workers and ranks, and from any step."""

import itertools
import random

import numpy
import pytest
import torch

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.data.batches.batch import IGNORE
from stageline.data.batches.collate_part import EncodedSample, collate_part
from stageline.data.batches.loader import MicroBatchLoader
from stageline.pipeline.runner import PipelineRunner
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import Job
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

NUM_STEPS = 6  # this makes two epochs


class Crops:
    """Rows that draw their length, as an augmentation may, from every generator there is."""

    def __len__(self):
        return 24

    def __getitem__(self, row):
        draws = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        return None, {"row": row, "draws": draws, "length": 3 + random.randrange(12)}


def encode(images, sample):
    return EncodedSample(images, sample, [], sample["length"], [])


def packed(rows):
    return masked([sample for row in rows for sample in row])


@collate_part(encode=encode, pack=packed)
def masked(rows):
    """A collate part that draws what it hides."""
    width = max(sample["length"] for _, sample in rows)
    noise = [random.random(), numpy.random.rand()]
    return {
        "input_ids": torch.tensor([[sample["row"]] * width for _, sample in rows]),
        "labels": torch.where(torch.rand(len(rows), width) < 0.5, 1, IGNORE),
        "draws": torch.tensor([sample["draws"] + noise for _, sample in rows]),
    }


def steps_of(count=NUM_STEPS, **options):
    options = {"batch_size": 8, "micro_batch_size": 2, "seed": 5, **options}
    return list(itertools.islice(MicroBatchLoader(Crops(), collate=masked, **options), count))


def flat(steps):
    return [tensor for step in steps for batch in step for _, tensor in sorted(batch.items())]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", [{}, {"order": "given"}, {"packing": 16}])
def test_e04_rows_that_draw_are_equal_with_0_and_2_workers(options):
    expected = flat(steps_of(**options))
    assert not torch.equal(flat(steps_of(**options, seed=6))[0], expected[0])
    torch.rand(9)
    assert_equal(flat(steps_of(**options, num_workers=2)), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"packing": 16}])
def test_e04_rows_that_draw_are_equal_from_a_later_step(options, num_workers):
    expected = steps_of(**options)
    later = steps_of(NUM_STEPS - 3, start_step=3, num_workers=num_workers, **options)
    assert_equal(flat(later), flat(expected[3:]))
    # another step draws other numbers for the same row
    assert not torch.equal(expected[0][0]["draws"], expected[3][0]["draws"])


def test_e04_replicas_join_to_the_batch_of_one():
    whole = steps_of(order="given")
    halves = [steps_of(order="given", batch_size=4, dp_rank=rank, dp_degree=2) for rank in range(2)]
    joined = [first + second for first, second in zip(*halves, strict=True)]
    assert_equal(flat(joined), flat(whole))


def test_e04_packed_replicas_agree_on_rows_that_draw_their_length():
    """Each computes the lengths of the other's rows, which are drawn as well."""
    options = {"batch_size": 4, "packing": 16, "dp_degree": 2}
    counts = [[len(step) for step in steps_of(dp_rank=rank, **options)] for rank in range(2)]
    assert counts[0] == counts[1] and len(set(counts[0])) > 1


def test_e04_loading_shifts_nothing_in_its_own_process():
    loader = iter(MicroBatchLoader(Crops(), collate=masked, batch_size=8, micro_batch_size=2))
    next(loader)
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(()).item(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    next(loader)
    assert (torch.rand(()).item(), random.random()) == expected


# -- dropout -----------------------------------------------------------------------------------

LORA = ("--llm-lora-num", 1, "--lora.rank", 4, "--lora.dropout", 0.3, "--parts.lm_head.frozen")


def test_e04_e07_the_entry_file_draws_the_same_on_any_ranks_and_workers(tmp_path):
    job = Job(tmp_path, num_layers=4)
    short = ("--total-steps", 4, "--save-steps", 0)
    runs = {
        "one": (1, ()),
        "two": (
            2,
            "--num-stages 4 --schedule zbv --num-workers 2 --gradient-checkpointing".split(),
        ),
        "seed": (1, ("--seed", 1)),
        "without": (1, ("--lora.dropout", 0)),
    }
    losses = {}
    for name, (ranks, options) in runs.items():
        finished = job.fork(name, *short, *LORA, *options, ranks=ranks)
        assert finished.code == 0, finished.err
        losses[name] = job.losses(name)
    assert losses["one"] == losses["two"]
    assert len({str(losses[name]) for name in ("one", "seed", "without")}) == 3


def resumed(rank):
    """Losses of 6 steps straight, and of steps 3 to 5 by a model that starts from a state."""
    config = tiny_config("gpt2", embd_pdrop=0.3, resid_pdrop=0.2, attn_pdrop=0.1)

    def build(state=None):
        model = CausalLMStage(config, stage=0, num_stages=1)
        init_split_model(model, seed=1, device="cpu", dtype=torch.float32)
        model.frozen()
        if state is not None:
            model.load_state_dict(state)
        runner = PipelineRunner(model.train(), device=torch.device("cpu"), schedule="1f1b", seed=2)
        return model, TrainStep(
            runner,
            make_optimizer=lambda named: torch.optim.AdamW(named.values(), lr=1e-2),
            loss_fn=sft,
            learning_rate=lambda step: 1e-2,
        )

    model, train_step = build()
    losses = []
    for step in range(6):
        if step == 3:
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            moments = {
                index: {name: value.clone() for name, value in one.items()}
                for index, one in train_step.optimizer.state_dict()["state"].items()
            }
        losses.append(train_step(tiny_micro_batches("gpt2", seed=step), step=step).loss)
    torch.manual_seed(99)  # earlier draws of the process do not matter
    model, train_step = build(state)
    whole = train_step.optimizer.state_dict()
    train_step.optimizer.load_state_dict({**whole, "state": moments})
    later = [
        train_step(tiny_micro_batches("gpt2", seed=step), step=step).loss for step in (3, 4, 5)
    ]
    return losses, later


def test_e07_dropout_goes_on_where_it_was():
    ((losses, later),) = run_ranks(resumed, 1)
    assert later == losses[3:]
