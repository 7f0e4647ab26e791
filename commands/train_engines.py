"""Check a training run, then hand it to the trainer with the runner of its engine.

Imports all that a run needs; train.py has read the options and started the processes before.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from commands import is_first, say, train_parts
from commands.train import RunPlan
from commands.train_data import Data, check_data, settle_steps, show_samples
from commands.train_parts import TrainingParts
from options.train import memory_remedies
from parse_args import TrainArguments
from stageline.device import is_accelerator
from stageline.distributed.failure_record import name_stages, on_full_memory
from stageline.distributed.process_group import (
    DistributedContext,
    choose_device,
    distributed_context,
    stage_devices,
)
from stageline.errors import UserError
from stageline.pipeline.runner import PipelineRunner
from stageline.planner.estimate import device_capacity
from stageline.stage import Stage
from stageline.streaming.host_weights import (
    ALLOCATOR_VARIABLES,
    ROUND_UP,
    check_host_memory,
    host_bytes,
)
from stageline.streaming.lanes import lanes_of
from stageline.streaming.runner import StreamingRunner, even_plan
from stageline.training.memory import MemoryAccount
from stageline.training.trainer import Trainer

GIB = 2**30


def run_training(config: RunPlan) -> int:
    """Check what can be checked before a model is loaded, then run the engine."""
    run = config.run
    data = check_data(config)
    config = settle_steps(config, data)
    train_parts.check_parts(config, data)
    show_samples(config, data, config.topology.schedule)
    if run.check_only:
        if is_first():
            train_parts.stage_builder(config).check_fit()
            if config.parts["loss_fn"].facts.samples_answers:
                train_parts.check_rewards(config, data)
            say("options, components and data are valid; nothing was trained")
        return 0
    if run.plan:  # measured on this process's device
        if is_first():
            num_ranks, processes = config.topology.num_ranks, config.topology.num_processes
            device = choose_device(run.device, local_rank=0, local_world_size=1)
            capacity = device_capacity(device, num_local_ranks=processes, gib=run.device_memory)
            planner = train_parts.make_planner(config, data, device)
            print(planner.plan(run.partition, (capacity,) * num_ranks), flush=True)
        return 0
    settle_allocators()
    return config.parts["engine"].part(config, data)


def settle_allocators() -> None:
    """Set torch's allocators for GPUs, before the first one is used; not where the user has.

    Segments grow, because micro-batches have lengths of their own. Pinned blocks have the size that
    was asked for: torch would round each up to a power of two.
    """
    if os.environ.keys() & set(ALLOCATOR_VARIABLES) or not torch.cuda.is_available():
        return
    wanted = "expandable_segments:True"
    # a key that a release does not know would end the run
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if header.is_file() and ROUND_UP.removesuffix("_mb") in header.read_text(errors="replace"):
        wanted += f",{ROUND_UP}:1"
    os.environ[ALLOCATOR_VARIABLES[0]] = wanted


def run_pipeline(
    config: RunPlan, data: Data, *, runner_class: type[PipelineRunner] = PipelineRunner
) -> int:
    """Stages on a schedule, forward and backward in turn; one process and device per rank."""
    schedule = config.topology.schedule
    with distributed_context(
        num_ranks=schedule.num_ranks,
        device=config.run.device,
        timeout=max(600.0, config.run.hang_timeout + 180.0),  # the watchdog's report says more
        pairs=schedule.pairs,
    ) as context:
        make_runner = functools.partial(
            runner_class,
            device=context.device,
            group=context.pp_group,
            channels=context.channels,
            schedule=schedule,
            seed=config.run.seed,
        )
        parts = TrainingParts(config, data, context, make_runner, places_layers=True)
        return train(parts, context, streams=False)


def run_streaming(config: RunPlan, data: Data) -> int:
    """Stages in host memory, streamed through the devices of this machine by one process."""
    with distributed_context(num_ranks=1, device="cpu") as alone:
        context = replace(alone, lanes=tuple(stage_devices(config.run.device)))
        make_runner = functools.partial(make_streaming_runner, config, context)
        parts = TrainingParts(config, data, context, make_runner, places_layers=False)
        return train(parts, context, streams=True)


def train(parts: TrainingParts, context: DistributedContext, *, streams: bool) -> int:
    """Run the trainer on this rank; return the exit code."""
    config, run = parts.config, parts.config.run
    name_stages(config.topology.schedule.stages_of(context.pp_rank))
    has_gpu = is_accelerator(context.devices[0])
    if has_gpu and not (run.bf16 or run.fp16):
        say("note: float32 on a GPU, at a fraction of its speed; --bf16 computes in half the bits")
    remedies = memory_remedies(run, has_gpu=has_gpu, streams=streams)
    memory = MemoryAccount(context.devices, remedies, answering_remedies(run))
    on_full_memory(memory.describe)
    Trainer(train_parts.trainer_config(run), parts, memory=memory).run()
    return 0


def answering_remedies(run: Any) -> list[str]:
    """Return the remedies for a run out of memory during the answers of its own model."""
    names = ("prompts_together", "max_completion_length", "group_size")
    given = [(name, value) for name in names if (value := getattr(run.rollouts, name)) > 1]
    found = [f"a smaller --rollouts.{name} (now {value})" for name, value in given]
    return [*found, f"more --num-stages (now {run.num_stages})"]


def make_streaming_runner(
    config: TrainArguments, context: DistributedContext, stages: Sequence[Stage]
) -> StreamingRunner:
    """Return the runner over the stages; print what they take."""
    run, num_stages = config.run, len(stages)
    budget = None if run.streaming.budget is None else int(run.streaming.budget * GIB)
    lanes = lanes_of(context.devices, budget=budget)
    together = min(run.streaming.stages, num_stages)
    runner = StreamingRunner(
        list(stages),
        lanes=lanes,
        group=context.pp_group,
        seed=run.seed,
        plan=even_plan(num_stages, together) if together else None,
        by_layer=run.recompute_grain == "layer",
        stale=run.stale_step,
        pin_model=run.pin_model,
    )
    try:
        runner.check_plan(run.num_micro_batches)
        check_host_memory(runner.pipe._hosted_layers, torch.float32)
    except ValueError as error:
        raise UserError(
            f"--streaming.budget is too small: {error}. Raise it or --num-stages."
        ) from None
    except MemoryError as error:
        raise UserError(f"the model does not fit the host's memory: {error}") from None
    host = host_bytes(runner.pipe._hosted_layers, torch.float32) / GIB
    names = ", ".join(str(lane.device) for lane in lanes)
    budget = lanes[0].pool.budget
    limit = "all memory" if budget is None else f"{budget / GIB:.2f} GiB"
    say(
        f"streaming: {num_stages} stages in host memory through {names}, {limit} of each for "
        f"weights and gradients; {host:.2f} GiB of host memory without the optimizer's state"
    )
    return runner
