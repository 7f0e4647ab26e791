"""Places the layers of a run on its stages, refuses what cannot fit, and predicts its costs.

Takes plain objects; reads no checkpoint. The arithmetic is in the other files of this folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist

from stageline.device import generators_kept, is_accelerator
from stageline.errors import PlanError, UserError, spelled
from stageline.pipeline.live_bytes import PeakBytes
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.stage_passes import MicroBatch
from stageline.pipeline.topology import explicit_partition, uniform_partition
from stageline.planner.estimate import (
    LossFor,
    MakePiece,
    MemoryRules,
    ModelCosts,
    Outline,
    RankMemory,
    WeighAnswers,
    Workload,
    answering_costs,
    estimate,
    measure,
    most_in_flight,
    outline_of,
)
from stageline.planner.partition import Choice, Expectation, Placement, advise
from stageline.tables import format_table, human_bytes, human_count

MOST_CHOICES = 3

_STAGES = (
    *("stage", "rank", "layers", "with", "parameters", "trainable", "weights"),
    *("kept", "forward", "backward", "of slowest"),
)
_RANKS = ("rank", "weights", "state", "activations", "inputs", "peak", "device", "used")
_OWN = ("cache", "answering", "teacher")  # only for a run that has them; before the peak


def refusal(expectation: Expectation, capacities: Sequence[int]) -> str:
    """Say why a run cannot be started, with the figures of each rank that is too full."""
    pairs = enumerate(zip(expectation.memory, capacities, strict=True))
    full = [(rank, *pair) for rank, pair in pairs if pair[0].peak > pair[1]]
    figures = [
        f"rank {rank} needs {human_bytes(memory.peak)} (weights {human_bytes(memory.weights)}, "
        f"gradients and optimizer {human_bytes(memory.state)}, activations "
        f"{human_bytes(memory.activations)}"
        + (f", teacher {human_bytes(memory.teacher)}" if memory.teacher else "")
        + (f", or {human_bytes(memory.answers)} while it answers" if memory.answers else "")
        + f") and has {human_bytes(capacity)}"
        for rank, memory, capacity in full
    ]
    helps = ["more stages", "`partition` measured"]
    if any(memory.lasting + memory.answers > capacity for _, memory, capacity in full):
        helps.append("a smaller `prompts_together`, `group_size` or `max_completion_length`")
    if any(memory.lasting + memory.training > capacity for _, memory, capacity in full):
        helps.append("a smaller `micro_batch_size` or `max_token_num`, `gradient_checkpointing`")
    return (
        f"this run can't fit: {'; '.join(figures)}. Use {', '.join(helps)}, `bf16` or LoRA; `plan` "
        "shows all figures, and `device_memory` corrects what a device has."
    )


def seconds_text(seconds: float) -> str:
    """0.0123 -> "12.3 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _stage_rows(expectation: Expectation, front: str) -> list[tuple[str, ...]]:
    schedule = expectation.schedule
    kept = most_in_flight(schedule, expectation.num_micro_batches)
    splits = schedule.splits_backward
    times = [cost.seconds(splits_backward=splits) for cost in expectation.stages]
    rows: list[tuple[str, ...]] = []
    end = 0
    for stage, (count, cost) in enumerate(
        zip(expectation.partition, expectation.stages, strict=True)
    ):
        start, end = end, end + count
        ends = [front] if stage == 0 else []
        ends += ["head"] if stage == schedule.num_stages - 1 else []
        rows.append(
            (
                str(stage),
                str(schedule.rank_of_stage[stage]),
                f"{start}-{end - 1} ({count})",
                "+".join(ends),
                human_count(cost.num_parameters),
                human_count(cost.num_trainable),
                human_bytes(cost.weights),
                f"{kept[stage] if cost.saved else 0} x {human_bytes(cost.saved)}",
                seconds_text(cost.forward),
                seconds_text(times[stage] - cost.forward),
                f"{times[stage] / max(max(times), 1e-12):.0%}",
            )
        )
    return rows


def _rank_rows(
    memory: Sequence[RankMemory], capacities: Sequence[int] | None
) -> list[tuple[str, ...]]:
    own = [name for name in _OWN if any(getattr(held, name) for held in memory)]
    before = _RANKS.index("peak")
    head = (*_RANKS[:before], *own, *_RANKS[before:])
    return [head] + [
        (
            str(rank),
            human_bytes(held.weights),
            human_bytes(held.state),
            human_bytes(held.activations),
            human_bytes(held.inputs),
            *(human_bytes(getattr(held, name)) for name in own),
            human_bytes(held.peak),
            human_bytes(capacities[rank]) if capacities else "?",
            f"{held.peak / max(capacities[rank], 1):.0%}" if capacities else "?",
        )
        for rank, held in enumerate(memory)
    ]


MakeOptimizer = Callable[[dict[str, torch.nn.Parameter]], torch.optim.Optimizer | None]
_COUNT, _SIDE = 8, 128  # parameters to try on


def probe_optimizer(
    make_optimizer: MakeOptimizer, device: torch.device, *, shards: int = 1
) -> MemoryRules:
    """Return an optimizer's bytes for each element, found by a step on small parameters.

    Args:
        make_optimizer: gets {name: parameter}.
    """
    parameters = {
        f"layers.{index}.weight": torch.nn.Parameter(torch.ones(_SIDE, _SIDE, device=device))
        for index in range(_COUNT)
    }
    optimizer = make_optimizer(parameters)
    if optimizer is None:
        return MemoryRules(optimizer_bytes=0.0, shards=shards)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    meter = PeakBytes(device)
    with meter.watch():
        optimizer.step()
    count = _COUNT * _SIDE * _SIDE
    state = sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    update = max(0, meter.peak - state)
    return MemoryRules(state / count, update_bytes=update / count, shards=shards)


def teacher_bytes(costs: ModelCosts | None, kept: int) -> Callable[[int, int], int]:
    """Return what gives the bytes of a teacher on a stage of a number of stages.

    Args:
        costs: of its model, whose frozen stages are split evenly; None: it is elsewhere.
        kept: its distributions of a step, on the last stage.
    """

    def of_stage(stage: int, num_stages: int) -> int:
        weights = 0
        if costs is not None and num_stages <= costs.num_layers:
            partition = uniform_partition(costs.num_layers, num_stages)
            weights = costs.stages(partition)[stage].weights
        return weights + (kept if stage == num_stages - 1 else 0)

    return of_stage


PartitionKind = Literal["uniform", "parameters", "measured"] | list[int]


@dataclass
class Planner:
    """Plans one run.

    Attributes:
        make_piece: see `stageline.planner.estimate`.
        num_samples: of one optimizer step on one pipeline.
        micro_batch_of: a number of rows -> a micro-batch of the run's data, as stage 0 gets it.
        loss_for: the last stage -> its loss, (output, micro-batch) -> scalar.
        make_optimizer: {name: parameter} -> the optimizer of the run.
        device: where to measure.
        shards: replicas that share weights and their state.
        answers_of: tokens of the longest row -> what weighs the answers that are drawn before a
            step; None: the model does not answer.
        group_size: samples that stay in one micro-batch.
        teacher: see `MemoryRules`.
    """

    make_piece: MakePiece
    schedule: Schedule
    _: KW_ONLY
    num_samples: int
    micro_batch_size: int
    micro_batch_of: Callable[[int], MicroBatch]
    loss_for: LossFor
    make_optimizer: MakeOptimizer
    device: torch.device
    shards: int = 1
    answers_of: Callable[[int], WeighAnswers] | None = None
    visual_gpu_ratio: float = 0.0
    group_size: int = 1
    teacher: Callable[[int, int], int] | None = None
    repeats: int = 5
    _measured: dict[int, ModelCosts] = field(default_factory=dict, init=False)

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
                f"`train_model` can't be built in pieces ({error}). Pass on is_piece and device to "
                "StageModel.build, or use `partition` uniform or numbers."
            ) from error

    @cached_property
    def rules(self) -> MemoryRules:
        """Memory that does not follow from the model."""
        rules = probe_optimizer(self.make_optimizer, self.device, shards=self.shards)
        return replace(rules, teacher=self.teacher)

    def measured(self, micro_batch_size: int) -> ModelCosts:
        """The costs on this device, measured once for each size."""
        if micro_batch_size not in self._measured:
            workload = Workload(
                self.micro_batch_of(micro_batch_size), self.loss_for, self.device, self.repeats
            )
            # dropout and random inputs must not shift the run's own draws
            with generators_kept([self.device]):
                costs = measure(self.outline, workload)
                self._measured[micro_batch_size] = self._answering(costs)
            if is_accelerator(self.device):
                torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
        return self._measured[micro_batch_size]

    def _answering(self, costs: ModelCosts) -> ModelCosts:
        if self.answers_of is None:
            return costs
        return answering_costs(costs, self.outline, self.answers_of(costs.shape[1]))

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
        size = self.micro_batch_size
        if kind == "measured":
            costs = self.measured(size)
        else:
            rows, tokens = self.micro_batch_of(size)["input_ids"].shape
            costs = self._answering(estimate(self.outline, shape=(rows, tokens)))
        placement = self._placement(costs, capacities)
        partition = self._partition(kind, placement)
        expectation = placement.expect(partition)
        if placement.overshoot(expectation.memory):
            raise UserError(refusal(expectation, capacities or ()))
        return partition

    def plan(self, kind: PartitionKind, capacities: tuple[int, ...] | None = None) -> str:
        """The table of a run: layers, bytes, expected seconds, bubble, memory, and advice."""
        placement = self._placement(self.measured(self.micro_batch_size), capacities)
        partition, costs = self._partition(kind, placement), placement.costs
        expectation, schedule = placement.expect(partition), self.schedule
        rows, tokens = costs.shape
        given = kind if isinstance(kind, str) else "as given"
        lines = [
            spelled(f"plan: `schedule` {schedule.name}, {schedule.num_stages} stages on ")
            + f"{schedule.num_ranks} ranks, {expectation.num_micro_batches} micro-batches, "
            + f"measured with {rows} x {tokens} tokens",
            f"partition ({given}): {','.join(map(str, expectation.partition))}",
            "",
            format_table([_STAGES, *_stage_rows(expectation, costs.front)], num_texts=4, rules=[1]),
            "",
            format_table(_rank_rows(expectation.memory, capacities), rules=[1]),
            "",
            f"expected: {seconds_text(expectation.seconds)} for forward and backward of a step, "
            f"bubble {expectation.bubble:.1%}, slowest rank {seconds_text(expectation.slowest)} a "
            f"micro-batch, peak {human_bytes(max(rank.peak for rank in expectation.memory))}",
        ]
        if costs.not_counted:
            lines.append(f"not counted: {costs.not_counted}")
        if placement.overshoot(expectation.memory):
            lines += ["", refusal(expectation, capacities or ())]
        choices = self.advice(capacities)
        if choices:
            taken = f"a transfer between ranks taken as {seconds_text(costs.hand_over)}"
            lines += ["", f"the same step on these ranks, by simulation ({taken}):"]
        for choice in choices[:MOST_CHOICES]:
            other = choice.expectation
            gain = expectation.seconds / max(other.seconds, 1e-12)
            fits = ", DOES NOT FIT" if choice.overshoot else ""
            lines.append(
                f"  {seconds_text(other.seconds)} ({gain:.2f} x as fast), bubble "
                f"{other.bubble:.1%}, peak {human_bytes(choice.peak)}{fits}: {choice.options()}"
            )
        return "\n".join(lines)

    def advice(self, capacities: tuple[int, ...] | None = None) -> list[Choice]:
        """Ways to run the same step on as many ranks, the most promising first.

        Micro-batches have the size of the run, half of it or twice as many samples.
        """
        size = self.micro_batch_size
        near = {size, 2 * size, *([size // 2] if size % 2 == 0 else [])}
        whole = (s for s in near if s % self.group_size == 0)
        sizes = sorted(s for s in whole if self.num_samples % s == 0)
        return advise(
            {size: self.measured(size) for size in sizes},
            num_ranks=self.schedule.num_ranks,
            num_samples=self.num_samples,
            rules=self.rules,
            capacities=capacities,
        )

    def _placement(self, costs: ModelCosts, capacities: tuple[int, ...] | None) -> Placement:
        num_micro_batches = self.num_samples // self.micro_batch_size
        return Placement(costs, self.schedule, num_micro_batches, self.rules, capacities)

    def _partition(self, kind: PartitionKind, placement: Placement) -> list[int]:
        num_layers, num_stages = placement.costs.num_layers, self.schedule.num_stages
        # also where it is not wanted: it refuses more stages than layers
        uniform = uniform_partition(num_layers, num_stages, visual_gpu_ratio=self.visual_gpu_ratio)
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
        make_planner: called only on rank 0.
    """
    gathered: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(gathered, capacity)
    found: list[list[int] | None] = [None]
    if dist.get_rank() == 0:
        planner = make_planner()
        # use the ranks of the first pipeline; its replicas are assumed to be alike
        found = [planner.place(kind, tuple(gathered[: planner.schedule.num_ranks]))]
    dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
    return found[0]
