"""Peak memory of each rank, from the costs of its stages and the order of its passes.

Pure arithmetic. Not here: what a device really held (training/memory.py).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stageline.pipeline.plan import Action, Kind, drop_dead_backward
from stageline.pipeline.schedules import Schedule
from stageline.planner.cost import Cost, ModelCosts, flow_of


@dataclass(frozen=True)
class MemoryRules:
    """What does not follow from the model.

    Attributes:
        optimizer_bytes: state of the optimizer for each trained element.
        update_bytes: what an update takes beside it, for each trained element.
        shards: replicas that share weights, gradients and optimizer state.
        workspace: bytes of libraries on each device.
    """

    optimizer_bytes: float = 8.0
    update_bytes: float = 0.0
    shards: int = 1
    workspace: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        masters: float32 copies of weights in half precision.
        activations: at the fullest moment of a step, the running pass included.
        inputs: micro-batches that wait on the device, and tensors under way between ranks.
        update: of the optimizer while it works; activations are gone by then.
    """

    weights: int
    gradients: int
    masters: int
    optimizer: int
    activations: int
    inputs: int
    update: int
    workspace: int

    @property
    def lasting(self) -> int:
        """What is there in each moment of a step."""
        return self.weights + self.gradients + self.masters + self.optimizer + self.workspace

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return self.lasting + self.inputs + max(self.activations, self.update)


def rank_memory(
    costs: ModelCosts,
    partition: Sequence[int],
    schedule: Schedule,
    *,
    num_micro_batches: int,
    rules: MemoryRules,
) -> list[RankMemory]:
    """The memory of every rank of the pipeline."""
    stages = costs.stages(partition)
    orders = drop_dead_backward(schedule.orders(num_micro_batches), flow_of(stages))
    return [
        _of_rank(
            costs,
            {stage: stages[stage] for stage in schedule.stages_of(rank)},
            num_stages=len(stages),
            rules=rules,
            activations=peak_activations(order, stages),
            num_micro_batches=num_micro_batches,
        )
        for rank, order in enumerate(orders)
    ]


def stage_peak(
    costs: ModelCosts,
    cost: Cost,
    *,
    stage: int,
    num_stages: int,
    in_flight: int,
    num_micro_batches: int,
    rules: MemoryRules,
) -> int:
    """The peak of a rank that holds one stage alone and `in_flight` micro-batches."""
    return _of_rank(
        costs,
        {stage: cost},
        num_stages=num_stages,
        rules=rules,
        activations=in_flight * cost.saved + cost.transient,
        num_micro_batches=num_micro_batches,
    ).peak


def _of_rank(
    costs: ModelCosts,
    held: Mapping[int, Cost],
    *,
    num_stages: int,
    rules: MemoryRules,
    activations: int,
    num_micro_batches: int,
) -> RankMemory:
    total = sum(held.values(), Cost())
    has_both_ends = 0 in held and num_stages - 1 in held
    tied = costs.tied if has_both_ends else Cost()
    num_trained = total.num_trainable - tied.num_trainable
    # a tensor comes while another is worked on: one for each border
    num_borders = sum((stage > 0) + (stage < num_stages - 1) for stage in held)
    return RankMemory(
        weights=(total.weights - tied.weights) // rules.shards,
        gradients=(total.gradients - tied.gradients) // rules.shards,
        masters=(total.masters - tied.masters) // rules.shards,
        optimizer=int(num_trained * rules.optimizer_bytes) // rules.shards,
        activations=activations,
        inputs=(costs.batch * num_micro_batches if 0 in held else 0) + num_borders * costs.border,
        update=int(num_trained * rules.update_bytes) // rules.shards,
        workspace=rules.workspace,
    )


def peak_activations(order: Sequence[Action], stages: Sequence[Cost]) -> int:
    """The most bytes of activations that a rank holds in the course of its order."""
    alive = peak = 0
    for action in order:
        cost = stages[action.stage]
        if action.kind == Kind.FORWARD:
            alive += cost.saved
        peak = max(peak, alive + cost.transient)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            alive -= cost.saved
    return peak


def most_in_flight(schedule: Schedule, num_micro_batches: int) -> list[int]:
    """For each stage, the most micro-batches whose activations it holds at once."""
    alive = [0] * schedule.num_stages
    most = [0] * schedule.num_stages
    for order in schedule.orders(num_micro_batches):
        for action in order:
            if action.kind == Kind.FORWARD:
                alive[action.stage] += 1
                most[action.stage] = max(most[action.stage], alive[action.stage])
            elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                alive[action.stage] -= 1
    return most


# -- how much memory a rank may fill: of its GPU, or its share of the host's ----------------------

KEPT_FREE = 0.05  # of a GPU: the allocator's gaps and the libraries
_GROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def device_capacity(device: torch.device, *, num_local_ranks: int, gib: float | None = None) -> int:
    """Bytes that one rank may fill on this device.

    Args:
        gib: what the user says; None: ask the device.
        num_local_ranks: processes of this machine, which share its memory on a CPU.
    """
    if gib is not None:
        return int(gib * 1024**3)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device)
        return int(free - KEPT_FREE * total)
    return max(0, host_memory() // num_local_ranks - _resident())


def host_memory() -> int:
    """Bytes of the host's memory, or of the container's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _GROUP_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def _resident() -> int:
    """What this process holds before a model is built: the interpreter and its libraries."""
    status = Path("/proc/self/statm")
    pages = int(status.read_text().split()[1]) if status.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")
