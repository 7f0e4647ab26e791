"""What the parts of a model cost, stages made of them, and the ranks that hold these.

Pure arithmetic: seconds and bytes. What a device really held is in training/memory.py.

An item is what is never split: all that comes before the layers (embedding, vision tower,
projector), each layer, and all that comes behind them (final norm, head, loss).
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import torch

from stageline.device import is_accelerator
from stageline.pipeline.plan import Action, GradFlow, Kind, drop_dead_backward, grad_flow
from stageline.pipeline.schedules import Schedule


@dataclass(frozen=True)
class Cost:
    """Of one item, or of several on one stage, with one micro-batch.

    Attributes:
        forward, backward: seconds; the backward pass in one piece.
        input_grad, weight_grad: seconds of the backward pass in two.
        num_parameters, num_trainable: elements.
        weights, gradients, masters: bytes; a parameter in half precision has a float32 master.
        saved: bytes that the backward pass waits for.
        transient: what the fullest moment of a pass has beyond those.
        cache: keys and values of the answers that are drawn at once, of a run whose model answers.
        answering: what the fullest moment of a pass that answers has beyond the cache.
        trains: some parameter is trained.
    """

    forward: float = 0.0
    backward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    num_parameters: int = 0
    num_trainable: int = 0
    weights: int = 0
    gradients: int = 0
    masters: int = 0
    saved: int = 0
    transient: int = 0
    cache: int = 0
    answering: int = 0
    trains: bool = False

    def __add__(self, other: "Cost") -> "Cost":
        """Both on one stage, this one first.

        Passes come one after the other, so the larger transient counts; that of the first item
        comes when the other one has not saved yet, or is through with its backward pass.
        """
        return Cost(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMMED},
            transient=max(self.transient - other.saved, other.transient),
            answering=max(self.answering, other.answering),
            trains=self.trains or other.trains,
        )

    def seconds(self, *, splits_backward: bool = False) -> float:
        """The least that forward and backward pass of a micro-batch take.

        Also where a schedule parts it, the backward pass of a stage that sends no gradient is one.
        """
        split = self.input_grad + self.weight_grad
        return self.forward + (min(split, self.backward) if splits_backward else self.backward)


_NOT_SUMMED = ("transient", "answering", "trains")
_SUMMED = [item.name for item in fields(Cost) if item.name not in _NOT_SUMMED]


# Between two processes of one machine; assumed where not measured: enough to tell apart ways to run
# whose passes take the same time, of which the one with fewer hand-overs is faster.
CPU_LATENCY, CPU_BYTES_PER_SECOND = 1e-3, 1e9
LATENCY, BYTES_PER_SECOND = 2e-5, 2e10  # of accelerators


def hand_over_seconds(num_bytes: int, *, on_cpu: bool) -> float:
    """What a tensor takes from a rank to the next, roughly."""
    if on_cpu:
        return CPU_LATENCY + num_bytes / CPU_BYTES_PER_SECOND
    return LATENCY + num_bytes / BYTES_PER_SECOND


@dataclass(frozen=True)
class ModelCosts:
    """All items of a model, for micro-batches of one shape.

    Attributes:
        overhead: what each stage does once however many layers it has: masks, positions.
        first: before the layers.
        last: behind the layers, with the loss.
        tied: weights that first and last stage both hold; on one rank they are held once.
        border: bytes that travel between two stages.
        batch: bytes of a micro-batch as stage 0 gets it.
        shape: rows and tokens.
        hand_over: seconds from a rank to the next.
        front: what `first` is, for people.
        not_counted: what is not in these costs and why, for people.
    """

    overhead: Cost
    first: Cost
    layers: tuple[Cost, ...]
    last: Cost
    tied: Cost
    border: int
    batch: int
    shape: tuple[int, int]
    hand_over: float = 0.0
    front: str = "embedding"
    not_counted: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def stage(self, start: int, end: int) -> Cost:
        """Of a stage with layers `start` to `end` - 1, and what belongs to it at either end."""
        return self._stages[start, end]

    def stages(self, partition: Sequence[int]) -> list[Cost]:
        """Of all stages of a partition."""
        ends = itertools.accumulate(partition)
        return [self.stage(end - count, end) for count, end in zip(partition, ends)]

    @cached_property
    def _stages(self) -> dict[tuple[int, int], Cost]:
        found = {}
        for start in range(self.num_layers):
            cost = self.overhead + self.first if start == 0 else self.overhead
            for end in range(start + 1, self.num_layers + 1):
                cost = cost + self.layers[end - 1]
                is_last = end == self.num_layers
                # what a stage sends on stays with it: the backward pass begins there
                sent = Cost(saved=0 if is_last or not cost.saved else self.border)
                found[start, end] = cost + (self.last if is_last else sent)
        return found


def flow_of(stages: Sequence[Cost]) -> GradFlow:
    """Which stages have what to do in the backward pass."""
    return grad_flow([stage.trains for stage in stages])


def durations_of(stages: Sequence[Cost]) -> Mapping[tuple[int, Kind], float]:
    """Seconds of every pass of every stage, as `simulate` wants them."""
    return {
        (index, kind): getattr(stage, kind.name.lower())
        for index, stage in enumerate(stages)
        for kind in Kind
    }


@dataclass(frozen=True)
class MemoryRules:
    """What does not follow from the model.

    Attributes:
        optimizer_bytes: state of the optimizer for each trained element.
        update_bytes: what an update takes beside it, for each trained element.
        shards: replicas that share weights and optimizer state; in a step each has whole weights
            and gradients beside its shares.
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
        cache: keys and values, while the model answers; gone before it trains.
        answering: of a pass that answers, beside them.
    """

    weights: int
    gradients: int
    masters: int
    optimizer: int
    activations: int
    inputs: int
    update: int
    workspace: int
    cache: int = 0
    answering: int = 0

    @property
    def lasting(self) -> int:
        """What is there in each moment of a step."""
        return self.weights + self.gradients + self.masters + self.optimizer + self.workspace

    @property
    def peak(self) -> int:
        """The most that is held at once, of the phases of a step."""
        return self.lasting + max(self.training, self.answers)

    @property
    def answers(self) -> int:
        """The most beside what lasts, while the model answers."""
        return self.cache + self.answering

    @property
    def training(self) -> int:
        """The most beside what lasts, in passes that train and in the update."""
        return self.inputs + max(self.activations, self.update)


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
        memory_of(
            costs,
            {stage: stages[stage] for stage in schedule.stages_of(rank)},
            num_stages=len(stages),
            activations=peak_activations(order, stages),
            num_micro_batches=num_micro_batches,
            rules=rules,
        )
        for rank, order in enumerate(orders)
    ]


def memory_of(
    costs: ModelCosts,
    held: Mapping[int, Cost],
    *,
    num_stages: int,
    activations: int,
    num_micro_batches: int,
    rules: MemoryRules,
) -> RankMemory:
    """The memory of a rank that holds these stages."""
    total = sum(held.values(), Cost())
    has_both_ends = 0 in held and num_stages - 1 in held
    tied = costs.tied if has_both_ends else Cost()
    num_trained = total.num_trainable - tied.num_trainable
    weights, masters = total.weights - tied.weights, total.masters - tied.masters
    shares = 0
    if rules.shards > 1:  # of half a type, a share is the master itself
        shares = (weights - masters // 2) // rules.shards
    # a tensor comes while another is worked on: one for each border
    num_borders = sum((stage > 0) + (stage < num_stages - 1) for stage in held)
    return RankMemory(
        weights=weights + shares,
        gradients=total.gradients - tied.gradients,
        masters=masters // rules.shards,
        optimizer=int(num_trained * rules.optimizer_bytes) // rules.shards,
        activations=activations,
        inputs=(costs.batch * num_micro_batches if 0 in held else 0) + num_borders * costs.border,
        update=int(num_trained * rules.update_bytes) // rules.shards,
        workspace=rules.workspace,
        cache=total.cache,
        answering=total.answering,
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


KEPT_FREE = 0.05  # of an accelerator: the allocator's gaps and the libraries
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
    if is_accelerator(device):
        module = torch.get_device_module(device)
        free, total = module.mem_get_info(device)
        free += module.memory_reserved(device)
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
