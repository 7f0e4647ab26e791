"""Runs a training: its checks, and what the engines of train.py do.

Imports all that a run needs; train.py has read the options and started the processes before.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from commands import is_first, say
from commands.run_plan import RunPlan
from commands.train_data import Data, check_data, settle_steps, show_samples
from commands.train_parts import (
    build_stages,
    check_parts,
    make_planner,
    make_tracker,
    place_layers,
    stage_builder,
)
from commands.train_run import (
    TrainingRun,
    make_streaming_runner,
    open_run_folder,
)
from options.memory import answering_remedies, memory_remedies
from options.model import learning_rate_scales
from options.train import RunConfig
from parse_args import save_config
from stageline.checkpoint.layout import Ranks
from stageline.device import is_accelerator, settle_allocators, stage_devices
from stageline.distributed.failure import name_stages
from stageline.distributed.failure_record import on_full_memory, open_log
from stageline.distributed.process_group import (
    DistributedContext,
    choose_device,
    distributed_context,
)
from stageline.pipeline.runner import PipelineRunner
from stageline.planner.cost import device_capacity
from stageline.seeds import seed_everything
from stageline.stage import Stage
from stageline.training.memory import MemoryAccount
from stageline.training.replicas import Replicas, ShardedReplicas
from stageline.training.resume import ResumePoint
from stageline.training.run_log import RunReport, summarize_stage


def run_training(plan: RunPlan) -> int:
    """Checks what can be checked before a model is loaded, then runs the engine."""
    run = plan.run
    data = check_data(plan)
    plan = settle_steps(plan, data)
    check_parts(plan, data)
    show_samples(plan, data, plan.topology.schedule)
    if run.check_only:
        if is_first():
            stage_builder(plan).check_fit()
            if plan.parts["loss_fn"].facts["samples_answers"]:
                from commands.train_rollouts import check_rewards

                check_rewards(plan, data)
        return 0
    if run.plan:
        return show_plan(plan, data)
    settle_allocators()
    return plan.parts["engine"].part(plan, data)


def run_pipeline(
    plan: RunPlan, data: Data, *, runner_class: type[PipelineRunner] = PipelineRunner
) -> int:
    """Stages on a schedule, forward and backward in turn; one process and device per rank."""
    schedule = plan.topology.schedule
    with distributed_context(
        num_ranks=schedule.num_ranks,
        device=plan.run.device,
        timeout=plan.exchange_timeout,
        pairs=schedule.pairs,
    ) as context:
        name_stages(schedule.stages_of(context.pp_rank))
        point = open_run_folder(plan, data, context)
        make_runner = functools.partial(
            runner_class,
            device=context.device,
            group=context.pp_group,
            channels=context.channels,
            schedule=schedule,
            seed=plan.run.seed,
        )
        train(place_layers(plan, data, context), data, context, point, make_runner=make_runner)
    return 0


def run_streaming(plan: RunPlan, data: Data) -> int:
    """Stages in host memory, streamed through the devices of this machine by one process."""
    lanes = tuple(stage_devices(plan.run.device))
    with distributed_context(num_ranks=1, device="cpu") as alone:
        context = replace(alone, lanes=lanes)
        name_stages(plan.topology.schedule.stages_of(0))
        point = open_run_folder(plan, data, context)
        make_runner = functools.partial(make_streaming_runner, plan, context=context)
        train(plan, data, context, point, make_runner=make_runner, streams=True)
    return 0


def show_plan(plan: RunPlan, data: Data) -> int:
    """Prints what a run would be like; measures on this process's device, starts no other."""
    if is_first():
        run, topology = plan.run, plan.topology
        device = choose_device(run.device, local_rank=0, local_world_size=1)
        capacity = device_capacity(
            device, num_local_ranks=topology.num_processes, gib=run.device_memory
        )
        planner = make_planner(plan, data, topology, device)
        planner.times_transfers = True  # no other rank's memory is filled: there is none
        print(planner.plan(run.partition, (capacity,) * topology.num_ranks), flush=True)
    return 0


def train(
    plan: RunPlan,
    data: Data,
    context: DistributedContext,
    point: ResumePoint | None,
    *,
    make_runner: Callable[[list[Stage]], Any],
    streams: bool = False,
) -> None:
    """Builds this rank's stages and runs the loop.

    Args:
        make_runner: gets the stages and gives what runs them; with `streams` from host memory.
    """
    run, schedule = plan.run, plan.topology.schedule
    account = _open_account(run, context, streams=streams)
    is_packed = run.packing or getattr(data.train, "packed", None) is not None
    stage_builder(plan).verify(
        run.prove_split,
        ranks=Ranks.of(None),
        say=say,
        answers=plan.parts["loss_fn"].facts["samples_answers"],
        packed_rows=run.micro_batch_size if is_packed else 0,
    )
    seed_everything(run.seed)
    models = build_stages(
        plan,
        context,
        schedule,
        images=data.processor,
        point=point,
        new_tokens=data.new_tokens,
        is_packed=is_packed,
    )
    summaries = [summarize_stage(model, context) for model in models]
    replicas = join_replicas(models, context, shards=run.dp_shard)
    runner = make_runner(models)
    folder = Path(run.output_dir)
    start = point.step if point else 0
    if context.is_main:
        save_config(plan, folder / "config.yaml")
        data.bad_rows.write(folder / "bad_rows.jsonl")
    open_log()
    report = RunReport(
        folder,
        context=context,
        total_steps=run.total_steps,
        start_step=start,
        log_steps=run.log_steps,
        lr_scales=learning_rate_scales(run),
        tracker=make_tracker(plan, folder, start_step=start) if context.is_main else None,
    )
    with report:
        report.show_plan(summaries)
        training = TrainingRun(plan, data, context, runner, replicas, report, point)
        account.train_step = training.train_step
        training.run()


def _open_account(run: RunConfig, context: DistributedContext, *, streams: bool) -> MemoryAccount:
    """What is told where memory runs out."""
    has_gpu = is_accelerator(context.devices[0])
    if has_gpu and not (run.bf16 or run.fp16):
        say("note: float32 on a GPU, at a fraction of its speed; --bf16 computes in half the bits")
    remedies = memory_remedies(run, has_gpu=has_gpu, streams=streams)
    account = MemoryAccount(context.devices, remedies, answering_remedies(run))
    on_full_memory(account.describe)
    return account


def join_replicas(models: list[Stage], context: DistributedContext, *, shards: bool) -> Replicas:
    """Checks that all replicas start alike and, if asked to, shares their weights out."""
    replicas = Replicas(context.dp_group)
    replicas.check_equal(models)
    if shards:
        return ShardedReplicas(models, mesh=context.mesh["dp"])
    return replicas
