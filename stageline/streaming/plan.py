"""Plan a pass: the layers of each stage, the order of stages and micro-batches, and the cost.

A pass goes through *slots*: the forward stages, then the backward stages from deep to shallow.
Slot i runs on lane i mod n, all micro-batches of it before the lane's next slot. The first
backward stage computes forward, loss and backward of its layers, micro-batch by micro-batch, so
the pass turns without a wait and these layers are not recomputed.

On one lane nothing has to be balanced, so stages are as large as memory allows: fewer stages mean
fewer transfers, and a large first backward stage means less recomputation. On several lanes slots
of equal time leave none of them waiting; forward and backward are cut apart, since a backward
layer with its recomputation takes about three times a forward one. Pure integers and floats.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stageline.streaming.host_weights import HostWeights, offsets

MOST_CANDIDATES = 16


@dataclass(frozen=True)
class Plan:
    """The cut of one pass.

    Attributes:
        forward: ranges of layers, from the first layer to where `backward[0]` begins.
        backward: ranges from the last layer to the first; `backward[0]` runs forward too. Empty
            for a pass without gradients, whose forward ranges hold every layer.
    """

    forward: tuple[range, ...]
    backward: tuple[range, ...]

    @property
    def num_slots(self) -> int:
        return len(self.forward) + len(self.backward)

    def check(self, num_layers: int) -> None:
        """Refuse a plan that leaves a layer out or runs it twice.

        Raises:
            ValueError: names the first layer that is wrong.
        """
        turn = self.backward[0].start if self.backward else num_layers
        last = num_layers if self.backward else 0
        for kind, ranges, end in (
            ("forward", self.forward, turn),
            ("backward", self.backward[::-1], last),
        ):
            layers = [layer for stage in ranges for layer in stage]
            if layers != list(range(end)) or not all(ranges):
                wrong = next((i for i, layer in enumerate(layers) if i != layer), len(layers))
                raise ValueError(
                    f"layer {min(wrong, end)}: the {kind} stages hold layers {layers}, not 0 to "
                    f"{end - 1} in order, each once; no stage may be empty"
                )


def wavefront(num_slots: int, num_lanes: int, num_microbatches: int) -> Iterator[tuple[int, int]]:
    """Yield (slot, micro-batch) in the order in which equal slots would start.

    Each comes after the same micro-batch of the slot before, after the micro-batch before of the
    same slot, and after all of the lane's slot before. Among equal starts the earlier slot comes
    first: others wait for it.
    """
    starts = start_times([1.0] * num_slots, num_lanes, num_microbatches)
    order = [(time, slot, part) for slot, own in enumerate(starts) for part, time in enumerate(own)]
    return ((slot, part) for _, slot, part in sorted(order))


def start_times(times: Sequence[float], num_lanes: int, num_microbatches: int) -> list[list[float]]:
    """Return the start of each micro-batch of each slot; `times` are those of one micro-batch."""
    starts: list[list[float]] = []
    for slot, time in enumerate(times):
        free = starts[slot - num_lanes][-1] + times[slot - num_lanes] if slot >= num_lanes else 0.0
        own = []
        for part in range(num_microbatches):
            ready = starts[slot - 1][part] + times[slot - 1] if slot else 0.0
            start = max(free, ready)
            own.append(start)
            free = start + time
        starts.append(own)
    return starts


@dataclass(frozen=True)
class LayerCost:
    """Time and memory of one layer.

    Attributes:
        forward, backward: time of a micro-batch, in any unit; backward without recomputation.
        activation_bytes: bytes of a micro-batch that its backward pass keeps.
    """

    forward: float
    backward: float
    weight_bytes: int
    gradient_bytes: int = 0
    activation_bytes: int = 0

    @property
    def backward_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.activation_bytes


def choose(
    costs: Sequence[LayerCost],
    *,
    num_lanes: int,
    num_microbatches: int,
    budget: int | None = None,
) -> Plan:
    """Return the plan with the least time by `start_times`, and then the fewest slots.

    Args:
        budget: bytes of a device; a stage gets half of it, because the next one is fetched
            while it runs. None: no limit.

    Raises:
        ValueError: a single layer does not fit.
    """
    room = None if budget is None else budget // 2
    for number, cost in enumerate(costs):
        if room is not None and cost.backward_bytes > room:
            raise ValueError(
                f"layer {number} needs {cost.backward_bytes:,} bytes on the device and at most "
                f"{room:,} are free, half of the budget. Allow more memory."
            )
    if num_lanes == 1:
        return _cut(costs, room, limit=float("inf"), is_even=False)

    def takes(plan: Plan) -> tuple[float, int]:
        times = slot_times(plan, costs)
        starts = start_times(times, num_lanes, num_microbatches)
        end = max(own[-1] + time for own, time in zip(starts, times, strict=True))
        return end, plan.num_slots

    # candidates for the longest slot: shares of the whole, at least its longest layer
    both = [cost.forward + cost.backward for cost in costs]
    whole, longest = sum(both) + sum(cost.forward for cost in costs), max(both)
    most = max(num_lanes, min(int(whole / longest) if longest else 1, 4 * len(costs)))
    step = max(1, -(-(most - num_lanes + 1) // MOST_CANDIDATES))
    limits = {max(longest, whole / slots) for slots in range(num_lanes, most + 1, step)}
    plans = [_cut(costs, room, limit=limit, is_even=True) for limit in sorted(limits | {longest})]
    return min(plans, key=takes)


def slot_times(plan: Plan, costs: Sequence[LayerCost]) -> list[float]:
    """Time of one micro-batch in each slot; backward stages but the first recompute."""
    both = [cost.forward + cost.backward for cost in costs]
    forward = [sum(costs[layer].forward for layer in stage) for stage in plan.forward]
    return forward + [sum(both[layer] for layer in stage) for stage in plan.backward]


def _cut(costs: Sequence[LayerCost], room: int | None, *, limit: float, is_even: bool) -> Plan:
    """Return few stages within the limits of time and memory, evened out where lanes share them."""
    both = [cost.forward + cost.backward for cost in costs]
    backward_bytes = [cost.backward_bytes for cost in costs]
    # from the last layer on, so that the first backward stage is a full one
    backward = _pack(both[::-1], backward_bytes[::-1], limit, room, is_even)
    last = len(costs)
    stages = tuple(range(last - part.stop, last - part.start) for part in backward)
    turn = stages[0].start
    times = [cost.forward for cost in costs[:turn]]
    weights = [cost.weight_bytes for cost in costs[:turn]]
    return Plan(tuple(_pack(times, weights, limit, room, is_even)), stages)


def _pack(
    times: Sequence[float],
    sizes: Sequence[int],
    limit: float,
    room: int | None,
    is_even: bool,
) -> list[range]:
    """The fewest ranges within both bounds; even: with the least longest time of those."""
    stages = _greedy(times, sizes, limit, room)
    if not is_even or len(stages) <= 1:
        return stages
    low, high = max(times), min(limit, sum(times))
    for _ in range(40):
        middle = (low + high) / 2
        if len(_greedy(times, sizes, middle, room)) <= len(stages):
            high = middle
        else:
            low = middle
    return _greedy(times, sizes, high, room)


def _greedy(
    times: Sequence[float], sizes: Sequence[int], limit: float, room: int | None
) -> list[range]:
    stages: list[range] = []
    start, time, size = 0, 0.0, 0
    for number, (its_time, its_size) in enumerate(zip(times, sizes, strict=True)):
        is_full = time + its_time > limit * (1 + 1e-12) or (
            room is not None and size + its_size > room
        )
        if number > start and is_full:
            stages.append(range(start, number))
            start, time, size = number, 0.0, 0
        time, size = time + its_time, size + its_size
    if len(times) > start:
        stages.append(range(start, len(times)))
    return stages


def costs_of(hosted_layers: Sequence[HostWeights]) -> list[LayerCost]:
    """A cost a layer before anything was timed: work grows with the weights, activations are 0."""
    costs = []
    for hosted in hosted_layers:
        parameters = [home.parameter for home in hosted.homes]
        _, weight_bytes = offsets([*parameters, *hosted.buffers])
        _, gradient_bytes = offsets([each for each in parameters if each.requires_grad])
        work = float(max(weight_bytes, 1))
        costs.append(LayerCost(work, 2 * work, weight_bytes, gradient_bytes))
    return costs
