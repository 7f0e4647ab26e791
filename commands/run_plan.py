"""A training run as it is settled before anything is built: its options, parts and topology.

Made once from the command line, and frozen: what was left open is filled in, so that the saved
config says it. Only the layers of the stages come later, where they are measured on the devices.
"""

import dataclasses
import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import say
from commands.elastic import num_wanted, settle_ranks
from commands.train_data import Data, answers_of, epoch_steps
from commands.train_parts import make_planner
from options.fields import option_fields, spelled
from options.memory import check_memory, check_streaming_engine
from options.model import check_vision
from options.train import RunConfig, check_warmup
from parse_args import TrainArguments
from register import load_target
from stageline.distributed.guard import GuardRules
from stageline.distributed.process_group import DistributedContext
from stageline.errors import UserError
from stageline.pipeline.topology import Topology, resolve_topology
from stageline.planner.cost import device_capacity
from stageline.planner.planner import place_together


@dataclass(frozen=True)
class RunPlan(TrainArguments):
    """What a training run has resolved; an engine part gets it with the data.

    Attributes:
        topology: stages, ranks and replicas.
        num_wanted: ranks that an elastic run is to have when none is lost; None: as many as come.
    """

    topology: Topology
    num_wanted: int | None = None

    @property
    def guard_rules(self) -> GuardRules:
        """When the guard of a rank ends the run."""
        return GuardRules(
            hang_timeout=self.run.hang_timeout,
            stop_deadline=self.run.stop_deadline,
            lost_after=self.run.lost_after,
            folder=Path(self.run.output_dir),
        )


def make_plan(arguments: TrainArguments) -> RunPlan:
    """Settles stages, ranks and replicas; refuses what the schedule or the engine cannot do."""
    run, engine = arguments.run, arguments.parts["engine"]
    check_streaming_engine(run, engine.key)
    wanted = num_wanted(run) if run.elastic else None
    if run.elastic:
        arguments = dataclasses.replace(arguments, run=settle_ranks(run, started_ranks()))
        run = arguments.run
    changes: dict[str, Any] = {}
    if engine.facts["topology"] is not None:
        topology = load_target(engine.facts["topology"])(arguments)
        changes["timeline_step"] = 0  # its backward passes are not those of single stages
    else:
        topology = _pipeline_topology(arguments)
        if not run.schedule.endswith(".csv"):  # a file may place other numbers on each rank
            changes["stages_per_rank"] = topology.num_stages // topology.num_ranks
    changes |= {"num_stages": topology.num_stages, "dp_degree": topology.dp_degree}
    run = dataclasses.replace(run, **changes)
    check_vision(run)
    return RunPlan(run, arguments.parts, arguments.imports, topology, wanted)


def started_ranks() -> int | None:
    """How many processes a launcher has started; None: there was none yet."""
    world_size = os.environ.get("WORLD_SIZE")
    return int(world_size) if world_size else None


def _pipeline_topology(arguments: TrainArguments) -> Topology:
    run = arguments.run
    topology = resolve_topology(
        schedule=run.schedule,
        num_stages=run.num_stages,
        stages_per_rank=run.stages_per_rank,
        dp_degree=run.dp_degree,
        world_size=started_ranks(),
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
    optimizer = arguments.parts["optimizer"]
    if run.dp_shard and optimizer.facts["needs_whole"]:
        raise UserError(
            f"--optimizer {optimizer.key} came with --dp-shard. An optimizer that works element by "
            "element was expected, because each replica updates its rows of a matrix alone and "
            f"{optimizer.key} needs the whole one: use --optimizer adamw, or leave --dp-shard out."
        )
    return topology


def settle_steps(plan: RunPlan, data: Data) -> RunPlan:
    """The plan with the steps that its epochs and its share of warm-up are; says how many."""
    run, told = plan.run, []
    found: dict[str, Any] = {}
    if run.num_train_epochs is not None or "epoch" in (run.save_steps, run.eval_steps):
        epoch = epoch_steps(run, data.train, answers=answers_of(plan))
        told.append(f"an epoch is {epoch:,} steps")
        if run.num_train_epochs is not None:
            # 0.1 x 30 is a little more than 3
            found["total_steps"] = math.ceil(round(run.num_train_epochs * epoch, 6))
            one = "epoch" if run.num_train_epochs == 1 else "epochs"
            told.append(f"{run.num_train_epochs:g} {one} = {found['total_steps']:,} steps")
    if run.warmup_ratio is not None:
        total = found.get("total_steps", run.total_steps)
        found["warmup_steps"] = math.ceil(round(run.warmup_ratio * total, 6))
        told.append(f"warm-up is {found['warmup_steps']:,} of {total:,} steps")
    for item in option_fields(run).values():
        name = item.metadata["instead_of"]
        if name in found and getattr(run, name) not in (found[name], getattr(RunConfig, name)):
            told.append(f"in place of {spelled(name)} {getattr(run, name)} of the file")
    run = dataclasses.replace(run, **found)
    check_warmup(run)
    if told:
        say(", ".join(told))
    return dataclasses.replace(plan, run=run)


def place_layers(plan: RunPlan, data: Data, context: DistributedContext) -> RunPlan:
    """The plan with the layers of each stage, settled on all ranks."""
    run = plan.run
    if run.vision_stages:
        return plan  # the planner knows no tower but one on stage 0
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    partition = place_together(
        functools.partial(make_planner, plan, data, plan.topology, context.device),
        run.partition,
        capacity=device_capacity(
            context.device, num_local_ranks=local_ranks, gib=run.device_memory
        ),
    )
    if partition is None or run.partition not in ("parameters", "measured"):
        return plan
    return dataclasses.replace(plan, run=dataclasses.replace(run, partition=partition))
