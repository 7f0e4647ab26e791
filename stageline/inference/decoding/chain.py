"""The stages in a row: orders go in at the first one and come back, carried out, in their order."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from stageline.inference.decoding.order import Order
from stageline.inference.decoding.stage_decoder import StageDecoder
from stageline.inference.decoding.stage_group import Tensors
from stageline.inference.decoding.wire import IDLE, Wire


class Chain(Protocol):
    """What the engine needs of the stages.

    Attributes:
        num_stages: how many there are.
        num_in_flight: orders that have not come back.
    """

    num_stages: int
    num_in_flight: int

    def start(self, order: Order, tensors: Tensors) -> None:
        """Runs the first stage and hands the order on."""

    def result(self) -> Order:
        """Waits for the oldest order that has not come back."""


class LocalChain:
    """All stages in this process, one after the other: one stage, and tests of many."""

    def __init__(self, decoders: Sequence[StageDecoder]) -> None:
        self.decoders = decoders
        self.num_stages = len(decoders)
        self._done: deque[Order] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._done)

    def start(self, order: Order, tensors: Tensors) -> None:
        for decoder in self.decoders:
            tensors = decoder.run(order, tensors)
        self._done.append(order)

    def result(self) -> Order:
        return self._done.popleft()


class RankChain:
    """A stage on each rank of a pipeline; this is the first one's.

    Args:
        decoder: the first stage.
    """

    def __init__(self, decoder: StageDecoder, wire: Wire, *, num_stages: int) -> None:
        self.decoder, self.wire = decoder, wire
        self.num_stages = num_stages
        self.num_in_flight = 0

    def start(self, order: Order, tensors: Tensors) -> None:
        tensors = self.decoder.run(order, tensors)
        self.wire.send(1, order, tensors)
        self.num_in_flight += 1

    def result(self) -> Order:
        order, _ = self.wire.receive(self.num_stages - 1)
        self.num_in_flight -= 1
        return order


def follow(decoder: StageDecoder, wire: Wire, *, num_stages: int) -> None:
    """What the other ranks do: each order's part, until the order to stop has gone by."""
    target = (wire.rank + 1) % num_stages
    kind = ""
    while kind != "stop":
        order, tensors = wire.receive(wire.rank - 1)
        kind = order.kind
        wire.send(target, order, decoder.run(order, tensors))
    wire.flush()


def max_in_flight(num_stages: int) -> int:
    """Orders on their way at a time: each stage has one, and the next ones wait before it."""
    return 2 * num_stages + 2


def make_wire(rank: int, *, num_stages: int, num_replicas: int = 1, device: torch.device) -> Wire:
    """The wire of this process's pipeline; all processes of the run must call this together.

    Args:
        rank: of this process among all: replicas one after the other, stages in order.
    """
    groups = []
    for replica in range(num_replicas):
        ranks = list(range(replica * num_stages, (replica + 1) * num_stages))
        texts = dist.new_group(ranks, backend="gloo", timeout=IDLE)
        on_gpu = device.type != "cpu"
        groups.append((texts, dist.new_group(ranks, timeout=IDLE) if on_gpu else texts))
    texts, tensors = groups[rank // num_stages]
    return Wire(
        rank % num_stages,
        texts=texts,
        tensors=tensors,
        device=device,
        num_kept=max_in_flight(num_stages),
    )
