"""What the parts of a model cost, and what a stage made of them costs. Pure arithmetic.

An item is what is never split: all that comes before the layers (embedding, vision tower,
projector), each layer, and all that comes behind them (final norm, head, loss).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol

import torch

from stageline.pipeline.live_bytes import tensor_bytes
from stageline.pipeline.plan import GradFlow, Kind, grad_flow


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
    trains: bool = False

    def __add__(self, other: "Cost") -> "Cost":
        """Both on one stage, this one first.

        Passes come one after the other, so the larger transient counts; that of the first item
        comes when the other one has not saved yet, or is through with its backward pass.
        """
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return Cost(
            **sums,
            transient=max(self.transient - other.saved, other.transient),
            trains=self.trains or other.trains,
        )

    def seconds(self, *, splits_backward: bool = False) -> float:
        """The least that forward and backward pass of a micro-batch take.

        Also where a schedule parts it, the backward pass of a stage that sends no gradient is one.
        """
        split = self.input_grad + self.weight_grad
        return self.forward + (min(split, self.backward) if splits_backward else self.backward)


_SUMMED = [item.name for item in fields(Cost) if item.name not in ("transient", "trains")]


# Between two processes of one machine; assumed, not measured: enough to tell apart ways to run
# whose passes take the same time, of which the one with fewer hand-overs is faster.
LATENCY_SECONDS = {"cpu": 1e-3, "cuda": 2e-5}
BYTES_PER_SECOND = {"cpu": 1e9, "cuda": 2e10}


def hand_over_seconds(device_type: str, num_bytes: int) -> float:
    """What a tensor takes from a rank to the next, roughly."""
    kind = device_type if device_type in LATENCY_SECONDS else "cuda"
    return LATENCY_SECONDS[kind] + num_bytes / BYTES_PER_SECOND[kind]


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
        is_measured: False for an estimate, which has no seconds.
        hand_over: seconds from a rank to the next.
        front: what `first` is, for people.
    """

    overhead: Cost
    first: Cost
    layers: tuple[Cost, ...]
    last: Cost
    tied: Cost
    border: int
    batch: int
    shape: tuple[int, int]
    is_measured: bool = True
    hand_over: float = 0.0
    front: str = "embedding"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def stage(self, start: int, end: int) -> Cost:
        """Of a stage with layers `start` to `end` - 1, and what belongs to it at either end."""
        return self._stages[start, end]

    def stages(self, partition: Sequence[int]) -> list[Cost]:
        """Of all stages of a partition."""
        found, start = [], 0
        for count in partition:
            found.append(self.stage(start, start + count))
            start += count
        return found

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
    durations: dict[tuple[int, Kind], float] = {}
    for index, stage in enumerate(stages):
        durations[index, Kind.FORWARD] = stage.forward
        durations[index, Kind.BACKWARD] = stage.backward
        durations[index, Kind.INPUT_GRAD] = stage.input_grad
        durations[index, Kind.WEIGHT_GRAD] = stage.weight_grad
    return durations


# -- how many bytes cross the border behind a stage. Pure arithmetic on shapes --------------------


class Sender(Protocol):
    """What is asked of a stage model."""

    def get_example_output(
        self, micro_batch_size: int, max_token_num: int
    ) -> tuple[torch.Tensor, ...]: ...


def border_bytes(stage_model: Sender, shapes: Iterable[tuple[int, int]]) -> list[int]:
    """Bytes that this stage sends on, forward, for each micro-batch; the gradient is as large.

    Zero for the last stage. What does not cross is not counted: ids, masks, positions, labels.

    Args:
        shapes: (rows, tokens) of each micro-batch: the shape of its input_ids.
    """
    return [tensor_bytes(stage_model.get_example_output(*shape)) for shape in shapes]
