"""The stages in a row: orders go in at the first one and come back, carried out, in their order."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stageline.inference.decoding.request import PassOrder
from stageline.inference.decoding.stage_decoder import StageDecoder, Tensors

BLOCK = 4096  # bytes of the first part of an order: most fit
_LENGTH = 8
IDLE = timedelta(days=365)  # a stage may wait for the next order until a request arrives


class Wire:
    """Sends and receives orders with their tensors, in order, between the ranks of one pipeline.

    Orders are on the CPU, so that shapes are known before anything is received on a GPU.

    Args:
        rank: of this process within the pipeline.
        group: the pipeline; it has gloo for the CPU also where tensors are on GPUs.
        device: where received tensors are put.
        num_kept: orders that may be on their way; what was sent for an order is kept until this
            many others followed, by when it has certainly arrived.
    """

    def __init__(
        self, rank: int, *, group: dist.ProcessGroup, device: torch.device, num_kept: int
    ) -> None:
        self.rank = rank
        self.group = group
        self.device = device
        self.num_kept = num_kept
        self._sent: deque[list[tuple[Any, torch.Tensor]]] = deque()

    def send(self, target: int, order: PassOrder, tensors: dict[str, torch.Tensor]) -> None:
        """Hands an order on; returns before it has arrived."""
        kinds = [[name, str(t.dtype)[6:], list(t.shape)] for name, t in tensors.items()]
        text = (order.as_json() + "\n" + json.dumps(kinds)).encode()
        block = torch.zeros(BLOCK, dtype=torch.uint8)
        block[:_LENGTH] = torch.frombuffer(
            bytearray(len(text).to_bytes(_LENGTH, "big")), dtype=torch.uint8
        )
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        first = content[: BLOCK - _LENGTH]
        block[_LENGTH : _LENGTH + len(first)] = first
        parts = [block, content[BLOCK - _LENGTH :].clone()]
        parts += [tensor.contiguous() for tensor in tensors.values()]
        full = [part for part in parts if part.numel()]
        self._sent.append(
            [(dist.isend(part, group=self.group, group_dst=target), part) for part in full]
        )
        self.flush(self.num_kept)

    def flush(self, num_kept: int = 0) -> None:
        """Waits until what was sent has arrived: a buffer that goes takes its message along."""
        while len(self._sent) > num_kept:
            for work, _ in self._sent.popleft():
                work.wait()

    def receive(self, source: int | None) -> tuple[PassOrder, dict[str, torch.Tensor]]:
        """Waits for the next order of a rank; None: of any."""
        block = torch.empty(BLOCK, dtype=torch.uint8)
        if source is None:
            source = dist.get_group_rank(self.group, dist.recv(block, group=self.group))
        else:
            dist.recv(block, group=self.group, group_src=source)
        length = int.from_bytes(bytes(block[:_LENGTH].tolist()), "big")
        text = block[_LENGTH : _LENGTH + length].numpy().tobytes()
        if len(text) < length:
            rest = torch.empty(length - len(text), dtype=torch.uint8)
            dist.recv(rest, group=self.group, group_src=source)
            text += rest.numpy().tobytes()
        words, _, kinds = text.decode().partition("\n")
        tensors = {}
        for name, dtype, shape in json.loads(kinds):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            if tensor.numel():
                dist.recv(tensor, group=self.group, group_src=source)
            tensors[name] = tensor
        return PassOrder.of_json(words), tensors


class LocalChain:
    """All stages in this process, one after the other: one stage, and tests of many.

    Attributes:
        num_in_flight: orders that have not come back.
    """

    def __init__(self, decoders: Sequence[StageDecoder]) -> None:
        self.decoders = decoders
        self.num_stages = len(decoders)
        self._done: deque[PassOrder] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._done)

    def start(self, order: PassOrder, tensors: Tensors) -> None:
        """Runs the first stage and hands the order on."""
        for decoder in self.decoders:
            tensors = decoder.run(order, tensors)
        self._done.append(order)

    def result(self) -> PassOrder:
        """Waits for the oldest order that has not come back."""
        return self._done.popleft()


class RankChain:
    """Stages on the ranks of a pipeline: runs those of this rank in their turn, sends orders on.

    The first rank starts orders and takes results; on the others see `follow`.

    Args:
        decoders: the stage of this rank, or its stages by number.
        route: the rank of each stage; by default a rank a stage. With several stages a rank orders
            pass it more than once.
    """

    def __init__(
        self,
        decoders: StageDecoder | Mapping[int, StageDecoder],
        wire: Wire,
        *,
        num_stages: int,
        route: Sequence[int] | None = None,
    ) -> None:
        self.decoders = decoders if isinstance(decoders, Mapping) else {wire.rank: decoders}
        self.wire, self.num_stages, self.route = wire, num_stages, route or range(num_stages)
        self.num_in_flight = 0
        self._done: deque[PassOrder] = deque()
        sources = {self.route[stage - 1] for stage in self.decoders}
        sources |= {self.route[-1]} if wire.rank == self.route[0] else set()
        sources -= {wire.rank}
        self._source = sources.pop() if len(sources) == 1 else None

    def start(self, order: PassOrder, tensors: Tensors) -> None:
        self.num_in_flight += 1
        self._carry(order, tensors)

    def result(self) -> PassOrder:
        while not self._done:
            self.carry_next()
        self.num_in_flight -= 1
        return self._done.popleft()

    def carry_next(self) -> PassOrder:
        """Do this rank's part of the next order that arrives."""
        order, tensors = self.wire.receive(self._source)
        self._carry(order, tensors)
        return order

    def _carry(self, order: PassOrder, tensors: Tensors) -> None:
        route, here = self.route, self.wire.rank
        while len(order.seconds) < len(route) and route[len(order.seconds)] == here:
            tensors = self.decoders[len(order.seconds)].run(order, tensors)
        target = route[len(order.seconds) % len(route)]
        if target == here:  # it is over, and at its home
            self._done.append(order)
        else:
            self.wire.send(target, order, tensors)


Chain = LocalChain | RankChain


def follow(
    decoders: StageDecoder | Mapping[int, StageDecoder],
    wire: Wire,
    *,
    num_stages: int,
    route: Sequence[int] | None = None,
) -> None:
    """Do this rank's part of each order until the order to stop has passed; for ranks above 0."""
    chain = RankChain(decoders, wire, num_stages=num_stages, route=route)
    has_stopped = False
    while not has_stopped:
        order = chain.carry_next()
        has_stopped = order.kind == "stop" and len(order.seconds) > max(chain.decoders)
    wire.flush()


def max_in_flight(num_stages: int) -> int:
    """Orders on their way at a time: each stage has one, and the next ones wait before it."""
    return 2 * num_stages + 2


def make_wire(rank: int, *, num_stages: int, num_replicas: int = 1, device: torch.device) -> Wire:
    """The wire of this process's pipeline; all processes of the run must call this together.

    Args:
        rank: of this process among all: replicas one after the other, stages in order.
    """
    pipelines = torch.arange(num_replicas * num_stages).view(-1, num_stages).tolist()
    group, _ = dist.new_subgroups_by_enumeration(pipelines, timeout=IDLE)
    assert group is not None  # each rank is in one of them
    return Wire(rank % num_stages, group=group, device=device, num_kept=max_in_flight(num_stages))
