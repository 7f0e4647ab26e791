"""One step of a run is timed on every rank, and compared with its schedule at best."""

import pytest
import torch

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.pipeline.recorder import WAITS, TimelineEvent
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.training.step import TrainStep
from stageline.training.timeline import StepTimeline, mean_durations
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

FIELDS = ("rank", "stage", "kind", "micro_batch", "start", "end")


def plain(events):
    return [[getattr(event, name) for name in FIELDS] for event in events]


def train(rank, name, frozen):
    schedule = make_schedule(name, num_ranks=2)
    stages = []
    for index in schedule.stages_of(rank):
        stage = CausalLMStage(
            tiny_config("llama"), stage=index, num_stages=schedule.num_stages, frozen_llm=frozen
        )
        init_split_model(stage, seed=1, device="cpu", dtype=torch.float32)
        stage.frozen()
        stages.append(stage.train())
    runner = PipelineRunner(stages, device=torch.device("cpu"), schedule=schedule)
    timeline = StepTimeline(runner, step=1)
    train_step = TrainStep(
        runner,
        make_optimizer=lambda named: torch.optim.SGD(named.values(), lr=0.1) if named else None,
        loss_fn=sft,
        learning_rate=lambda step: 0.1,
        timeline=timeline,
    )
    for step in range(3):
        train_step(tiny_micro_batches("llama"), step=step)
    measured = timeline.measured()
    return plain(measured), plain(timeline.ideal(measured))


@pytest.mark.parametrize(("name", "frozen"), [("1f1b", True), ("zbv", False)])
def test_all_ranks_have_the_same_events(name, frozen):
    results = run_ranks(train, 2, name, frozen)
    assert results[0] == results[1]
    measured, ideal = ([TimelineEvent(*event) for event in part] for part in results[0])
    passes = sorted(event[:4] for event in plain(measured) if event[2] not in WAITS)
    assert passes == sorted(event[:4] for event in plain(ideal))
    assert {event.rank for event in measured} == {0, 1}
    # the pass that a rank waits for ended when the transfer began
    ends = {event[1:4]: event[5] for event in map(tuple, plain(measured)) if event[2] not in WAITS}
    for event in measured:
        if event.kind == "wait":
            makers = [(event.stage - 1, "F"), *((event.stage + 1, kind) for kind in "BI")]
            known = [ends.get((*maker, event.micro_batch), 0.0) for maker in makers]
            assert any(event.end <= end + 1e-9 for end in known), event
    # only the head trains then, which the last stage holds
    if frozen:
        last = make_schedule(name, num_ranks=2).num_stages - 1
        assert {event.stage for event in measured if event.kind in "BIW"} == {last}
    means, ideals = mean_durations(measured), mean_durations(ideal)
    assert means.keys() == ideals.keys()
    assert all(ideals[key] == pytest.approx(means[key]) for key in means)
