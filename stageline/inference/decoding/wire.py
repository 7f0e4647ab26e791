"""Messages between the stages: an order as text, and its tensors.

The text goes over a group of the CPU, so that shapes are known before anything is received on a
GPU; tensors go over the group of the devices.
"""

import json
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stageline.inference.decoding.order import Order

BLOCK = 4096  # bytes of the first part of a text: most fit
_LENGTH = 8
IDLE = timedelta(days=365)  # a stage may wait for the next order as long as nobody asks anything


class Wire:
    """Sends and receives, in order, between the ranks of one pipeline.

    Args:
        rank: of this process within the pipeline.
        texts: group for texts, gloo.
        tensors: group for tensors; the same one on the CPU.
        device: where received tensors lie.
        num_kept: orders that may be on their way; what was sent for an order is kept until so
            many others followed, by when it has certainly arrived.
    """

    def __init__(
        self,
        rank: int,
        *,
        texts: dist.ProcessGroup,
        tensors: dist.ProcessGroup,
        device: torch.device,
        num_kept: int,
    ) -> None:
        self.rank = rank
        self.texts, self.tensors = texts, tensors
        self.device = device
        self.num_kept = num_kept
        self._sent: deque[list[tuple[Any, torch.Tensor]]] = deque()

    def send(self, target: int, order: Order, tensors: dict[str, torch.Tensor]) -> None:
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
        sent = [self._post(part, target, self.texts) for part in parts if len(part)]
        sent += [self._post(t.contiguous(), target, self.tensors) for t in tensors.values()]
        self._sent.append(sent)
        if len(self._sent) > self.num_kept:
            for work, _ in self._sent.popleft():
                work.wait()

    def flush(self) -> None:
        """Waits until all that was sent has arrived: a buffer that goes takes its message along."""
        while self._sent:
            for work, _ in self._sent.popleft():
                work.wait()

    def _post(
        self, tensor: torch.Tensor, target: int, group: dist.ProcessGroup
    ) -> tuple[Any, torch.Tensor]:
        if not tensor.numel():
            return _Done(), tensor
        return dist.isend(tensor, group=group, group_dst=target), tensor

    def receive(self, source: int) -> tuple[Order, dict[str, torch.Tensor]]:
        """Waits for the next order of a rank."""
        block = torch.empty(BLOCK, dtype=torch.uint8)
        dist.recv(block, group=self.texts, group_src=source)
        length = int.from_bytes(bytes(block[:_LENGTH].tolist()), "big")
        text = block[_LENGTH : _LENGTH + length].numpy().tobytes()
        if len(text) < length:
            rest = torch.empty(length - len(text), dtype=torch.uint8)
            dist.recv(rest, group=self.texts, group_src=source)
            text += rest.numpy().tobytes()
        words, _, kinds = text.decode().partition("\n")
        tensors = {}
        for name, dtype, shape in json.loads(kinds):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            if tensor.numel():
                dist.recv(tensor, group=self.tensors, group_src=source)
            tensors[name] = tensor
        return Order.of_json(words), tensors


class _Done:
    """What was sent where nothing had to be."""

    def wait(self) -> None:
        """It is there already."""
