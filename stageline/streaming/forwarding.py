"""Lets a wrapper pass for the model inside: attributes, parameters, state, modes.

The wrapped model is no submodule, so names of parameters and of the state are those of the model.
What the wrapper itself sets while it is made stays its own; later writes go to the model.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

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
