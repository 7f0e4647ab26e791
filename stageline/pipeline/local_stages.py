"""The stages that one rank holds, seen as one thing with one set of parameters."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn


class LocalStages:
    """One or several stage models of a rank, in the order of the model.

    A weight that two of them hold under one name (embedding and head, where first and last stage
    share a rank) becomes one tensor.

    Attributes:
        models: stage models.
        parameter_order: the names of the whole model's parameters, in its own order.
    """

    def __init__(self, models: nn.Module | Sequence[nn.Module]) -> None:
        self.models = list(models) if isinstance(models, Sequence) else [models]
        self.num_stages: int = self.models[0].num_stages
        self.parameter_order: list[str] = self.models[0].parameter_order
        _share_equal_names(self.models)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.models)

    @property
    def indices(self) -> list[int]:
        """The numbers of the stages."""
        return [model.stage for model in self.models]

    @property
    def training(self) -> bool:
        return self.models[0].training

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name; a shared one once."""
        named: dict[str, nn.Parameter] = {}
        for model in self.models:
            named.update(model.named_parameters())
        return named

    def part_of(self, name: str) -> str | None:
        """The part of the model that a parameter belongs to; None: in no part, or not known."""
        part_of = getattr(self.models[0], "part_of", None)  # by name, so any stage can tell
        return None if part_of is None else part_of(name)

    def train(self, mode: bool = True) -> None:
        """Sets the mode of all stages."""
        for model in self.models:
            model.train(mode)


def _share_equal_names(models: Sequence[nn.Module]) -> None:
    first: dict[str, nn.Parameter] = {}
    for model in models:
        replaced: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            kept = first.setdefault(name, parameter)
            if kept is not parameter:
                assert kept.shape == parameter.shape and torch.equal(kept, parameter), name
                replaced[id(parameter)] = kept
        for module in model.modules() if replaced else ():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in replaced:
                    module._parameters[name] = replaced[id(parameter)]
