"""What a model consists of, seen on the meta device: parameters, kinds of layers, what trains.

No weight is made. A model is asked for in pieces: `make_piece(stage=1, num_stages=3,
partition=[i, 1, n - i - 1], device=...)` is layer i alone, with zeros for layers first or last.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from stageline.modules.checkpointing import recomputes
from stageline.pipeline.cost import Cost
from stageline.pipeline.live_bytes import tensor_bytes

MakePiece = Callable[..., nn.Module]
FIRST, MIDDLE, LAST = range(3)
MASTER_BYTES = GRADIENT_BYTES = 4  # float32, whatever the weights are


@dataclass(frozen=True)
class ExamplePasses:
    """What is known of activations without running anything.

    Attributes:
        border: (rows, tokens) -> bytes that travel between two stages.
        widths: for each layer, numbers saved for each token; 0 where they are recomputed.
        last_width: the same of head and norm.
    """

    border: Callable[[int, int], int]
    widths: tuple[int, ...]
    last_width: int


@dataclass(frozen=True)
class Outline:
    """The items of a model without their seconds and activations.

    Attributes:
        make_piece: builds a piece, see above.
        first, layers, last: parameters of the items.
        kinds: for each layer the first one that is like it.
        tied: what first and last item both hold.
        example: what passes keep, roughly.
        front: what the first item holds, for people.
    """

    make_piece: MakePiece
    first: Cost
    layers: tuple[Cost, ...]
    last: Cost
    kinds: tuple[int, ...]
    tied: Cost
    example: ExamplePasses
    front: str = "embedding"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def trains(self) -> list[bool]:
        """Of all items: first, layers, last."""
        return [item.trains for item in (self.first, *self.layers, self.last)]

    def computes(self, item: int) -> bool:
        """Whether an item has a backward pass."""
        return any(self.trains[: item + 1])

    def sends(self, item: int) -> bool:
        """Whether an item passes a gradient on to the one before."""
        return any(self.trains[:item])

    def piece(self, item: int, device: torch.device) -> nn.Module:
        """The item alone, on a device."""
        if item == 0:
            return self._make(FIRST, [0, self.num_layers, 0], device)
        if item == self.num_layers + 1:
            return self._make(LAST, [0, self.num_layers, 0], device)
        return self._make(MIDDLE, [item - 1, 1, self.num_layers - item], device)

    def empty_piece(self, device: torch.device) -> nn.Module:
        """A stage between others without a layer: what each stage does besides its layers."""
        return self._make(MIDDLE, [0, 0, self.num_layers], device)

    def _make(self, stage: int, partition: list[int], device: torch.device) -> nn.Module:
        return self.make_piece(stage=stage, num_stages=3, partition=partition, device=device)


def outline_of(make_piece: MakePiece) -> Outline:
    """Looks at a model on the meta device."""
    meta = torch.device("meta")
    whole = make_piece(stage=0, num_stages=1, partition=None, device=meta)
    num_layers = whole.num_layers()
    ends = [
        make_piece(stage=stage, num_stages=3, partition=[0, num_layers, 0], device=meta)
        for stage in (FIRST, LAST)
    ]
    first, last = (dict(end.named_parameters()) for end in ends)
    layers = [_below(whole, whole.layer_name(index)) for index in range(num_layers)]
    is_recomputed = recomputes(whole)
    return Outline(
        make_piece=make_piece,
        first=parameter_cost(first.values()),
        layers=tuple(parameter_cost(layer.values()) for layer in layers),
        last=parameter_cost(last.values()),
        kinds=_kinds(whole, layers, is_after_trained=any(p.requires_grad for p in first.values())),
        tied=parameter_cost(last[name] for name in first.keys() & last.keys()),
        example=ExamplePasses(
            border=lambda *shape: tensor_bytes(ends[1].get_example_input(*shape)),
            widths=tuple(0 if is_recomputed else token_width(layer) for layer in layers),
            last_width=token_width(last),
        ),
        front="tower+embedding" if _has_tower(whole) else "embedding",
    )


def _has_tower(whole: nn.Module) -> bool:
    return bool(getattr(getattr(whole, "paths", None), "vision_tower", ""))


def token_width(parameters: dict[str, torch.Tensor]) -> int:
    """Numbers that matrices take and give for each token: about what their layer saves.

    Experts count once each token, whatever their number.
    """
    plain = {name: p for name, p in parameters.items() if ".lora." not in name}
    return sum(sum(p.shape[-2:]) for p in plain.values() if p.dim() in (2, 3))


def parameter_cost(parameters: Iterable[torch.Tensor]) -> Cost:
    """Counts and lasting bytes of some parameters."""
    found = list(parameters)
    trained = [parameter for parameter in found if parameter.requires_grad]
    num_trainable = sum(parameter.numel() for parameter in trained)
    num_half = sum(parameter.numel() for parameter in trained if parameter.element_size() == 2)
    return Cost(
        num_parameters=sum(parameter.numel() for parameter in found),
        num_trainable=num_trainable,
        weights=tensor_bytes(found),
        gradients=num_trainable * GRADIENT_BYTES,
        masters=num_half * MASTER_BYTES,
        trains=bool(trained),
    )


def _below(whole: nn.Module, path: str) -> dict[str, torch.Tensor]:
    return dict(whole.get_submodule(path).named_parameters())


def _kinds(
    whole: nn.Module, layers: list[dict[str, torch.Tensor]], *, is_after_trained: bool
) -> tuple[int, ...]:
    """Layers are alike if shapes, settings and what is trained in and before them are."""
    first_of: dict[Hashable, int] = {}
    kinds = []
    for index, layer in enumerate(layers):
        shapes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layer.items())
        key = (shapes, whole.layer_kind(index), is_after_trained)
        kinds.append(first_of.setdefault(key, index))
        is_after_trained = is_after_trained or any(p.requires_grad for p in layer.values())
    return tuple(kinds)
