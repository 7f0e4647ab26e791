"""Replicas that share weights, gradients and optimizer state out among them: FSDP2.

Between steps each rank holds its share of every weight, and updates only that. In a step a stage's
weights are put together before its first forward pass and kept to the end, whatever the number of
micro-batches; gradients add up whole, and are reduced and shared out once, after the last backward
pass. That is one all-gather and one reduce-scatter for each layer and step.

Mixed precision is FSDP's: what trains is kept in float32 and computed with in the half type, so a
share is its own master; gradients are summed in float32.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stageline.checkpoint.optimizer_state import RowRange
from stageline.pipeline.runner import LocalStages
from stageline.stage import Stage
from stageline.training.precision import HALF_TYPES, MasterWeights
from stageline.training.replicas import Replicas


class ShardedReplicas(Replicas):
    """Shares out the stages of this rank, in place; give it the filled models before the runner.

    Some parameters stay whole on every replica, and their gradients are added up as without
    sharding: scalars, parameters of a half-precision model that are float32 by design, and a weight
    that two stages of this rank share.

    Args:
        models: the stages; `model.modules_to_shard()`, where there is one, gives the modules whose
            weights are sent on their own.
        mesh: the replicas, one axis.
    """

    def __init__(self, models: Sequence[Stage], *, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(mesh.get_group(), device=device)
        self.models = list(LocalStages(models))
        kept_whole = _kept_whole(self.models)
        for model in self.models:
            _shard(model, mesh, kept_whole)
        self._trained = [parameter for model in self.models for parameter in _put_together(model)]
        self._touched: set[nn.Parameter] = set()
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._touched.add)

    @torch.no_grad()
    def end_weight_pass(self, model: nn.Module) -> None:
        """Adds the gradients up in float32 before the next pass adds to them in the half type."""
        _end_backward(model)

    @torch.no_grad()
    def reduce_gradients(self, weights: MasterWeights) -> None:
        """Reduces and shares out the gradients; takes the stages apart again."""
        self._fill_missing()
        for model in self.models:
            _reduce(cast(FSDPModule, model))
        weights.take_shares()
        self._sum_gradients([p for n, p in weights.parameters.items() if n not in weights.shares])

    def _fill_missing(self) -> None:
        """Gives a zero gradient to what only other replicas have one for: all must send the same.

        A tower that met no picture on this replica, for example.
        """
        if not self._trained:
            return
        touched = [parameter in self._touched for parameter in self._trained]
        for parameter, is_here, is_anywhere in zip(
            self._trained, touched, self._any(touched), strict=True
        ):
            if is_anywhere and not is_here:
                parameter.grad = torch.zeros_like(parameter)
        self._touched.clear()


def share_rows(weights: MasterWeights) -> dict[str, RowRange]:
    """Which rows of its parameters this rank holds, of those that are shared out."""
    rows = {}
    for name in weights.shares:
        parameter = weights.model_parameters[name]
        shape, mesh = tuple(parameter.shape), cast(DTensor, parameter).device_mesh
        # FSDP cuts as torch.chunk does: equal parts, the last ones smaller or empty
        start = min(mesh.get_local_rank() * -(-shape[0] // mesh.size()), shape[0])
        rows[name] = RowRange(start, weights.parameters[name].shape[0], shape)
    return rows


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules of a stage that are sent apart from each other, the stage itself first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _kept_whole(models: Sequence[Stage]) -> set[nn.Parameter]:
    kept = set()
    seen: dict[nn.Parameter, nn.Module] = {}
    for model in models:
        dtype = getattr(model, "dtype", torch.float32)
        for parameter in model.parameters():
            is_shared = seen.setdefault(parameter, model) is not model
            is_wider = dtype in HALF_TYPES and parameter.dtype not in HALF_TYPES
            if parameter.ndim == 0 or is_wider or is_shared:
                kept.add(parameter)
    return kept


def _shard(model: Stage, mesh: DeviceMesh, kept_whole: set[nn.Parameter]) -> None:
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
    _set_last(cast(FSDPModule, model), False)


def _set_last(model: FSDPModule, is_last: bool) -> None:
    model.set_is_last_backward(is_last)
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


def _put_together(model: nn.Module) -> list[nn.Parameter]:
    """The whole parameters that passes use and that train; FSDP keeps these objects for good."""
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    for module in sharded_modules(model):
        module.unshard()
    named = dict(model.named_parameters())
    for module in sharded_modules(model):
        module.reshard()
    return [named[name] for name in sharded if named[name].requires_grad]


def _reduce(model: FSDPModule) -> None:
    module = cast(nn.Module, model)
    _end_backward(module)  # brings zeros that were filled in to the type of the other sums
    _set_last(model, True)
    _end_backward(module)
    _set_last(model, False)


def _end_backward(model: nn.Module) -> None:
    # autograd calls this at the end of each backward pass, but for those of the weights alone.
    # torch's own pipeline calls it so too
    state = fully_shard.state(model)  # type: ignore[attr-defined]  # a decorator of torch's adds it
    state._root_post_backward_final_callback()
