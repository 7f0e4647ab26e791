"""Which layers are a stage, in which order stages and micro-batches run, and what that takes.

A pass goes through *slots*: the forward stages, then the backward stages from deep to shallow.
Slot i runs on lane i mod n, all micro-batches of it before the lane's next slot. The first
backward stage computes forward, loss and backward of its layers, micro-batch by micro-batch, so
the pass turns without a wait and these layers are not recomputed. Pure integers and floats.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Times = Sequence[float]


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
        """Refuses what leaves a layer out or runs it twice.

        Raises:
            ValueError: names the layer and the stage.
        """
        turn = self.backward[0].start if self.backward else num_layers
        _check_ranges(self.forward, 0, turn, "forward")
        _check_ranges(self.backward[::-1], 0, num_layers if self.backward else 0, "backward")


def _check_ranges(ranges: Sequence[range], first: int, last: int, kind: str) -> None:
    """In order, each layer from `first` to `last` (not in it) is in exactly one of them."""
    at = first
    for number, stage in enumerate(ranges):
        if stage.step != 1 or len(stage) == 0:
            raise ValueError(
                f"{kind} stage {number} is {stage}: one layer or more, without gaps, was expected"
            )
        if stage.start != at:
            what = "is left out" if stage.start > at else "comes twice"
            raise ValueError(
                f"layer {min(at, stage.start)} {what}: {kind} stage {number} begins at layer "
                f"{stage.start}, layer {at} was expected"
            )
        at = stage.stop
    if at != last:
        what = "is left out" if at < last else "comes twice, or there is none"
        raise ValueError(
            f"layer {min(at, last)} {what}: {kind} stages end at layer {at}, {last} was expected"
            + ("; they end where the first backward stage begins" if kind == "forward" else "")
        )


def wavefront(num_slots: int, num_lanes: int, num_microbatches: int) -> Iterator[tuple[int, int]]:
    """(slot, micro-batch) in the order in which equal slots would start.

    Each comes after the same micro-batch of the slot before, after the micro-batch before of the
    same slot, and after all of the lane's slot before. Of equal starts the earlier slot comes
    first: others wait for it.
    """
    starts = start_times([1.0] * num_slots, num_lanes, num_microbatches)
    order = [
        (starts[slot][part], slot, part)
        for slot in range(num_slots)
        for part in range(num_microbatches)
    ]
    return ((slot, part) for _, slot, part in sorted(order))


def start_times(
    times: Times,
    num_lanes: int,
    num_microbatches: int,
    *,
    hand_over: float = 0.0,
    slots_of_pass: int | None = None,
) -> list[list[float]]:
    """When each micro-batch of each slot starts.

    Args:
        times: of one micro-batch in each slot.
        hand_over: from the end of a micro-batch in one slot to where the next can start it.
        slots_of_pass: after so many slots another pass begins, which waits for lanes alone.
    """
    starts: list[list[float]] = []
    for slot, time in enumerate(times):
        free = starts[slot - num_lanes][-1] + times[slot - num_lanes] if slot >= num_lanes else 0.0
        begins_pass = slot % (slots_of_pass or len(times)) == 0
        own = []
        for part in range(num_microbatches):
            ready = 0.0 if begins_pass else starts[slot - 1][part] + times[slot - 1] + hand_over
            start = max(free, ready)
            own.append(start)
            free = start + time
        starts.append(own)
    return starts


def idle_share(
    times: Times,
    num_lanes: int,
    num_microbatches: int,
    *,
    hand_over: float = 0.0,
    num_passes: int = 1,
) -> float:
    """The share of all lanes' time that is spent waiting, from the first start to the last end.

    Passes follow each other without a wait for the one before: lanes that are free begin the
    next one. Of equal slots that are a multiple of the lanes and many micro-batches it is
    n (n - 1) / (micro-batches x slots x passes + n (n - 1)).
    """
    all_times = list(times) * num_passes
    starts = start_times(
        all_times, num_lanes, num_microbatches, hand_over=hand_over, slots_of_pass=len(times)
    )
    end = max(own[-1] + time for own, time in zip(starts, all_times, strict=True))
    busy = sum(all_times) * num_microbatches
    return 1.0 - busy / (end * num_lanes)
