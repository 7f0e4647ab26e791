"""Places the layers of a run on its stages, refuses what cannot fit, and says what to expect.

Everything comes as plain objects; no checkpoint is read. The arithmetic is in pipeline/.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist

from stageline.errors import PlanError, UserError
from stageline.pipeline.advice import Choice, advise
from stageline.pipeline.cost import ModelCosts
from stageline.pipeline.estimate import estimate
from stageline.pipeline.expect import Expectation
from stageline.pipeline.measure import LossFor, Workload, measure
from stageline.pipeline.memory_plan import MemoryRules
from stageline.pipeline.outline import MakePiece, Outline, outline_of
from stageline.pipeline.partition import explicit_partition, uniform_partition
from stageline.pipeline.placement import Placement
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.stage_passes import MicroBatch
from stageline.training.optimizer_memory import MakeOptimizer, probe_optimizer
from stageline.training.plan_report import format_plan, refusal

PartitionKind = Literal["uniform", "parameters", "measured"] | list[int]


@dataclass(frozen=True)
class PlannedRun:
    """What a run is to be.

    Attributes:
        num_samples: of one optimizer step on one pipeline.
        shards: replicas that share weights and their state.
        visual_gpu_ratio: see `uniform_partition`.
        group_size: samples that stay in one micro-batch.
    """

    schedule: Schedule
    num_samples: int
    micro_batch_size: int
    shards: int = 1
    visual_gpu_ratio: float = 0.0
    group_size: int = 1

    @property
    def num_micro_batches(self) -> int:
        return self.num_samples // self.micro_batch_size


class Planner:
    """Plans one run.

    Args:
        make_piece: see `stageline.pipeline.outline`.
        micro_batch_of: a number of rows -> a micro-batch of the run's data, as stage 0 gets it.
        loss_for: the last stage -> its loss, (output, micro-batch) -> scalar.
        make_optimizer: {name: parameter} -> the optimizer of the run.
        device: where to measure.
    """

    def __init__(
        self,
        make_piece: MakePiece,
        run: PlannedRun,
        *,
        micro_batch_of: Callable[[int], MicroBatch],
        loss_for: LossFor,
        make_optimizer: MakeOptimizer,
        device: torch.device,
        repeats: int = 5,
    ) -> None:
        self.make_piece = make_piece
        self.run = run
        self.micro_batch_of = micro_batch_of
        self.loss_for = loss_for
        self.make_optimizer = make_optimizer
        self.device = device
        self.repeats = repeats
        self._measured: dict[int, ModelCosts] = {}

    @cached_property
    def outline(self) -> Outline:
        """The items of the model.

        Raises:
            PlanError: the model's part cannot be built in pieces.
        """
        try:
            return outline_of(self.make_piece)
        except (TypeError, AttributeError, NotImplementedError) as error:
            raise PlanError(
                f"this --train-model can't be built in pieces ({error}), so it can't be measured: "
                "its part must pass on is_piece and device as StageModel.build takes them. Use "
                "--partition uniform or numbers."
            ) from error

    @cached_property
    def rules(self) -> MemoryRules:
        """Memory that does not follow from the model."""
        found = probe_optimizer(self.make_optimizer, self.device)
        return MemoryRules(
            optimizer_bytes=found.state, update_bytes=found.update, shards=self.run.shards
        )

    def measured(self, micro_batch_size: int) -> ModelCosts:
        """The costs on this device, measured once for each size."""
        if micro_batch_size not in self._measured:
            workload = Workload(
                self.micro_batch_of(micro_batch_size), self.loss_for, self.device, self.repeats
            )
            # dropout and random inputs must not shift the run's own draws
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                self._measured[micro_batch_size] = measure(self.outline, workload)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
        return self._measured[micro_batch_size]

    def place(
        self, kind: PartitionKind, capacities: tuple[int, ...] | None = None
    ) -> list[int] | None:
        """Layers per stage; None where a model that needs no plan cannot be taken to pieces.

        Args:
            capacities: bytes of each rank's device; None: not known, so all fits.

        Raises:
            UserError: a rank would need more memory than its device has.
        """
        if kind == "uniform" or isinstance(kind, list):
            try:
                _ = self.outline
            except PlanError:
                return None
        needs_times = kind == "measured"
        costs = self.measured(self.run.micro_batch_size) if needs_times else self._estimated()
        placement = self._placement(costs, capacities)
        partition = self._partition(kind, placement)
        expectation = placement.expect(partition)
        if placement.overshoot(expectation.memory):
            raise UserError(refusal(expectation, capacities or ()))
        return partition

    def plan(self, kind: PartitionKind, capacities: tuple[int, ...] | None = None) -> str:
        """The table of a run: layers, bytes, expected seconds, bubble, memory, and advice."""
        placement = self._placement(self.measured(self.run.micro_batch_size), capacities)
        partition = self._partition(kind, placement)
        return format_plan(
            placement.expect(partition),
            placement.costs,
            kind=kind if isinstance(kind, str) else "as given",
            capacities=capacities,
            choices=self.advice(capacities),
        )

    def advice(
        self, capacities: tuple[int, ...] | None = None, sizes: list[int] | None = None
    ) -> list[Choice]:
        """Ways to run the same step on as many ranks, the most promising first.

        Args:
            sizes: of micro-batches; by default the run's, its half and its double.
        """
        size = self.run.micro_batch_size
        if sizes is None:
            near = {size, 2 * size, *([size // 2] if size % 2 == 0 else [])}
            whole = (s for s in near if s % self.run.group_size == 0)
            sizes = sorted(s for s in whole if self.run.num_samples % s == 0)
        return advise(
            {size: self.measured(size) for size in sizes},
            num_ranks=self.run.schedule.num_ranks,
            num_samples=self.run.num_samples,
            rules=self.rules,
            capacities=capacities,
        )

    def expect(self, kind: PartitionKind) -> Expectation:
        """What follows from measured costs for one way to split."""
        placement = self._placement(self.measured(self.run.micro_batch_size), None)
        return placement.expect(self._partition(kind, placement))

    def _estimated(self) -> ModelCosts:
        shape = tuple(self.micro_batch_of(self.run.micro_batch_size)["input_ids"].shape)
        return estimate(self.outline, shape=shape)

    def _placement(self, costs: ModelCosts, capacities: tuple[int, ...] | None) -> Placement:
        return Placement(
            costs,
            self.run.schedule,
            self.run.num_micro_batches,
            rules=self.rules,
            capacities=capacities,
        )

    def _partition(self, kind: PartitionKind, placement: Placement) -> list[int]:
        num_layers, num_stages = placement.costs.num_layers, self.run.schedule.num_stages
        # also where it is not wanted: it refuses more stages than layers
        uniform = uniform_partition(
            num_layers, num_stages, visual_gpu_ratio=self.run.visual_gpu_ratio
        )
        if isinstance(kind, list):
            return explicit_partition(kind, num_layers=num_layers, num_stages=num_stages)
        if kind == "uniform":
            return uniform
        return placement.by_parameters() if kind == "parameters" else placement.by_seconds()


def place_together(
    make_planner: Callable[[], Planner], kind: PartitionKind, *, capacity: int
) -> list[int] | None:
    """The partition of a run, the same on all ranks: rank 0 measures, the others take it over.

    Every rank calls this, with the capacity of its own device.

    Args:
        make_planner: called on rank 0 alone.
    """
    gathered: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(gathered, capacity)
    found: list[list[int] | None] = [None]
    if dist.get_rank() == 0:
        planner = make_planner()
        # of the first pipeline; its replicas are taken to be alike
        found = [planner.place(kind, tuple(gathered[: planner.run.schedule.num_ranks]))]
    dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
    return found[0]
