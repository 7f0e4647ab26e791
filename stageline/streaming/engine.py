"""RoundPipe: trains a model whose weights stay in host memory and stream through the devices.

The idea is that of RoundPipe (Luo et al. 2026, arXiv 2604.27085): devices are a pool without
state, stage k of a pass runs on device k mod n, so any number of stages fits any number of
devices. The model's parameters stay where they are; what a device holds is dropped after use.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from stageline.device import generators_kept, is_accelerator
from stageline.streaming.host_weights import (
    Home,
    HostWeights,
    all_homes,
    check_host_memory,
    make_host_weights,
    make_pages,
    update,
)
from stageline.streaming.lanes import Lane, Mark, OptimizerThread, default_lanes
from stageline.streaming.passes import (
    Flow,
    LossFn,
    Pass,
    PassPart,
    bring,
    can_have,
    on_host,
    on_tensors,
    tensors_of,
)
from stageline.streaming.plan import Plan, choose, costs_of
from stageline.streaming.run_config import (
    RoundPipeRunConfig,
    merge_outputs,
    place_of_call,
    split_inputs,
    split_label,
)

_OWN = "_own_names"


class StreamedModel(nn.Module):
    """A wrapper that passes for the model inside, whose weights one optimizer thread updates.

    The wrapped model is not a submodule, so names of parameters and of the state are those of the
    model. Attributes set in the constructor of the wrapper are its own; later ones go to the model.

    Attributes:
        _forwards_to: models that attributes are looked up in, the first one that has it; the last
            is the one that was wrapped. `_forward_to` sets them, and ends the making.
    """

    _forwards_to: tuple[nn.Module, ...]

    def __init__(self, optim_dtype: torch.dtype | None, name: str | None) -> None:
        super().__init__()
        self._name = name or place_of_call()
        self._optim_dtype = optim_dtype
        self._worker = OptimizerThread(f"optimizer of {self._name}")
        self._turn_pages = False  # a finished step has new values on the back pages
        self._last_step: Future | None = None

    def _forward_to(self, *models: nn.Module) -> None:
        self.__dict__["_forwards_to"] = models
        self.__dict__["training"] = models[0].training
        self.__dict__.setdefault(_OWN, frozenset({*self.__dict__, _OWN}))

    def __getattr__(self, name: str) -> Any:
        for model in self.__dict__.get("_forwards_to", ()):
            try:
                return getattr(model, name)
            except AttributeError:
                continue
        raise AttributeError(f"neither {type(self).__name__} nor its model has {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__.get(_OWN)
        if own is None:
            super().__setattr__(name, value)
            return
        if name in own:
            self.__dict__[name] = value
        if name not in own or name == "training":
            # the layers have a mode too; any other value belongs to the original model
            for model in self._forwards_to if name == "training" else self._forwards_to[:1]:
                setattr(model, name, value)

    def __delattr__(self, name: str) -> None:
        for model in self._forwards_to:
            if hasattr(model, name):
                return delattr(model, name)
        raise AttributeError(f"neither {type(self).__name__} nor its model has {name!r}")

    def train(self, mode: bool = True) -> Any:
        self.__dict__["training"] = mode
        for model in self._forwards_to:
            model.train(mode)
        return self

    def named_modules(
        self, memo: set | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        return self._forwards_to[0].named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._forwards_to[0].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model; the optimizer continues from these values."""
        loaded = self._forwards_to[0].load_state_dict(*args, **kwargs)
        self._values_changed()
        return loaded

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """Load this part of a larger model that loads its state."""
        for name, module in self._forwards_to[0].named_modules():
            inner = f"{prefix}{name}." if name else prefix
            module._load_from_state_dict(state_dict, inner, *args)
        self._values_changed()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Accept what changes no tensor, such as `to` with the device and dtype of the model."""
        model = self._forwards_to[0]
        if all(fn(tensor) is tensor for tensor in (*model.parameters(), *model.buffers())):
            return self
        raise RuntimeError(
            f"{type(self).__name__} cannot be moved or cast: its weights stay on the host. Cast "
            "the model before it is wrapped."
        )

    def _homes(self) -> list[Home]:
        """Every parameter, once."""
        raise NotImplementedError

    def _make_masters(self) -> None:
        """Give each trained parameter a copy for the optimizer, and a second page."""
        raise NotImplementedError

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's copies of the trained parameters, in `optim_dtype`."""
        return (parameter for _, parameter in self.optim_named_parameters())

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield `optim_parameters` with the names that they have in the model."""
        self._make_masters()
        masters = {id(home.parameter): master for home, master in self._updated()}
        model = self._forwards_to[0]
        for name, parameter in model.named_parameters(prefix, remove_duplicate=remove_duplicate):
            if id(parameter) in masters:
                yield name, masters[id(parameter)]

    def step(
        self, step_fn: Callable[..., None], is_async: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Run `step_fn(*args, **kwargs)` on the summed gradients in a thread of its own.

        With V the weights that passes compute with and W those of the optimizer, V_0 = W_0:
        W_(t+1) = update(W_t, gradients at V_t). Synchronous: V_(t+1) = W_(t+1), and this waits.
        Asynchronous: V_(t+1) = W_t, one step stale, so steps 0 and 1 both use W_0; this waits for
        the step before only.

        `step_fn` touches the optimizer's parameters, their `.grad`, and nothing else of the model.
        What it raises is raised here, or by the next call if it is asynchronous.
        """
        self._make_masters()
        self._take_shown_gradients()
        # do not wait for the gradients of this step, which are on their way: devices work meanwhile
        # The back page is free, since its last readers come before these gradients
        self._worker.wait_for(self._last_step)
        self._flip()
        homes = [home for home, _ in self._updated()]
        step = functools.partial(step_fn, *args, **kwargs)
        self._last_step = self._worker.submit(functools.partial(update, homes, step))
        self._turn_pages = True
        if not is_async:
            self._worker.wait()
            self._flip()

    def synchronize(self) -> None:
        """Wait for all steps; parameters get their newest values, `.grad` the sums.

        The sums stay: the next `step` uses them. What is done to `.grad` now holds for them, so
        an optimizer of the model's own parameters, and its `zero_grad`, can be used instead.
        """
        self._take_shown_gradients()
        self._worker.wait()
        self._flip()
        for home in self._homes():
            home.show()

    def _take_shown_gradients(self) -> None:
        for home in self._homes():
            home.take_shown_gradient()

    def _values_changed(self) -> None:
        """Parameters got values from elsewhere."""
        self._worker.wait()
        self._turn_pages = False  # values that a step made of the old ones are void
        with torch.no_grad():
            for home, master in self._updated():
                master.copy_(home.parameter)

    def _flip(self) -> None:
        """Let passes compute with the values of the last step."""
        if self._turn_pages:
            for home, _ in self._updated():
                home.turn()
            self._turn_pages = False

    def _updated(self) -> list[tuple[Home, nn.Parameter]]:
        """The parameters that an optimizer updates, and its copies."""
        return [(home, home.master) for home in self._homes() if home.master is not None]


class Detour(torch.autograd.Function):
    """Joins a forward pass without a graph to autograd: its backward recomputes and streams again.

    `run_forward()` gives the output leaves, `run_backward(gradients)` the inputs' gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run_forward: Callable[[], list[Any]],
        run_backward: Callable[[tuple], list[Any]],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.run_backward = run_backward
        ctx.is_used = False
        outputs = run_forward()
        ctx.mark_non_differentiable(*(each for each in outputs if not can_have(each)))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple:
        if ctx.is_used:
            raise RuntimeError(
                "backward ran a second time through one call of RoundPipe. Call the model again."
            )
        ctx.is_used = True
        return (None, None, None, *ctx.run_backward(gradients))


@contextlib.contextmanager
def _generators_kept(run: Pass) -> Iterator[None]:
    """Leave the caller's generators as they are, where layers get seeds of their own."""
    if run.seed is None:
        yield
        return
    devices = [lane.device for lane in run.lanes]
    with generators_kept(devices):
        yield
        # the host's generator is drawn from when work is done, not when it is given
        if not any(map(is_accelerator, devices)):
            for _, mark in run.landed:
                mark.wait()


def _input_gradients(part: PassPart) -> list[torch.Tensor | None]:
    """A gradient or None for each tensor of a micro-batch's inputs."""
    rest, found = iter(_brought(part.gradients)), []
    for leaf in tensors_of(part.inputs.value):
        gradient = next(rest) if can_have(leaf) else None
        found.append(gradient if leaf.requires_grad else None)
    return found


def _brought(flow: Flow | None, device: torch.device | str | None = None) -> Any:
    """Wait for a value and return it on the device of the caller; None: on the host."""
    assert flow is not None
    here = bring(flow, None)
    here.mark.wait()
    return on_tensors(lambda each: each.to(device or each.device), here.value)


def _summed(losses: Sequence[Any]) -> Any:
    """Micro-batches' losses added up; of sequences loss by loss."""
    if isinstance(losses[0], torch.Tensor):
        return sum(losses[1:], start=losses[0])
    return [_summed(column) for column in zip(*losses, strict=True)]


PinModel = Literal["alloc", "register", "off"]
_INHERIT = RoundPipeRunConfig()


class RoundPipe(StreamedModel):
    """A model that streams through the devices of this machine.

    Args:
        model: an nn.Sequential, a layer each child; anything else is one layer.
        optim_dtype: of the optimizer's parameters; default: the model's.
        name: for messages; default: the place of the call.
        model_run_config: settings of its calls, unless a call has its own.
        pin_model: how host memory is made fast for a GPU: `alloc` one pinned page a layer,
            `register` pins the tensors where they are, `off` leaves them, for weights that are
            mapped from files. On a CPU all three leave them.
        lanes: the devices; default: every GPU, else the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = _INHERIT,
        pin_model: PinModel = "alloc",
        *,
        lanes: Sequence[Lane] | None = None,
    ) -> None:
        super().__init__(optim_dtype, name)
        self._run_config = model_run_config
        self._lanes = default_lanes() if lanes is None else list(lanes)
        self._layers = list(model) if isinstance(model, nn.Sequential) else [model]
        self._hosted_layers = make_host_weights(self._layers)
        make_pages(self._hosted_layers, pin_model, device=self._lanes[0].device, owner=self)
        self._forward_to(model)

    def forward(
        self, *args: Any, roundpipe_run_config: RoundPipeRunConfig = _INHERIT, **kwargs: Any
    ) -> Any:
        """The model's output for a batch that is split into micro-batches.

        It joins autograd: a later `backward()` recomputes the layers, and adds the gradients of
        parameters up for `step`.
        """
        settings, run = self._begin(roundpipe_run_config, args, kwargs)
        is_trained = any(hosted.is_trained for hosted in self._hosted_layers)
        with_graph = bool(settings.requires_grad) and (is_trained or run.input_gradients)
        plan = self._plan(settings, len(run.parts), with_graph=with_graph)
        with _generators_kept(run):
            if with_graph:
                outputs = self._outputs_with_graph(run, plan, settings)
            else:
                outputs = self._outputs(run, plan.forward, (), settings)
        return merge_outputs(outputs, settings.merge_output)

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] = {},
        label: Any = None,
        loss_fn: LossFn = lambda outputs, labels: outputs,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = _INHERIT,
    ) -> Any:
        """Forward and backward of each micro-batch; their losses and gradients are summed.

        It is the loop over micro-batches of forward, `loss_fn(outputs, label)` and backward. A
        sequence of losses is differentiated as one, and summed loss by loss.

        Returns:
            The sum of losses; with `return_outputs` (that sum, merged outputs).
        """
        settings, run = self._begin(
            run_config,
            input_args,
            input_kwargs,
            label=label,
            loss_fn=loss_fn,
            keeps_outputs=return_outputs,
        )
        plan = self._plan(settings, len(run.parts), with_graph=True)
        with _generators_kept(run):
            run.forward_backward(plan)
        losses = [_brought(part.loss, settings.output_device) for part in run.parts]
        if run.input_gradients:  # hand them on to where the call's inputs come from
            leaves = [leaf for part in run.parts for leaf in tensors_of(part.inputs.value)]
            found = [gradient for part in run.parts for gradient in _input_gradients(part)]
            pairs = [pair for pair in zip(leaves, found, strict=True) if pair[1] is not None]
            if pairs:
                tensors, gradients = zip(*pairs, strict=True)
                torch.autograd.backward(tensors, gradients)
        outputs = []
        if return_outputs:
            outputs = [_brought(part.output, settings.output_device) for part in run.parts]
        self._settle(run)
        total = _summed(losses)
        return (total, merge_outputs(outputs, settings.merge_output)) if return_outputs else total

    def set_original_model(self, original_model: nn.Module) -> None:
        """Make this the model that attributes are written to, and looked up in first."""
        self._forward_to(original_model, *self._forwards_to[-1:])

    def _begin(
        self,
        config: RoundPipeRunConfig,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        label: Any = None,
        loss_fn: LossFn | None = None,
        keeps_outputs: bool = True,
    ) -> tuple[RoundPipeRunConfig, Pass]:
        """The settings of a call, and its pass."""
        self._worker.check()
        self._take_shown_gradients()
        settings = config.over(self._run_config).filled(len(self._lanes))
        assert settings.num_microbatch is not None  # `filled` gave one
        inputs = split_inputs(args, kwargs, settings.split_input, settings.num_microbatch)
        labels = [None] * len(inputs)
        if loss_fn is not None:
            labels = split_label(label, settings.split_label, len(inputs))
        return settings, Pass(
            self._hosted_layers,
            self._lanes,
            self._name,
            [PassPart(on_host(each), its) for each, its in zip(inputs, labels, strict=True)],
            seed=int(torch.randint(2**62, ())) if settings.preserve_rng_state else None,
            by_layer=settings.recompute_grain == "layer",
            input_gradients=any(leaf.requires_grad for leaf in tensors_of(inputs)),
            loss_fn=loss_fn,
            keeps_outputs=keeps_outputs,
        )

    def _outputs(
        self,
        run: Pass,
        stages: Sequence[range],
        segments: Sequence[range],
        settings: RoundPipeRunConfig,
    ) -> list[Any]:
        """Return the output of the last layer for each micro-batch, without a graph."""
        run.forward(stages, segments)
        outputs = [_brought(part.output, settings.output_device) for part in run.parts]
        self._settle(run)
        return outputs

    def _outputs_with_graph(self, run: Pass, plan: Plan, settings: RoundPipeRunConfig) -> list[Any]:
        """The same, joined to autograd."""
        kept: dict[str, Any] = {}

        def forward() -> list[Any]:
            stages = (*plan.forward, plan.backward[0])
            outputs = self._outputs(run, stages, run.segments(plan.backward), settings)
            kept["leaves"], kept["structure"] = pytree.tree_flatten(outputs)
            return tensors_of(outputs)

        def backward(gradients: tuple) -> list[Any]:
            self._worker.check()
            rest = iter(gradients)
            for part in run.parts:
                assert part.output is not None
                own = [(leaf, next(rest)) for leaf in tensors_of(part.output.value)]
                part.gradients = on_host([each for leaf, each in own if can_have(leaf)])
            with _generators_kept(run):
                run.backward(plan.backward)
            found = [gradient for part in run.parts for gradient in _input_gradients(part)]
            self._settle(run)
            return found

        inputs = [leaf for part in run.parts for leaf in tensors_of(part.inputs.value)]
        anchor = torch.zeros((), requires_grad=True)  # the inputs may need no gradients
        made = iter(Detour.apply(forward, backward, anchor, *inputs))
        leaves = [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in kept["leaves"]]
        return pytree.tree_unflatten(leaves, kept["structure"])

    def _plan(self, settings: RoundPipeRunConfig, num_parts: int, *, with_graph: bool) -> Plan:
        plan = settings.execute_plan
        if plan is None:
            plan = choose(
                costs_of(self._hosted_layers),
                num_lanes=len(self._lanes),
                num_microbatches=num_parts,
                budget=self._lanes[0].pool.budget,
            )
        plan.check(len(self._layers))
        if with_graph or not plan.backward:
            return plan
        return Plan((*plan.forward, plan.backward[0]), ())

    def _settle(self, run: Pass) -> None:
        """Let the worker add up the gradients that are on their way; wait for buffers."""
        for seat, mark in run.landed:
            if not seat.is_recomputed and any(hosted.buffers for hosted in seat.hosted_layers):
                mark.wait()
            for hosted, home in seat.sent:
                job = functools.partial(_collect, seat.used, hosted, home, mark, self._optim_dtype)
                hosted.collected = self._worker.submit(job)
        run.landed.clear()

    def _make_masters(self) -> None:
        if not self._updated():  # not yet
            check_host_memory(self._hosted_layers, self._optim_dtype)
        for hosted in self._hosted_layers:
            hosted.make_masters(self._optim_dtype)

    def _homes(self) -> list[Home]:
        return all_homes(self._hosted_layers)


def _collect(
    used: set[int], hosted: HostWeights, home: Home, mark: Mark, dtype: torch.dtype | None
) -> None:
    mark.wait()
    if id(home.parameter) in used:  # else no layer made one
        home.collect(hosted.staged[id(home.parameter)], dtype)
