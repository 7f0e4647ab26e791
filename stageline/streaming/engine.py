"""RoundPipe: trains a model whose weights stay in host memory and stream through the devices.

The idea is that of RoundPipe (Luo et al. 2026, arXiv 2604.27085): devices are a pool without
state, stage k of a pass runs on device k mod n, so any number of stages fits any number of
devices. The model's parameters stay where they are; what a device holds is dropped after use.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from stageline.streaming.call import EngineCall
from stageline.streaming.host_memory import allocate, check_host_memory, make_pages
from stageline.streaming.host_weights import Home, HostWeights, all_homes, make_shelves, update
from stageline.streaming.lanes import Lane, Mark, OptimizerThread, default_lanes
from stageline.streaming.microbatch import Inputs, merge_outputs, split_inputs, split_label
from stageline.streaming.passes import LossFn, Pass, Rules
from stageline.streaming.plan import Plan, choose, costs_of
from stageline.streaming.run_config import RoundPipeRunConfig, place_of_call

# -- lets a wrapper pass for the model inside: attributes, parameters, state, modes ---------------
# The wrapped model is no submodule, so names of parameters and of the state are those of the model.
# What the wrapper itself sets while it is made stays its own; later writes go to the model.

_OWN = "_own_names"


class ForwardsAttributes:
    """A base before nn.Module; `_forward_to` ends the making of the wrapper.

    Attributes:
        _forwards_to: models that attributes are looked up in, the first one that has it; the last
            is the one that was wrapped.
    """

    _forwards_to: tuple[nn.Module, ...]

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
        elif name in own and name != "training":
            self.__dict__[name] = value
        else:
            if name == "training":
                self.__dict__[name] = value
            for model in self._forwards_to:
                setattr(model, name, value)

    def __delattr__(self, name: str) -> None:
        having = [model for model in self._forwards_to if hasattr(model, name)]
        if not having:
            raise AttributeError(f"neither {type(self).__name__} nor its model has {name!r}")
        for model in having:
            if hasattr(model, name):
                delattr(model, name)

    def train(self, mode: bool = True) -> Any:
        """Sets the mode of the model."""
        self.__dict__["training"] = mode
        for model in self._forwards_to:
            model.train(mode)
        return self

    def named_modules(
        self, memo: set | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Those of the model, by its names."""
        return self._forwards_to[0].named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model."""
        return self._forwards_to[0].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads into the model; the optimizer goes on from what was loaded."""
        loaded = self._forwards_to[0].load_state_dict(*args, **kwargs)
        self._values_changed()
        return loaded

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """As a part of a larger model that loads its state."""
        for name, module in self._forwards_to[0].named_modules():
            inner = f"{prefix}{name}." if name else prefix
            module._load_from_state_dict(state_dict, inner, *args)
        self._values_changed()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{type(self).__name__} cannot be moved or cast: its weights live on the host and the "
            "engine keeps their place. Cast the model before it is wrapped."
        )

    def _values_changed(self) -> None:
        """Parameters got values from elsewhere."""


# -------------------------------------------------------------------------------------------------

PinModel = Literal["alloc", "register", "off"]
_INHERIT = RoundPipeRunConfig()


class RoundPipe(ForwardsAttributes, nn.Module):
    """A model that streams through the devices of this machine.

    Args:
        model: an nn.Sequential, a layer each child; anything else is one layer.
        optim_dtype: of the optimizer's parameters; default: the model's.
        name: for messages; default: the place of the call.
        model_run_config: settings of its calls, unless a call has its own.
        pin_model: how host memory is made fast for a GPU: `alloc` one pinned page a layer,
            `register` pins the tensors where they lie, `off` leaves them, for weights that are
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
        super().__init__()
        self._name = name or place_of_call()
        self._run_config = model_run_config
        self._optim_dtype = optim_dtype
        self._pin_model = pin_model
        self._lanes = list(lanes) if lanes is not None else default_lanes()
        self._layers = list(model) if isinstance(model, nn.Sequential) else [model]
        names = {id(parameter): key for key, parameter in model.named_parameters()}
        self._shelves = make_shelves(self._layers, names)
        on_gpu = self._lanes[0].device.type == "cuda"
        make_pages(self._shelves, pin_model, on_gpu=on_gpu, owner=self)
        self._worker = OptimizerThread(f"optimizer of {self._name}")
        self._turn_pages = False  # a finished step has new values on the back pages
        self._last_step: Future | None = None
        self._has_masters = False
        self._forward_to(model)

    def forward(
        self, *args: Any, roundpipe_run_config: RoundPipeRunConfig = _INHERIT, **kwargs: Any
    ) -> Any:
        """The model's output for a batch that is split into micro-batches.

        It joins autograd: a later `backward()` recomputes the layers, and adds the gradients of
        parameters up for `step`.

        Raises:
            Exception: what an earlier optimizer step raised.
        """
        settings = self._settings(roundpipe_run_config)
        assert settings.num_microbatch is not None  # `filled` gave one
        inputs = split_inputs(args, kwargs, settings.split_input, settings.num_microbatch)
        rules = self._rules(settings, inputs)
        is_trained = any(shelf.is_trained for shelf in self._shelves)
        with_graph = bool(settings.requires_grad) and (is_trained or rules.input_gradients)
        plan = self._plan(settings, len(inputs), with_graph=with_graph)
        call = self._call(settings, rules, inputs)
        if with_graph:
            outputs = call.outputs_with_graph(plan, self._worker.check)
        else:
            outputs = call.outputs(plan)
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

        Raises:
            Exception: what a layer, the loss or an earlier optimizer step raised.
        """
        settings = self._settings(run_config)
        assert settings.num_microbatch is not None  # `filled` gave one
        inputs = split_inputs(
            input_args, input_kwargs, settings.split_input, settings.num_microbatch
        )
        labels = split_label(label, settings.split_label, len(inputs))
        rules = self._rules(settings, inputs, loss_fn=loss_fn, keeps=return_outputs)
        plan = self._plan(settings, len(inputs), with_graph=True)
        call = self._call(settings, rules, inputs, labels)
        total, outputs = call.forward_backward(plan, keeps_outputs=return_outputs)
        if not return_outputs:
            return total
        return total, merge_outputs(outputs, settings.merge_output)

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's copies of the trained parameters, in `optim_dtype`."""
        return (parameter for _, parameter in self.optim_named_parameters())

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `optim_parameters`, with the names that they have in the model.

        Args:
            remove_duplicate: a parameter of several layers comes once; else under each name.
        """
        self._make_masters()
        masters = {id(home.parameter): home.master for home in all_homes(self._shelves)}
        model = self._forwards_to[0]
        for name, parameter in model.named_parameters(prefix, remove_duplicate=remove_duplicate):
            master = masters.get(id(parameter))
            if master is not None:
                yield name, master

    def step(
        self, step_fn: Callable[..., None], is_async: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Runs `step_fn(*args, **kwargs)` on the summed gradients in a thread of its own.

        With V the weights that passes compute with and W those of the optimizer, V_0 = W_0:
        W_(t+1) = update(W_t, gradients at V_t). Synchronous: V_(t+1) = W_(t+1), and this waits.
        Asynchronous: V_(t+1) = W_t, one step stale, so steps 0 and 1 both use W_0; this waits for
        the step before only.

        Args:
            step_fn: touches the optimizer's parameters, their `.grad`, and nothing else of the
                model.

        Raises:
            Exception: what this step (synchronous) or the one before raised.
        """
        self._make_masters()
        self._heed()
        # not for the gradients of this step, which are on their way: devices go on meanwhile. The
        # back page is free, since its last readers come before these gradients
        self._worker.wait_for(self._last_step)
        self._flip()
        homes = [home for home in all_homes(self._shelves) if home.master is not None]

        step = functools.partial(step_fn, *args, **kwargs)
        self._last_step = self._worker.submit(functools.partial(update, homes, step))
        self._turn_pages = True
        if not is_async:
            self._worker.wait()
            self._flip()

    def synchronize(self) -> None:
        """Waits for all steps; parameters get their newest values, `.grad` what is summed.

        The sums stay: the next `step` uses them. What is done to `.grad` now holds for them, so
        an optimizer of the model's own parameters, and its `zero_grad`, can be used instead.
        """
        self._heed()
        self._worker.wait()
        self._flip()
        for home in all_homes(self._shelves):
            home.show()

    def set_original_model(self, original_model: nn.Module) -> None:
        """Attributes are looked up in, and written to, this model first; names are its own."""
        self._forward_to(original_model, *self._forwards_to[-1:])
        names = {id(each): name for name, each in original_model.named_parameters()}
        for home in all_homes(self._shelves):
            home.name = names.get(id(home.parameter), home.name)

    def _settings(self, config: RoundPipeRunConfig) -> RoundPipeRunConfig:
        self._worker.check()
        self._heed()
        return config.over(self._run_config).filled(len(self._lanes))

    def _rules(
        self,
        settings: RoundPipeRunConfig,
        inputs: Sequence[Inputs],
        *,
        loss_fn: LossFn | None = None,
        keeps: bool = True,
    ) -> Rules:
        seed = int(torch.randint(2**62, ())) if settings.preserve_rng_state else None
        by_layer = settings.recompute_grain == "layer"
        leaves = pytree.tree_leaves(inputs)
        wanting = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        return Rules(seed, by_layer, loss_fn, keeps, input_gradients=wanting)

    def _call(
        self,
        settings: RoundPipeRunConfig,
        rules: Rules,
        inputs: Sequence[Inputs],
        labels: Sequence[Any] | None = None,
    ) -> EngineCall:
        return EngineCall(
            self._shelves,
            self._lanes,
            rules,
            inputs,
            settle=self._settle,
            output_device=settings.output_device,
            labels=labels,
        )

    def _plan(self, settings: RoundPipeRunConfig, num_parts: int, *, with_graph: bool) -> Plan:
        plan = settings.execute_plan
        if plan is None:
            plan = choose(
                costs_of(self._shelves),
                num_lanes=len(self._lanes),
                num_microbatches=num_parts,
                budget=self._lanes[0].pool.budget,
            )
        plan.check(len(self._layers))
        if with_graph or not plan.backward:
            return plan
        return Plan((*plan.forward, plan.backward[0]), ())

    def _settle(self, run: Pass) -> None:
        """Lets the worker add up the gradients that are on their way; waits for buffers."""
        for seat, mark in run.landed:
            if not seat.is_recomputed and any(shelf.buffers for shelf in seat.shelves):
                mark.wait()
            for shelf, home in seat.sent:
                job = functools.partial(_collect, seat.used, shelf, home, mark, self._optim_dtype)
                shelf.collected = self._worker.submit(job)
        run.landed.clear()

    def _make_masters(self) -> None:
        if not self._has_masters:
            check_host_memory(self._shelves, self._optim_dtype)
            self._has_masters = True
        for shelf in self._shelves:
            shelf.make_masters(self._optim_dtype, allocate)

    def _heed(self) -> None:
        for home in all_homes(self._shelves):
            home.heed()

    def _values_changed(self) -> None:
        self._worker.wait()
        self._turn_pages = False  # what a step made of the old values is not wanted any more
        for home in all_homes(self._shelves):
            if home.master is not None:
                with torch.no_grad():
                    home.master.copy_(home.parameter)

    def _flip(self) -> None:
        """What the last step made becomes what passes compute with."""
        if self._turn_pages:
            for home in all_homes(self._shelves):
                if home.master is not None:
                    home.turn()
            self._turn_pages = False


def _collect(
    used: set[int], shelf: HostWeights, home: Home, mark: Mark, dtype: torch.dtype | None
) -> None:
    mark.wait()
    if id(home.parameter) in used:  # else no layer made one
        home.collect(shelf.staged[id(home.parameter)], dtype)
