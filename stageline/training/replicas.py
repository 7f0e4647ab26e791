"""The replicas of a pipeline, seen from one rank: what they add up, and what must be equal.

Each replica has all weights and its own samples. Gradients are added up once an optimizer step.
Not here: replicas that share their weights out among them (`sharding.py`).
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from stageline.distributed.board import connect_store
from stageline.errors import UserError
from stageline.training.precision import MasterWeights

Number = TypeVar("Number", int, float)
_BEHIND = 1000  # steps; none is loaded so late
BUCKET_BYTES = 64 * 2**20  # large enough to be fast, small beside the weights
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LargestOfReplicas:
    """The largest of a number that each replica has of a step, for data workers.

    They have no process group, so it goes through the store that the ranks met at; each process
    connects by itself. Every rank of a replica has the same number.

    Args:
        name: the same on all ranks, and of no other loader or earlier start.
        seconds: to wait for the other replicas.
    """

    def __init__(self, name: str, *, rank: int, size: int, seconds: float) -> None:
        self._name = name
        self._rank = rank
        self._size = size
        self._seconds = seconds
        self._store: tuple[int, dist.Store] | None = None

    def __call__(self, step: int, number: int) -> int:
        if self._store is None or self._store[0] != os.getpid():  # forked
            own = connect_store()
            own.set_timeout(timedelta(seconds=self._seconds))
            self._store = os.getpid(), own
        store = self._store[1]
        store.set(self._key(step, self._rank), str(number))
        store.delete_key(self._key(step - _BEHIND, self._rank))
        return max(int(store.get(self._key(step, rank))) for rank in range(self._size))

    def _key(self, step: int, rank: int) -> str:
        return f"stageline/{self._name}/{step}/{rank}"


class Replicas:
    """The ranks that hold the same stages.

    Args:
        group: they, in order; None: there is one replica.
        device: where tensors lie that are sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.device = device

    def sum(self, values: Sequence[Number]) -> list[Number]:
        """Adds numbers up over the replicas; integers stay exact."""
        if self.size == 1:
            return list(values)
        is_exact = all(isinstance(value, int) for value in values)
        dtype = torch.int64 if is_exact else torch.float64
        totals = torch.tensor(values, dtype=dtype, device=self.device)
        dist.all_reduce(totals, group=self.group)
        return totals.tolist()

    def gather(self, value: Any) -> list[Any]:
        """What each replica gave, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def check_equal(self, models: Iterable[nn.Module]) -> None:
        """Compares the start of all replicas by checksums of every parameter.

        Raises:
            UserError: they differ.
        """
        if self.size == 1:
            return
        own = {
            name: bit_sum(parameter).item()
            for model in models
            for name, parameter in model.named_parameters()
        }
        first, *others = self.gather(own)
        for rank, other in enumerate(others, start=1):
            wrong = [name for name in first if other.get(name) != first[name]]
            if wrong or len(first) != len(other):
                raise UserError(
                    f"replica {rank} starts with other weights than replica 0 ({len(wrong)} of "
                    f"{len(first)} parameters, such as {', '.join(wrong[:3])}); the same ones were "
                    "expected, because only gradients are exchanged. Give every machine the same "
                    "`model_path` and the same versions of torch and transformers."
                )

    def end_weight_pass(self, model: nn.Module) -> None:
        """Called behind each backward pass that computed a stage's weight gradients alone."""

    def reduce_gradients(self, weights: MasterWeights) -> None:
        """Adds up the gradients of all replicas; called once a step, after all backward passes."""
        self._sum_gradients(list(weights.parameters.values()))

    def _sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.size == 1 or not parameters:
            return
        anywhere = self._any([parameter.grad is not None for parameter in parameters])
        grads = []
        for parameter, is_there in zip(parameters, anywhere, strict=True):
            if not is_there:
                continue  # as without replicas, the optimizer leaves it alone
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
        for bucket in _buckets(grads, BUCKET_BYTES):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                dist.all_reduce(bucket[0], group=self.group)
                continue
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat, group=self.group)
            for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))

    def _any(self, flags: Sequence[bool]) -> list[bool]:
        """Which flags some replica has set."""
        shared = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return shared.bool().tolist()


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A checksum, a scalar; of the bits, so that NaN equals itself."""
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def _buckets(grads: Sequence[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype, together at most `max_bytes`; a larger tensor is alone."""
    bucket: list[torch.Tensor] = []
    size = 0
    for grad in grads:
        if bucket and (size + grad.nbytes > max_bytes or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.nbytes
    if bucket:
        yield bucket
