"""AutoRoundPipe: a model of which parts stream; its own forward runs on the host and calls them.

The parts have one optimizer: one thread, one master of a weight that two parts share, one step.
Weights outside of the parts are trained beside them, by the same rule of staleness.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from stageline.streaming.engine import RoundPipe
from stageline.streaming.forwarding import ForwardsAttributes
from stageline.streaming.host_memory import allocate
from stageline.streaming.place import place_of_call
from stageline.streaming.shelf import Home, all_homes, page_views, update
from stageline.streaming.worker import Worker


class AutoRoundPipe(ForwardsAttributes, nn.Module):
    """A model with RoundPipes inside. It has no `forward_backward`: its layers have no order.

    Args:
        model: holds RoundPipes in places of its modules.
        optim_dtype: of the optimizer's parameters; default: the model's.
        name: for messages; default: the place of the call.
    """

    def __init__(
        self, model: nn.Module, optim_dtype: torch.dtype | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        self._name = name or place_of_call()
        self._optim_dtype = optim_dtype
        self._worker = Worker(f"optimizer of {self._name}")
        self._turn_pages = False  # a finished step has new values on the back pages
        engines, loose = _parts(model)
        self._homes = _shared_homes(engines)
        for engine in engines:
            engine._worker = self._worker
        names = {id(parameter): key for key, parameter in model.named_parameters()}
        self._loose: list[Home] = []
        for parameter in loose:
            home = self._homes.setdefault(
                id(parameter), Home(names.get(id(parameter), ""), parameter)
            )
            self._loose.append(home)
        self._watched: set[int] = set()
        self._has_cache = "use_cache" in inspect.signature(type(model).forward).parameters
        self._forward_to(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; one of transformers keeps no cache.

        Raises:
            ValueError: a cache is asked for.
            Exception: what an earlier optimizer step raised.
        """
        self._worker.check()
        self._heed()
        self._watch()
        if self._has_cache:
            # the layers of a micro-batch would append to what those of another one wrote
            if kwargs.setdefault("use_cache", False) not in (None, False):
                raise ValueError(
                    "use_cache came to a model that streams in micro-batches, which cannot share "
                    "a cache. Leave it out; for generation use the original model."
                )
            kwargs["use_cache"] = False
        return self._forwards_to[0](*args, **kwargs)

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's copies of the trained parameters, in `optim_dtype`."""
        return (parameter for _, parameter in self.optim_named_parameters())

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `optim_parameters`, with the names that they have in the model.

        Args:
            remove_duplicate: a parameter of several modules comes once; else under each name.
        """
        self._make_masters()
        model = self._forwards_to[0]
        for name, parameter in model.named_parameters(prefix, remove_duplicate=remove_duplicate):
            home = self._homes.get(id(parameter))
            if home is not None and home.master is not None:
                yield name, home.master

    def step(
        self, step_fn: Callable[..., None], is_async: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Runs `step_fn(*args, **kwargs)` once for all parts, by the rule of `RoundPipe.step`.

        Raises:
            Exception: what this step (synchronous) or the one before raised.
        """
        self._make_masters()
        self._heed()
        self._worker.wait()
        self._flip()
        homes = [home for home in self._homes.values() if home.master is not None]

        step = functools.partial(step_fn, *args, **kwargs)
        self._worker.submit(functools.partial(update, homes, step))
        for home in self._loose:
            home.parameter.grad = None
        self._turn_pages = True
        if not is_async:
            self._worker.wait()
            self._flip()

    def synchronize(self) -> None:
        """Waits for all steps; parameters get their newest values, `.grad` what is summed.

        The sums stay, as those of `RoundPipe.synchronize` do.
        """
        self._heed()
        self._worker.wait()
        self._flip()
        for home in self._homes.values():
            home.show()

    def __getattr__(self, name: str) -> Any:
        if name == "forward_backward":
            raise AttributeError(
                "AutoRoundPipe has no forward_backward: only its parts are rows of layers. Call "
                "the model and backward() on its loss, or wrap an nn.Sequential."
            )
        return super().__getattr__(name)

    def _watch(self) -> None:
        """Gradients that autograd makes on the host go to the sums, too."""
        for home in self._loose:
            if home.parameter.requires_grad and id(home.parameter) not in self._watched:
                self._watched.add(id(home.parameter))
                home.parameter.register_hook(functools.partial(self._collect, home))

    def _collect(self, home: Home, gradient: torch.Tensor) -> None:
        # a copy: autograd may add later gradients up in this very tensor
        mine = gradient.detach().clone()
        self._worker.submit(functools.partial(home.collect, mine, self._optim_dtype))

    def _make_masters(self) -> None:
        for home in self._homes.values():
            if home.parameter.requires_grad and home.master is None:
                home.make_master(self._optim_dtype)
                home.back = page_views([home.parameter.detach()], allocate)[0]

    def _heed(self) -> None:
        for home in self._homes.values():
            home.heed()

    def _values_changed(self) -> None:
        self._worker.wait()
        self._turn_pages = False  # what a step made of the old values is not wanted any more
        for home in self._homes.values():
            if home.master is not None:
                with torch.no_grad():
                    home.master.copy_(home.parameter)

    def _flip(self) -> None:
        if self._turn_pages:
            for home in self._homes.values():
                if home.master is not None:
                    home.turn()
            self._turn_pages = False


def _parts(model: nn.Module) -> tuple[list[RoundPipe], list[nn.Parameter]]:
    """RoundPipes inside of a model, and the parameters that are used outside of them, each once."""
    engines: dict[int, RoundPipe] = {}
    loose: dict[int, nn.Parameter] = {}
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, RoundPipe):
            engines[id(module)] = module
            continue
        loose |= {id(each): each for each in module._parameters.values() if each is not None}
        waiting += [child for child in module._modules.values() if child is not None]
    return list(engines.values()), list(loose.values())


def _shared_homes(engines: list[RoundPipe]) -> dict[int, Home]:
    """The homes of all engines by their parameter; what two engines use has one."""
    shared: dict[int, Home] = {}
    for engine in engines:
        for shelf in engine._shelves:
            shelf.homes = [shared.setdefault(id(home.parameter), home) for home in shelf.homes]
    assert len(all_homes(shelf for engine in engines for shelf in engine._shelves)) == len(shared)
    return shared
