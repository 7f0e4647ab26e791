"""The replicas of a pipeline, seen from one rank: sums, gathers, and equal starts.

Each replica has its own samples, and all weights (`Replicas`) or a share of them
(`ShardedReplicas`, by FSDP2). Gradients are summed once an optimizer step.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stageline.checkpoint.optimizer_state import RowRange
from stageline.errors import UserError
from stageline.pipeline.runner import LocalStages
from stageline.stage import Stage
from stageline.training.precision import HALF_TYPES, MasterWeights

Number = TypeVar("Number", int, float)
BUCKET_BYTES = 64 * 2**20  # large enough to be fast, small next to the weights
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """The ranks of `group` that hold the same stages, in order; None: there is one replica.

    What they exchange besides gradients is on the host, which so waits for no device.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def sum(self, values: Sequence[Number]) -> list[Number]:
        """Sum numbers over the replicas; integers stay exact."""
        if self.size == 1:
            return list(values)
        is_exact = all(isinstance(value, int) for value in values)
        dtype = torch.int64 if is_exact else torch.float64
        totals = torch.tensor(values, dtype=dtype)
        dist.all_reduce(totals, group=self.group)
        return totals.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return what each replica gave, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def check_equal(self, models: Iterable[nn.Module]) -> None:
        """Refuse replicas that start with different weights, by checksums of every parameter."""
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
                    f"{len(first)} parameters, such as {', '.join(wrong[:3])}). Give every machine "
                    "the same `model_path`, torch and transformers."
                )

    def put_together(self) -> None:
        """Gather the whole weights until the next step ends; all replicas call this together."""

    def end_weight_pass(self, model: nn.Module) -> None:
        """Called after each backward pass that computed only a stage's weight gradients."""

    def reduce_gradients(self, weights: MasterWeights) -> None:
        """Sum the gradients of all replicas; called once a step, after all backward passes."""
        self._sum_gradients(list(weights.parameters.values()))

    def _sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.size == 1 or not parameters:
            return
        anywhere = self._any([parameter.grad is not None for parameter in parameters])
        grads = []
        for parameter, is_there in zip(parameters, anywhere, strict=True):
            if not is_there:
                continue  # the optimizer skips it, as without replicas
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
        """Return which flags some replica has set."""
        shared = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return shared.bool().tolist()


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the bits, a scalar: NaN equals itself."""
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def _buckets(grads: Sequence[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield neighbours of one dtype, at most `max_bytes` together; a larger tensor is alone."""
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


class ShardedReplicas(Replicas):
    """Replicas that share the weights of their stages, in place; made before the runner.

    Between steps each rank holds and updates its share of every weight. In a step a stage's weights
    are gathered before its first forward pass and kept to the end; gradients are summed whole, and
    reduced and scattered after the last backward pass: one all-gather and one reduce-scatter for
    each layer and step.

    In mixed precision a share is its own float32 master, and gradients are summed in float32.
    Scalars, parameters that are float32 by design in a half-precision model, and weights that two
    stages of this rank share stay whole on every replica.

    Args:
        models: the filled stages; `model.modules_to_shard()`, if it exists, gives the modules whose
            weights are sent on their own.
        mesh: the replicas, one axis.
    """

    def __init__(self, models: Sequence[Stage], *, mesh: DeviceMesh) -> None:
        super().__init__(mesh.get_group())
        self.models = list(LocalStages(models))
        kept_whole: set[nn.Parameter] = set()
        seen: dict[nn.Parameter, nn.Module] = {}
        for model in self.models:
            is_half = getattr(model, "dtype", torch.float32) in HALF_TYPES
            for parameter in model.parameters():
                is_shared = seen.setdefault(parameter, model) is not model
                is_wider = is_half and parameter.dtype not in HALF_TYPES
                if parameter.ndim == 0 or is_wider or is_shared:
                    kept_whole.add(parameter)
        for model in self.models:
            dtype = getattr(model, "dtype", torch.float32)
            policy = MixedPrecisionPolicy()
            if dtype in HALF_TYPES:
                # the model's own casts stay as they are without sharding
                policy = MixedPrecisionPolicy(
                    param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
                )
                for parameter in model.parameters():
                    if parameter.requires_grad and parameter not in kept_whole:
                        parameter.data = parameter.data.float()
            parts = model.modules_to_shard() if hasattr(model, "modules_to_shard") else []
            for module in [*parts, model]:
                fully_shard(
                    module,
                    mesh=mesh,
                    reshard_after_forward=False,
                    mp_policy=policy,
                    ignored_params=kept_whole,
                )
            for sharded in sharded_modules(model):
                # the loss is divided by the count of the whole batch already
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)
            _set_last(model, False)
        # the whole parameters that passes train; FSDP keeps these objects for good
        self._trained: list[nn.Parameter] = []
        for model in self.models:
            names = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
            for sharded in sharded_modules(model):
                sharded.unshard()
            named = dict(model.named_parameters())
            for sharded in sharded_modules(model):
                sharded.reshard()
            self._trained += [named[name] for name in names if named[name].requires_grad]
        self._touched: set[nn.Parameter] = set()
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._touched.add)

    def put_together(self) -> None:
        modules = [module for model in self.models for module in sharded_modules(model)]
        for module in modules:
            module.reshard()  # an evaluation may have left some whole, on some replicas
        for module in modules:
            module.unshard()

    @torch.no_grad()
    def end_weight_pass(self, model: nn.Module) -> None:
        """Sum the gradients in float32 before the next pass adds to them in the half type."""
        _end_backward(model)

    @torch.no_grad()
    def reduce_gradients(self, weights: MasterWeights) -> None:
        """Reduce and scatter the gradients; shard the stages again."""
        # A zero gradient for what only other replicas have one for (a tower that met no picture on
        # this one): all must send the same
        if self._trained:
            touched = [parameter in self._touched for parameter in self._trained]
            everywhere = zip(self._trained, touched, self._any(touched), strict=True)
            for parameter, is_here, is_anywhere in everywhere:
                if is_anywhere and not is_here:
                    parameter.grad = torch.zeros_like(parameter)
            self._touched.clear()
        for model in self.models:
            _end_backward(model)  # brings zeros that were filled in to the type of the other sums
            _set_last(model, True)
            _end_backward(model)
            _set_last(model, False)
        weights.take_shares()
        self._sum_gradients([p for n, p in weights.parameters.items() if n not in weights.shares])


def share_rows(weights: MasterWeights) -> dict[str, RowRange]:
    """Return which rows of its sharded parameters this rank holds."""
    rows = {}
    for name in weights.shares:
        parameter = weights.model_parameters[name]
        shape, mesh = tuple(parameter.shape), cast(DTensor, parameter).device_mesh
        # FSDP cuts as torch.chunk does: equal parts, the last ones smaller or empty
        start = min(mesh.get_local_rank() * -(-shape[0] // mesh.size()), shape[0])
        rows[name] = RowRange(start, weights.parameters[name].shape[0], shape)
    return rows


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of a stage that are sent on their own, the stage itself first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _set_last(stage: nn.Module, is_last: bool) -> None:
    model = cast(FSDPModule, stage)
    model.set_is_last_backward(is_last)
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


def _end_backward(model: nn.Module) -> None:
    # autograd calls this after each backward pass, except those of the weights only; torch's own
    # pipeline calls it like this, too
    state = fully_shard.state(model)  # type: ignore[attr-defined]  # a decorator of torch's adds it
    state._root_post_backward_final_callback()
