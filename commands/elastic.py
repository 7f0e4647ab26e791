"""What --elastic means for a training run: its plan on another number of ranks, and what was lost.

A step takes the same samples on any number of ranks: fewer replicas do more micro-batches each.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from options.train import RunConfig
from stageline.distributed.elastic import Accelerators, Elastic
from stageline.errors import UserError
from stageline.pipeline.schedules import default_stages_per_rank
from stageline.pipeline.topology import resolve_topology
from stageline.run_records import last_trained


def on_ranks(run: RunConfig, count: int) -> RunConfig | None:
    """The options of the run on exactly so many ranks; None: there is no plan.

    As many replicas as they were, if possible; a step's samples stay.

    Args:
        run: with the stages and replicas that it is to have when nothing is lost.
    """
    if count == num_wanted(run):
        return run
    degree, per_rank = run.dp_degree or 1, stages_per_rank(run)
    batches = degree * run.accumulate_steps
    for replicas in range(min(degree, count), 0, -1):
        if count % replicas or batches % replicas:
            continue
        other = dataclasses.replace(
            run,
            dp_degree=replicas,
            dp_shard=run.dp_shard and replicas > 1,
            accumulate_steps=batches // replicas,
            num_stages=count // replicas * per_rank,
        )
        if has_plan(other, most=_most_stages(run, other)):
            return other
    return None


def num_wanted(run: RunConfig) -> int | None:
    """The ranks that the run is to have; None: as many as are started."""
    if run.num_stages is None:
        return None
    return run.num_stages // stages_per_rank(run) * (run.dp_degree or 1)


def stages_per_rank(run: RunConfig) -> int:
    """Stages that a process holds."""
    return run.stages_per_rank or default_stages_per_rank(run.schedule)


def has_plan(run: RunConfig, *, most: int | None) -> bool:
    """Whether the schedule takes these stages, and each has a layer.

    Args:
        most: stages that the model can be cut into; None: not known.
    """
    assert run.num_stages is not None  # the caller has set it
    if run.num_stages <= run.vision_stages or (most is not None and run.num_stages > most):
        return False
    try:
        topology = resolve_topology(
            schedule=run.schedule,
            num_stages=run.num_stages,
            stages_per_rank=run.stages_per_rank,
            dp_degree=run.dp_degree,
        )
        topology.schedule.check(
            run.num_micro_batches,
            micro_batch_size=run.micro_batch_size,
            accumulate_steps=run.accumulate_steps,
        )
    except UserError:
        return False
    return True


def _most_stages(run: RunConfig, other: RunConfig) -> int | None:
    """Stages that the model can be cut into, where they are more than it had."""
    if run.num_stages is None or (other.num_stages or 0) <= run.num_stages:
        return None
    if not run.config_folder:
        return run.num_stages
    from stageline.model_folder import load_config  # late: it imports transformers

    config = load_config(run.config_folder, trust_remote_code=run.trust_remote_code)
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    return run.num_stages if layers is None else layers + run.vision_stages


def settle_ranks(run: RunConfig, world_size: int | None) -> RunConfig:
    """The options for the ranks that were started; before that as they are.

    Raises:
        UserError: more ranks than the run is to have, or so many that no plan fits.
    """
    wanted = num_wanted(run)
    if world_size is None:
        return run
    if wanted is not None and world_size > wanted:
        raise UserError(
            f"{world_size} processes were started, --elastic is to have {wanted} at most: "
            f"--num-stages {run.num_stages} x --dp-degree {run.dp_degree or 1}. Raise one of them, "
            "or start fewer."
        )
    found = on_ranks(run, world_size)
    if found is None:
        raise UserError(
            f"{world_size} of {wanted or world_size} processes were started, and the model has no "
            f"plan of stages for so many (--schedule {run.schedule}, --batch-size "
            f"{run.batch_size}, --micro-batch-size {run.micro_batch_size}). Start another number."
        )
    return found


def make_elastic(run: RunConfig, num_ranks: int) -> Elastic:
    """What the launcher asks when workers have ended."""
    return Elastic(
        num_ranks=num_ranks,
        fitting=lambda left: next((n for n in range(left, 0, -1) if on_ranks(run, n)), 0),
        max_restarts=run.max_restarts,
        folder=Path(run.output_dir),
        devices=Accelerators(run.device, num_ranks=num_ranks),
    )


@dataclass(frozen=True)
class Interruption:
    """What an earlier start of the run had done when it ended.

    Attributes:
        last_step, last_time: the last step that it logged, and when (seconds since the epoch).
        start_step: steps of the checkpoint that the run goes on from.
        ranks: in words, those of this start.
    """

    last_step: int
    last_time: float
    start_step: int
    ranks: str

    @classmethod
    def read(cls, folder: Path, start_step: int, ranks: str) -> Interruption | None:
        """From the log of the run, before this start has written to it; None: it is the first."""
        last = last_trained(folder / "log.jsonl")
        return None if last is None else cls(last["step"], last["time"], start_step, ranks)

    def told(self, now: Callable[[], float] = time.time) -> str:
        """The line after the first step: what was lost, and how long no step was done."""
        first, last = self.start_step + 1, self.last_step
        steps = f"step {last}" if first == last else f"steps {first}-{last}"
        lost = f"lost {steps}" if last >= first else "lost no step"
        point = f"step {self.start_step}" if self.start_step else "the start (no checkpoint yet)"
        seconds = now() - self.last_time
        return f"elastic: {lost}; went on from {point} on {self.ranks}, {seconds:.1f} s later"


def ranks_in_words(run: RunConfig, wanted: int | None) -> str:
    """`3 of 4 ranks (stages 3 x replicas 1)`."""
    count = num_wanted(run)  # a plan's stages and replicas are those of this start
    of = f"{count} of {wanted}" if wanted is not None else f"{count}"
    return f"{of} ranks (stages {run.num_stages} x replicas {run.dp_degree})"
