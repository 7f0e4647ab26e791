"""Chooses a plan from what layers cost. Pure integers and floats: measures nothing.

On one lane nothing has to be balanced, so stages are as large as memory allows: fewer stages mean
fewer transfers, and a large first backward stage means less recomputation. On several lanes slots
of equal time leave none of them waiting; forward and backward are cut apart, since a backward
layer with its recomputation takes about three times a forward one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stageline.streaming.plan import Plan, start_times

MOST_CANDIDATES = 16


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes.

    Attributes:
        forward, backward: time of a micro-batch, in any unit; backward without recomputation.
        weight_bytes: on the device while it runs.
        gradient_bytes: the same of its gradients; 0 of a frozen layer.
        activation_bytes: of a micro-batch, what its backward pass keeps.
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
    hand_over: float = 0.0,
) -> Plan:
    """The plan that takes least time by `start_times`; of equal ones that with fewest slots.

    Args:
        budget: bytes of a device; a stage gets half of it, because the next one is fetched
            while it runs. None: no limit.

    Raises:
        ValueError: one layer alone does not fit.
    """
    room = None if budget is None else budget // 2
    _check_room(costs, room)
    if num_lanes == 1:
        return _cut(costs, room, limit=float("inf"), parts=None)
    best: tuple[float, int, Plan] | None = None
    for limit in _limits(costs, num_lanes):
        plan = _cut(costs, room, limit=limit, parts=num_lanes)
        times = slot_times(plan, costs)
        starts = start_times(times, num_lanes, num_microbatches, hand_over=hand_over)
        end = max(own[-1] + time for own, time in zip(starts, times, strict=True))
        if best is None or (end, plan.num_slots) < best[:2]:
            best = (end, plan.num_slots, plan)
    assert best is not None
    return best[2]


def slot_times(plan: Plan, costs: Sequence[LayerCost]) -> list[float]:
    """Time of one micro-batch in each slot; backward stages but the first recompute."""
    both = [cost.forward + cost.backward for cost in costs]
    forward = [sum(costs[layer].forward for layer in stage) for stage in plan.forward]
    return forward + [sum(both[layer] for layer in stage) for stage in plan.backward]


def _check_room(costs: Sequence[LayerCost], room: int | None) -> None:
    for number, cost in enumerate(costs):
        if room is not None and cost.backward_bytes > room:
            raise ValueError(
                f"layer {number} needs {cost.backward_bytes:,} bytes on the device (weights, "
                f"gradients, activations of a micro-batch); at most {room:,} were expected, half "
                "of the budget, because the next stage is fetched while one runs: allow more "
                "memory, or use smaller micro-batches"
            )


def _limits(costs: Sequence[LayerCost], num_lanes: int) -> list[float]:
    """Candidates for the longest slot: shares of the whole, at least its longest layer."""
    both = [cost.forward + cost.backward for cost in costs]
    whole = sum(both) + sum(cost.forward for cost in costs)
    longest = max(both)
    most = max(num_lanes, min(int(whole / longest) if longest else 1, 4 * len(costs)))
    step = max(1, -(-(most - num_lanes + 1) // MOST_CANDIDATES))
    limits = {max(longest, whole / slots) for slots in range(num_lanes, most + 1, step)}
    return sorted(limits | {longest})


def _cut(costs: Sequence[LayerCost], room: int | None, *, limit: float, parts: int | None) -> Plan:
    """Few stages within the time limit and the room, evened out where `parts` lanes share them."""
    both = [cost.forward + cost.backward for cost in costs]
    backward_bytes = [cost.backward_bytes for cost in costs]
    is_even = parts is not None
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
    fits: Callable[[float], list[range]] = lambda most: _greedy(times, sizes, most, room)  # noqa: E731
    stages = fits(limit)
    if not is_even or len(stages) <= 1:
        return stages
    low, high = max(times), min(limit, sum(times))
    for _ in range(40):
        middle = (low + high) / 2
        if len(fits(middle)) <= len(stages):
            high = middle
        else:
            low = middle
    return fits(high)


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
