"""A training run as it is settled before anything is built: its options, components and topology.

It is frozen, and what was left open is filled in, so that the saved config says it. Only the steps
of an epoch and the layers of the stages come later. The process that starts the others needs no
more, so nothing here imports transformers.
"""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from options.model import check_vision
from options.train import check_memory, check_streaming
from parse_args import TrainArguments
from stageline.distributed.watchdog import WatchdogRules
from stageline.errors import UserError
from stageline.pipeline.topology import Topology, resolve_topology


@dataclass(frozen=True)
class RunPlan(TrainArguments):
    """The settled options of a training run; an engine gets it with the data."""

    topology: Topology  # stages, ranks and replicas

    @property
    def watchdog_rules(self) -> WatchdogRules:
        """Return the limits after which the watchdog of a rank ends the run."""
        return WatchdogRules(self.run.hang_timeout, self.run.stop_deadline)

    @property
    def exchange_timeout(self) -> float:
        """Timeout of an exchange in seconds, longer than the watchdog's, whose report says more."""
        return max(600.0, self.run.hang_timeout + 180.0)


def make_plan(arguments: TrainArguments) -> RunPlan:
    """Settle stages, ranks and replicas; refuse what the schedule or the engine cannot do."""
    run, parts = arguments.run, arguments.parts
    world_size = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    check_streaming(run, parts["engine"].key, world_size=world_size or 1)
    changes: dict[str, Any] = {}
    engine = parts["engine"]
    if engine.facts.topology is not None:
        topology = engine.facts.topology(arguments)
        changes["timeline_step"] = 0  # its backward passes are not those of single stages
    else:
        topology = resolve_topology(
            schedule=run.schedule,
            num_stages=run.num_stages,
            stages_per_rank=run.stages_per_rank,
            dp_degree=run.dp_degree,
            world_size=world_size,
        )
        topology.schedule.check(
            run.num_micro_batches,
            micro_batch_size=run.micro_batch_size,
            accumulate_steps=run.accumulate_steps,
        )
        check_memory(run, splits_backward=topology.schedule.splits_backward)
        if run.dp_shard and topology.dp_degree == 1:
            raise UserError(
                "--dp-shard needs at least two replicas. Add --dp-degree 2 or drop --dp-shard."
            )
        optimizer = parts["optimizer"]
        if run.dp_shard and optimizer.facts.needs_whole:
            raise UserError(
                f"--optimizer {optimizer.key} needs whole weights. Use --optimizer adamw or drop "
                "--dp-shard."
            )
        if not run.schedule.endswith(".csv"):  # a file may place other numbers on each rank
            changes["stages_per_rank"] = topology.num_stages // topology.num_ranks
    changes |= {"num_stages": topology.num_stages, "dp_degree": topology.dp_degree}
    run = dataclasses.replace(run, **changes)
    check_vision(run)
    return RunPlan(run, parts, arguments.imports, topology)
