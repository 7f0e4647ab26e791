"""Runs a training: its checks, and what the engines of train.py do.

Imports torch and all that a run needs; train.py has read the options before.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

from commands.train_data import Data, check_data, show_samples
from commands.train_parts import (
    build_stages,
    check_parts,
    make_planner,
    make_tracker,
    prove_stages,
)
from commands.train_run import (
    TrainingRun,
    make_streaming_runner,
    open_run_folder,
    streaming_topology,
)
from options.memory import check_memory, check_streaming_engine, memory_remedies
from options.model import check_vision, learning_rate_scales
from options.train import RunConfig
from parse_args import TrainArguments, save_config
from register import load_target
from stageline.distributed.failure import name_stages
from stageline.distributed.failure_record import on_full_memory, open_log, tell_run_folder
from stageline.distributed.guard import GuardRules
from stageline.distributed.launch import launch_if_needed
from stageline.distributed.process_group import (
    DistributedContext,
    choose_device,
    distributed_context,
)
from stageline.errors import UserError
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.topology import Topology, resolve_topology
from stageline.planner.cost import device_capacity
from stageline.planner.planner import place_together
from stageline.seeds import seed_everything
from stageline.training.memory import MemoryAccount
from stageline.training.replicas import Replicas, ShardedReplicas
from stageline.training.resume import ResumePoint
from stageline.training.run_log import RunReport, summarize_stage


def run_training(arguments: TrainArguments) -> int:
    """Checks what can be checked before a model is loaded, then runs the engine."""
    topology = check_topology(arguments)
    if not (arguments.run.plan or arguments.run.check_only):
        tell_run_folder(arguments.run.output_dir)
    if not arguments.run.plan:
        launch_if_needed(topology.num_processes, rules=guard_rules(arguments.run))
    data = check_data(arguments)
    check_parts(arguments, data)
    show_samples(arguments, data, topology.schedule)
    if arguments.run.check_only:
        return 0
    if arguments.run.plan:
        return show_plan(arguments, data, topology)
    return arguments.parts["engine"].part(arguments, data)


def guard_rules(run: RunConfig) -> GuardRules:
    """When the guard of a rank ends the run."""
    return GuardRules(
        hang_timeout=run.hang_timeout,
        stop_deadline=run.stop_deadline,
        lost_after=run.lost_after,
        folder=Path(run.output_dir),
    )


def check_topology(arguments: TrainArguments) -> Topology:
    """Stages, ranks and replicas of the run; refuses what the schedule cannot do.

    What was left open is filled in, so that the saved config says it.
    """
    run = arguments.run
    engine = arguments.parts["engine"]
    check_streaming_engine(run, engine.key)
    if engine.facts["topology"] is not None:
        return load_target(engine.facts["topology"])(arguments)
    world_size = os.environ.get("WORLD_SIZE")
    topology = resolve_topology(
        schedule=run.schedule,
        num_stages=run.num_stages,
        stages_per_rank=run.stages_per_rank,
        dp_degree=run.dp_degree,
        world_size=int(world_size) if world_size else None,
    )
    topology.schedule.check(
        run.num_micro_batches,
        micro_batch_size=run.micro_batch_size,
        accumulate_steps=run.accumulate_steps,
    )
    check_memory(run, splits_backward=topology.schedule.splits_backward)
    if run.dp_shard and topology.dp_degree == 1:
        raise UserError(
            "--dp-shard came with one replica, two or more were expected: replicas share the "
            "weights out among them. Add --dp-degree 2, or leave --dp-shard out."
        )
    check_sharding(arguments)
    run.num_stages = topology.num_stages
    check_vision(run)
    if not run.schedule.endswith(".csv"):  # a file may place other numbers on each rank
        run.stages_per_rank = topology.num_stages // topology.num_ranks
    run.dp_degree = topology.dp_degree
    return topology


def check_sharding(arguments: TrainArguments) -> None:
    """Refuses optimizers whose state belongs to whole matrices where matrices are shared out."""
    optimizer = arguments.parts["optimizer"]
    if arguments.run.dp_shard and optimizer.facts["needs_whole"]:
        raise UserError(
            f"--optimizer {optimizer.key} came with --dp-shard. An optimizer that works element by "
            "element was expected, because each replica updates its rows of a matrix alone and "
            f"{optimizer.key} needs the whole one: use --optimizer adamw, or leave --dp-shard out."
        )


def run_pipeline(arguments: TrainArguments, data: Data) -> int:
    """Stages on a schedule, forward and backward in turn; one process and device per rank."""
    topology = check_topology(arguments)
    with distributed_context(
        num_ranks=topology.num_ranks,
        device=arguments.run.device,
        # the guard tells better what hangs than an exchange that ran out of time
        timeout=max(600.0, arguments.run.hang_timeout + 120.0),
    ) as context:
        name_stages(topology.schedule.stages_of(context.pp_rank))
        point = open_run_folder(arguments, data, context)
        place_layers(arguments, data, context, topology)
        train(arguments, data, context, topology.schedule, point)
    return 0


def run_streaming(arguments: TrainArguments, data: Data) -> int:
    """Stages in host memory, streamed through the devices of this machine by one process."""
    topology = streaming_topology(arguments)
    with distributed_context(num_ranks=1, device="cpu") as context:
        name_stages(topology.schedule.stages_of(0))
        point = open_run_folder(arguments, data, context)
        make_runner = functools.partial(make_streaming_runner, arguments, context=context)
        train(arguments, data, context, topology.schedule, point, make_runner=make_runner)
    return 0


def show_plan(arguments: TrainArguments, data: Data, topology: Topology) -> int:
    """Prints what a run would be like; measures on this process's device, starts no other."""
    if os.environ.get("RANK", "0") == "0":
        device = choose_device(arguments.run.device, local_rank=0, local_world_size=1)
        gib = arguments.run.device_memory
        capacity = device_capacity(device, num_local_ranks=topology.num_processes, gib=gib)
        planner = make_planner(arguments, data, topology, device)
        capacities = (capacity,) * topology.num_ranks
        print(planner.plan(arguments.run.partition, capacities), flush=True)
    return 0


def place_layers(
    arguments: TrainArguments, data: Data, context: DistributedContext, topology: Topology
) -> None:
    """Settles the layers of each stage on all ranks; refuses a run that cannot fit."""
    run = arguments.run
    if run.vision_stages:
        return  # the planner knows no tower but one on stage 0
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    partition = place_together(
        functools.partial(make_planner, arguments, data, topology, context.device),
        run.partition,
        capacity=device_capacity(
            context.device, num_local_ranks=local_ranks, gib=run.device_memory
        ),
    )
    if run.partition in ("parameters", "measured"):
        run.partition = partition


def train(
    arguments: TrainArguments,
    data: Data,
    context: DistributedContext,
    schedule: Schedule,
    point: ResumePoint | None,
    *,
    make_runner: Callable[[list[torch.nn.Module]], PipelineRunner] | None = None,
) -> None:
    """Builds this rank's stages and runs the loop.

    Args:
        make_runner: gets the stages; None: a PipelineRunner.
    """
    run = arguments.run
    remedies = memory_remedies(run, has_gpu=context.device.type == "cuda")
    account = MemoryAccount(context.device, remedies)
    on_full_memory(account.describe)
    prove_stages(arguments)
    seed_everything(run.seed)
    models = build_stages(
        arguments,
        context,
        schedule,
        images=data.processor,
        point=point,
        new_tokens=data.new_tokens,
        is_packed=getattr(data.train, "packed", None) is not None,
    )
    summaries = [summarize_stage(model, context) for model in models]
    replicas = join_replicas(models, context, shards=run.dp_shard)
    make_runner = make_runner or functools.partial(
        PipelineRunner,
        device=context.device,
        group=context.pp_group,
        schedule=schedule,
        seed=run.seed,
    )
    runner = make_runner(models)
    folder = Path(run.output_dir)
    start = point.step if point else 0
    if context.is_main:
        save_config(arguments, folder / "config.yaml")
        data.bad_rows.write(folder / "bad_rows.jsonl")
    open_log()
    report = RunReport(
        folder,
        context=context,
        total_steps=run.total_steps,
        start_step=start,
        log_steps=run.log_steps,
        lr_scales=learning_rate_scales(run),
        tracker=make_tracker(arguments, folder, start_step=start) if context.is_main else None,
    )
    with report:
        report.show_plan(summaries)
        training = TrainingRun(arguments, data, context, runner, replicas, report, point)
        account.train_step = training.train_step
        training.run()


def join_replicas(
    models: list[torch.nn.Module], context: DistributedContext, *, shards: bool
) -> Replicas:
    """Checks that all replicas start alike and, if asked to, shares their weights out."""
    replicas = Replicas(context.dp_group, device=context.device)
    replicas.check_equal(models)
    if shards:
        return ShardedReplicas(models, mesh=context.mesh["dp"], device=context.device)
    return replicas
