"""Every schedule on the streams of one GPU, or of an emulated one, and the default job on two."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import plan_memory
from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.distributed.process_group import distributed_context
from stageline.pipeline.recorder import WAITS
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from stageline.training.step import TrainStep
from stageline.training.timeline import StepTimeline
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def context():
    with distributed_context(num_ranks=1, device="cuda") as found:
        yield found


def train(context, name, dtype):
    schedule = make_schedule(name, num_ranks=context.num_ranks)
    stages = []
    for index in schedule.stages_of(context.pp_rank):
        stage = CausalLMStage(
            tiny_config("llama"), stage=index, num_stages=schedule.num_stages, dtype=dtype
        )
        init_split_model(stage, seed=1, device=context.device, dtype=dtype)
        stage.frozen()
        stages.append(stage.train())
    runner = PipelineRunner(
        stages,
        device=context.device,
        group=context.pp_group,
        channels=context.channels,
        schedule=schedule,
    )
    timeline = StepTimeline(runner, step=1)
    train_step = TrainStep(
        runner,
        make_optimizer=lambda named: torch.optim.AdamW(named.values(), lr=1e-3),
        loss_fn=sft,
        learning_rate=lambda step: 1e-3,
        timeline=timeline,
    )
    results = [train_step(tiny_micro_batches("llama"), step=step) for step in range(2)]
    weights = {name: p.detach().clone() for name, p in runner.local.named_parameters().items()}
    return results, weights, timeline.measured()


@pytest.fixture(scope="module")
def of_one_stage():
    """Return a cache by type, filled in the first test that needs it, with a process group."""
    return {}


# an emulated card computes bfloat16 as the CPU does, whatever the schedule
# and test_a_runs.py has every schedule over two emulated cards
EMULATED = {("zbv", torch.bfloat16)}
CASES = [
    pytest.param(*case, marks=() if case in EMULATED else pytest.mark.real)
    for case in itertools.product(SCHEDULES, (torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_several_stages_on_one_gpu_equal_one(context, of_one_stage, name, dtype):
    results, weights, events = train(context, name, dtype)
    if dtype not in of_one_stage:
        of_one_stage[dtype] = train(context, "gpipe", dtype)
    expected, reference, _ = of_one_stage[dtype]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=tolerance)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=tolerance)
    for parameter, weight in weights.items():
        torch.testing.assert_close(weight, reference[parameter], rtol=tolerance, atol=tolerance)
    # the marks are events in the GPU's stream
    passes = [event for event in events if event.kind not in WAITS]
    assert len(passes) >= 2 * 4
    assert all(0 <= event.start <= event.end < 60 for event in passes)


def test_the_planned_memory_is_what_a_card_holds(cards):
    """Compare as benchmarks/plan_memory.py does; NCCL and fragments are not counted."""
    (figures,) = plan_memory.compare(
        tiny_config("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2),
        "full",
        {},
        num_ranks=2,
        tokens=64,
        dtype=torch.float32,
        device=torch.device("cuda", 0),
        schedules=("1f1b",),
    )
    assert all(0.8 < ratio < 1.25 for ratio in figures["predicted_to_measured"]), figures


@pytest.mark.real  # a process of its own; test_emulated_runs.py forks
@pytest.mark.cards(2)
@pytest.mark.parametrize("schedule, num_stages", [("1f1b", 2), ("zbv", 4)])
def test_the_default_job_on_two_gpus(schedule, num_stages, tmp_path):
    done = subprocess.run(
        [
            *("bash", str(ROOT / "scripts" / "train_pp.sh"), "--schedule", schedule),
            *("--num-stages", str(num_stages), "--total-steps", "5", "--warmup-steps", "1"),
            *("--device", "cuda", "--bf16", "true", "--output-dir", str(tmp_path / "run")),
        ],
        capture_output=True,
        text=True,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "timeline.png").exists()
