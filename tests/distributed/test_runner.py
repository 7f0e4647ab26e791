"""The runner itself: its calls and their number, what it keeps, refuses and records."""

import random
from datetime import timedelta

import pytest
import torch
from torch import nn

from stageline.distributed.process_group import open_channels
from stageline.errors import UserError
from stageline.pipeline.live_bytes import tensor_bytes
from stageline.pipeline.runner import PipelineRunner, TorchPipelineRunner
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from tests.helpers.late_transfers import late_transfers
from tests.helpers.ranks import run_ranks

WIDTH = 6
VOCABULARY = 10


class Toy(nn.Module):
    """A stage that sends two tensors, the second in another type, and counts its calls."""

    def __init__(self, stage, num_stages, *, wrong_shape=False):
        super().__init__()
        self.stage, self.num_stages = stage, num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.wrong_shape = wrong_shape
        self.calls = []
        self.parameter_order = [
            f"{name}{index}.weight" for index in range(num_stages) for name in ("embed", "mix")
        ]
        generator = torch.Generator().manual_seed(stage)
        if self.is_first:
            self.embed0 = nn.Embedding(VOCABULARY, WIDTH)
            nn.init.normal_(self.embed0.weight, generator=generator)
        mix = nn.Linear(WIDTH, VOCABULARY if self.is_last else WIDTH, bias=False)
        nn.init.normal_(mix.weight, generator=generator)
        self.add_module(f"mix{stage}", mix)

    def forward(self, hidden, *extras, **batch):
        self.calls.append((torch.is_grad_enabled(), self.training, tuple(hidden.shape[:2])))
        total = torch.zeros(1, dtype=torch.float64)
        if self.is_first:
            hidden = self.embed0(hidden)
        else:
            (total,) = extras
        hidden = torch.tanh(getattr(self, f"mix{self.stage}")(hidden))
        total = total + hidden.double().pow(2).mean()
        if self.is_last:
            return hidden, total.float().sum()
        return hidden[:, :-1] if self.wrong_shape else hidden, total

    def get_example_input(self, rows, width):
        if self.is_first:
            return (torch.empty(rows, width, dtype=torch.long, device="meta"),)
        return (
            torch.empty(rows, width, WIDTH, device="meta"),
            torch.empty(1, dtype=torch.float64, device="meta"),
        )

    def get_example_output(self, rows, width):
        return () if self.is_last else Toy.get_example_input(_NOT_FIRST, rows, width)


class _NOT_FIRST:  # noqa: N801
    is_first = False


def micro_batches(step):
    generator = torch.Generator().manual_seed(step)
    widths = [(5, 3, 9, 4, 7, 8), (2, 11, 6, 6, 1, 10)][step % 2]
    return [
        {"input_ids": torch.randint(VOCABULARY, (2, width), generator=generator)}
        for width in widths
    ]


def loss_of(output, batch):
    logits, extra = output
    flat = nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())
    return flat + 0.1 * extra


def make_runner(rank, name, *, channels=None, **kwargs):
    schedule = make_schedule(name, num_ranks=torch.distributed.get_world_size())
    stages = [Toy(s, schedule.num_stages, **kwargs) for s in schedule.stages_of(rank)]
    runner = PipelineRunner(
        stages, device=torch.device("cpu"), schedule=schedule, channels=channels
    )
    return stages, runner


def reference_gradients(num_stages):
    stages = [Toy(stage, num_stages) for stage in range(num_stages)]
    for step in range(2):
        for stage in stages:
            stage.zero_grad()
        for batch in micro_batches(step):
            values = (batch["input_ids"],)
            for stage in stages:
                values = stage(*values)
            loss_of(values, batch).backward()
    return {name: p.grad for stage in stages for name, p in stage.named_parameters()}


def run_all(rank, channels=None):
    results = {}
    for name in SCHEDULES:
        stages, runner = make_runner(rank, name, channels=channels)
        losses = []

        def counted(output, batch, losses=losses):
            losses.append(loss_of(output, batch))
            return losses[-1]

        for step in range(2):
            for stage in stages:
                stage.zero_grad()
            runner.step(micro_batches(step), loss_fn=counted)
        outputs = []
        runner.evaluate(
            micro_batches(0), on_output=lambda output, batch, kept=outputs: kept.append(output[0])
        )
        results[name] = {
            "grads": {n: p.grad for n, p in runner.local.named_parameters().items()},
            "calls": [[list(map(str, call)) for call in stage.calls] for stage in stages],
            "num_losses": len(losses),
            "kept": sum(len(p._kept) + len(p._weight_work) for p in runner.passes.values()),
            "graphs": [output.requires_grad for output in outputs],
            "training": [stage.training for stage in stages],
        }
    return results


def run_all_late(rank):
    """A stream for each channel, as with NCCL; a transfer may be overtaken by those of others."""
    num_ranks = torch.distributed.get_world_size()
    pairs = make_schedule("interleaved_1f1b", num_ranks=num_ranks).pairs
    channels = open_channels(num_ranks, pairs, timeout=timedelta(seconds=60))
    assert set(channels) == {pair for pair in pairs if rank in pair}
    late = random.Random(rank)
    with late_transfers(lambda: 0.003 * late.random(), stream_of=lambda *words: words[-1]):
        return run_all(rank, channels)


@pytest.mark.parametrize(
    ("num_ranks", "run"), [(1, run_all), (2, run_all), (3, run_all), (2, run_all_late)]
)
def test_several_tensors_cross_a_border_and_nothing_is_run_twice(num_ranks, run):
    results = run_ranks(run, num_ranks)
    for name in SCHEDULES:
        num_stages = make_schedule(name, num_ranks=num_ranks).num_stages
        expected = reference_gradients(num_stages)
        found = {}
        for result in results:
            found.update(result[name]["grads"])
        assert set(found) == set(expected)
        for key, grad in expected.items():
            if name == "looped_bfs":
                torch.testing.assert_close(found[key], grad, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(found[key], grad), (name, key)
        # no forward pass on made-up values: two steps and an evaluation of 6 micro-batches each
        for result in results:
            for calls in result[name]["calls"]:
                assert len(calls) == 18
                assert all(call[:2] == ["True", "True"] for call in calls[:12])
                assert all(call[:2] == ["False", "False"] for call in calls[12:])
            assert result[name]["kept"] == 0
            assert all(result[name]["training"])
        # the loss is asked once for each micro-batch of training, on one rank
        num_losses = sorted(result[name]["num_losses"] for result in results)
        assert num_losses == [0] * (num_ranks - 1) + [12]
        graphs = [graph for result in results for graph in result[name]["graphs"]]
        assert graphs == [False] * 6


def send_wrong_shape(rank):
    _, runner = make_runner(rank, "1f1b", wrong_shape=rank == 0)
    runner.step(micro_batches(0), loss_fn=loss_of)


def send_wrong_shape_by_torch(rank):
    group = torch.distributed.new_group(timeout=timedelta(seconds=3))
    stage = Toy(rank, 2, wrong_shape=True)
    runner = TorchPipelineRunner(stage, device=torch.device("cpu"), group=group)
    with pytest.raises((UserError, RuntimeError)[rank]) as found:  # rank 1 waits in vain
        runner.step(micro_batches(0), loss_fn=loss_of)
    return str(found.value)


def test_a_stage_that_sends_another_shape_than_announced():
    """Refused before it is sent."""
    with pytest.raises(AssertionError, match="rank 0 failed first") as caught:
        run_ranks(send_wrong_shape, 2, timeout=60)
    assert "stage 0 made [((2, 4, 6), torch.float32)" in str(caught.value)
    said = run_ranks(send_wrong_shape_by_torch, 2)[0]
    assert "of micro-batch 0, stage 1 expects [((2, 5, 6)" in said


def misplaced(rank):
    schedule = make_schedule("zbv", num_ranks=2)
    stages = [Toy(stage, 4) for stage in ([0, 2] if rank == 0 else [1, 3])]
    with pytest.raises(UserError, match=r"was given stages .* places \[\d, \d\] there"):
        PipelineRunner(stages, device=torch.device("cpu"), schedule=schedule)
    return True


def test_stages_on_the_wrong_rank():
    assert run_ranks(misplaced, 2) == [True, True]


def count_sent(rank):
    stages, runner = make_runner(rank, "1f1b")
    runner.step(micro_batches(0), loss_fn=loss_of)
    shapes = [tuple(batch["input_ids"].shape) for batch in micro_batches(0)]
    declared = [tensor_bytes(stages[0].get_example_output(*shape)) for shape in shapes]
    return runner.sent_bytes, declared


def test_what_is_sent_is_what_a_border_takes():
    """Hidden states in their own type and what the model declares: no mask, no copy."""
    results = run_ranks(count_sent, 2)
    hidden = [2 * batch["input_ids"].shape[1] * WIDTH * 4 + 8 for batch in micro_batches(0)]
    assert results[0] == (sum(hidden), hidden)  # forward
    assert results[1] == (sum(hidden), [0] * len(hidden))  # back
