"""Turn a model into RoundPipes by rules: a preset, or by size and kind of its modules.

The rules follow the documentation of RoundPipe in their order of priority.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import _forward_unimplemented
from transformers import PreTrainedModel

from stageline.streaming.engine import RoundPipe, StreamedModel
from stageline.streaming.host_weights import Home, page_views
from stageline.streaming.lanes import default_lanes
from stageline.streaming.presets import refuse, sequential_of
from stageline.streaming.run_config import RoundPipeRunConfig, place_of_call


class AutoRoundPipe(StreamedModel):
    """A model with RoundPipes in places of its modules; its own forward runs on the host.

    The parts have one optimizer: one thread, one master of a weight that two parts share, one step.
    Weights outside of the parts are trained too, by the same rule of staleness. It has no
    `forward_backward`: its layers have no order.
    """

    def __init__(
        self, model: nn.Module, optim_dtype: torch.dtype | None = None, name: str | None = None
    ) -> None:
        super().__init__(optim_dtype, name)
        # RoundPipes inside of the model, and parameters that are used outside of them, each once
        engines: list[RoundPipe] = []
        loose: dict[int, nn.Parameter] = {}
        waiting, seen = [model], set[int]()
        while waiting:
            module = waiting.pop(0)
            if id(module) in seen:
                continue
            seen.add(id(module))
            if isinstance(module, RoundPipe):
                engines.append(module)
                continue
            loose |= {id(each): each for each in module._parameters.values() if each is not None}
            waiting += [child for child in module._modules.values() if child is not None]
        self._home_of: dict[int, Home] = {}  # by parameter; what two parts use has one home
        for engine in engines:
            engine._worker = self._worker
            for hosted in engine._hosted_layers:
                hosted.homes = [self._home_of.setdefault(id(h.parameter), h) for h in hosted.homes]
        self._loose = [self._home_of.setdefault(key, Home(each)) for key, each in loose.items()]
        self._watched: set[int] = set()
        # vision-language models of transformers hand it on among other keywords
        hands_on = isinstance(model, PreTrainedModel)
        self._has_cache = any(
            one.name == "use_cache" or (hands_on and one.kind is one.VAR_KEYWORD)
            for one in inspect.signature(type(model).forward).parameters.values()
        )
        self._forward_to(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; one of transformers keeps no cache."""
        self._worker.check()
        self._take_shown_gradients()
        for home in self._loose:  # gradients that autograd makes on the host go to the sums, too
            if home.parameter.requires_grad and id(home.parameter) not in self._watched:
                self._watched.add(id(home.parameter))
                home.parameter.register_hook(functools.partial(self._collect, home))
        refuse(kwargs)
        if self._has_cache:
            kwargs["use_cache"] = False
        return self._forwards_to[0](*args, **kwargs)

    def step(
        self, step_fn: Callable[..., None], is_async: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Run `step_fn(*args, **kwargs)` once for all parts, by the rule of `RoundPipe.step`."""
        super().step(step_fn, is_async, *args, **kwargs)
        for home in self._loose:
            home.parameter.grad = None

    def _collect(self, home: Home, gradient: torch.Tensor) -> None:
        # a copy: autograd may add later gradients up in this very tensor
        mine = gradient.detach().clone()
        self._worker.submit(functools.partial(home.collect, mine, self._optim_dtype))

    def _homes(self) -> list[Home]:
        return list(self._home_of.values())

    def _make_masters(self) -> None:
        for home in self._homes():
            if home.parameter.requires_grad and home.master is None:
                home.make_master(self._optim_dtype, page_views([home.parameter])[0])


_INHERIT = RoundPipeRunConfig()


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,
    upper_threshold: int | None = None,
    skip_modules: Container[nn.Module] = (),
    override_config: Mapping[nn.Module, RoundPipeRunConfig] | None = None,
    model_run_config: RoundPipeRunConfig = _INHERIT,
    name: str | None = None,
    **roundpipe_kwargs: Any,
) -> RoundPipe | AutoRoundPipe:
    """Wrap a model so that it streams.

    A decoder of transformers becomes a row of layers. Any other model is walked through; of each
    module the first rule that fits holds:

    1. In `skip_modules`: left as it is, on the host.
    2. An nn.Sequential: a RoundPipe with a layer each child.
    3. Its own parameters take `lower_threshold` bytes or more, or it is no larger than
       `upper_threshold`, and it has a forward of its own: a RoundPipe of one layer. If it is
       smaller than `lower_threshold`, with one micro-batch.
    4. An nn.ModuleList: a RoundPipe for each element, which are taken to be called one after the
       other: all but the last give their output micro-batch by micro-batch.
    5. Its children are walked through; its own forward runs on the host.

    Modules are replaced in the model that came. The loss function of a PreTrainedModel whose
    forward runs on the host becomes a RoundPipe too.

    Args:
        use_sequential_preset: True: a preset or an error, False: none, None: one if there is one,
            with a notice. A preset takes the whole model, whatever `skip_modules` holds.
        upper_threshold: default: bytes of the model / (devices + 1).
        override_config: settings of modules; they win over `model_run_config`.
        model_run_config: settings of all RoundPipes.
        name: for messages; default: the place of the call.
        roundpipe_kwargs: for each RoundPipe.

    Raises:
        NotImplementedError: `use_sequential_preset` is True and there is no preset.
    """
    if isinstance(model, (RoundPipe, AutoRoundPipe)):
        return model
    name = name or place_of_call()
    kwargs = {**roundpipe_kwargs, "lanes": roundpipe_kwargs.get("lanes") or default_lanes()}
    overrides = dict(override_config or {})
    if use_sequential_preset is not False:
        try:
            found = sequential_of(model)
        except NotImplementedError as error:
            if use_sequential_preset:
                raise NotImplementedError(
                    f"use_sequential_preset=True: there is no preset: {error}. Leave it out to "
                    "wrap the model module by module."
                ) from error
        else:
            if not use_sequential_preset:
                print(
                    f"{name}: {type(model).__name__} streams as {len(found)} layers; "
                    "use_sequential_preset=False wraps it module by module, True drops this notice",
                    file=sys.stderr,
                )
            config = overrides.get(model, _INHERIT).over(model_run_config)
            engine = RoundPipe(found, name=name, model_run_config=config, **kwargs)
            engine.set_original_model(model)
            return engine
    upper = _num_bytes(model) // (len(kwargs["lanes"]) + 1)
    upper = upper if upper_threshold is None else upper_threshold
    done: dict[int, nn.Module] = {}  # original -> its replacement: a module in two places stays one

    def is_left(module: nn.Module) -> bool:
        return module in skip_modules or isinstance(module, (RoundPipe, AutoRoundPipe))

    def engine_of(module: nn.Module, name: str, config: RoundPipeRunConfig = _INHERIT) -> RoundPipe:
        own = overrides.get(module, _INHERIT).over(config, model_run_config)
        return RoundPipe(module, name=name, model_run_config=own, **kwargs)

    def wrapped(module: nn.Module, name: str) -> nn.Module:
        """Return the replacement of a module."""
        if id(module) not in done:
            done[id(module)] = by_rules(module, name)
        return done[id(module)]

    def by_rules(module: nn.Module, name: str) -> nn.Module:
        if is_left(module):
            return module
        if isinstance(module, nn.Sequential):
            return engine_of(module, name)
        own = _num_bytes(module, recurse=False)
        fits = own >= lower_threshold or _num_bytes(module) <= upper
        if fits and _has_forward(module):
            is_tiny = _num_bytes(module) < lower_threshold and module not in overrides
            return engine_of(
                module, name, RoundPipeRunConfig(num_microbatch=1 if is_tiny else None)
            )
        # with those that come twice: each place needs what is to stand there
        children = [(key, child) for key, child in module._modules.items() if child is not None]
        if isinstance(module, nn.ModuleList):
            for key, element in children:
                path = f"{name}.{key}"
                if is_left(element) or id(element) in done or not _has_forward(element):
                    module._modules[key] = wrapped(element, path)
                    continue
                is_last = element is children[-1][1]
                config = RoundPipeRunConfig(merge_output=None if is_last else False)
                module._modules[key] = done[id(element)] = engine_of(element, path, config)
            return module
        for key, child in children:
            module._modules[key] = wrapped(child, f"{name}.{key}")
        if isinstance(module, PreTrainedModel) and module.base_model is not module:  # it has a loss
            # the loss needs one micro-batch: the mean of micro-batches' means is another loss
            config = RoundPipeRunConfig(
                requires_grad=model_run_config.requires_grad,
                output_device=model_run_config.output_device,
                num_microbatch=1,
            )
            engine = RoundPipe(
                _Function(module.loss_function),
                name=f"{name}.loss_function",
                model_run_config=config,
                **kwargs,
            )
            cast(Any, module).loss_function = functools.partial(engine)
        return module

    made = wrapped(model, name)
    if isinstance(made, RoundPipe):
        return made
    return AutoRoundPipe(made, kwargs.get("optim_dtype"), name)


class _Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not _forward_unimplemented


def _num_bytes(module: nn.Module, *, recurse: bool = True) -> int:
    return sum(parameter.nbytes for parameter in module.parameters(recurse))
