"""Finds out how a decoder of transformers calls its layers, by letting its own forward run.

Recorders stand in the places of the layers and note their arguments. So masks, position embeddings
and whatever else a family does before its layers is the library's, and no model code is copied.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

TAPE: ContextVar["Tape | None"] = ContextVar("tape of the recorders", default=None)


class NoPresetError(NotImplementedError):
    """The model is no row of layers that hand one tensor on."""


class Recorded(Exception):
    """Ends a forward pass at the last layer: what comes after it is another's business."""


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor; -1 is the hidden states, which each layer gets from the one before."""

    number: int


HIDDEN = Slot(-1)


@dataclass(frozen=True)
class Call:
    """Arguments of one call with slots in place of tensors."""

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    def filled(self, tensors: Sequence[torch.Tensor], hidden: torch.Tensor | None = None) -> Any:
        """The arguments with their tensors."""
        leaves = [
            (hidden if leaf == HIDDEN else tensors[leaf.number]) if isinstance(leaf, Slot) else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.structure)


class Tape:
    """The calls of one forward pass.

    Attributes:
        hidden: what the first layer gets.
        calls: of each layer, its (args, kwargs).
        tensors: each that a call has beside the hidden states, once.
        stops: the pass ends at the last layer.
    """

    def __init__(self, *, stops: bool) -> None:
        self.stops = stops
        self.hidden: torch.Tensor | None = None
        self.calls: list[Call] = []
        self.tensors: list[torch.Tensor] = []
        self._slots: dict[int, Slot] = {}
        self.last_output: torch.Tensor | None = None

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Writes a layer's call down; gives what stands for its output.

        Raises:
            NoPresetError: the layer does not get what the one before it gave.
        """
        expected = self.last_output
        if expected is None:
            expected = self.hidden = args[0] if args else kwargs.get("hidden_states")
        call = self.call((args, kwargs), expected)
        if not isinstance(expected, torch.Tensor) or HIDDEN not in call.leaves:
            raise NoPresetError(
                f"layer {len(self.calls)} does not get what the layer before it gives: the model "
                "computes between its layers, at least with these inputs. Wrap it with "
                "use_sequential_preset=False"
            )
        self.calls.append(call)
        # another object: that it, and not the input, goes on is what the next layer checks
        self.last_output = expected.view_as(expected)
        return self.last_output

    def call(self, arguments: Any, hidden: torch.Tensor | None = None) -> Call:
        """Arguments with slots; their tensors go into `tensors`."""
        leaves, structure = pytree.tree_flatten(arguments)
        return Call(tuple(self._slot(leaf, hidden) for leaf in leaves), structure)

    def _slot(self, leaf: Any, hidden: torch.Tensor | None) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf is hidden:
            return HIDDEN
        if id(leaf) not in self._slots:
            self._slots[id(leaf)] = Slot(len(self.tensors))
            self.tensors.append(leaf)
        return self._slots[id(leaf)]


class Recorder(nn.Module):
    """Stands in a layer's place, with its attributes but not its weights.

    Args:
        gives_tuple: layers of this family return a tuple.
    """

    def __init__(self, layer: nn.Module, *, is_last: bool, gives_tuple: bool) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # no child: its weights are not this module's
        self._is_last = is_last
        self._gives_tuple = gives_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tape = TAPE.get()
        assert tape is not None
        output = tape.note(args, kwargs)
        if self._is_last and tape.stops:
            raise Recorded
        return (output,) if self._gives_tuple else output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)


def recorders(layers: Sequence[nn.Module], *, gives_tuple: bool) -> nn.ModuleList:
    """One for each layer."""
    last = len(layers) - 1
    return nn.ModuleList(
        Recorder(layer, is_last=number == last, gives_tuple=gives_tuple)
        for number, layer in enumerate(layers)
    )


def play(model: nn.Module, inputs: Mapping[str, Any], *, stops: bool) -> tuple[Tape, Any]:
    """Runs a model whose layers are recorders.

    Returns:
        The tape, and the model's output; None if it stopped at the last layer.
    """
    tape = Tape(stops=stops)
    token = TAPE.set(tape)
    try:
        return tape, model(**inputs)
    except Recorded:
        return tape, None
    finally:
        TAPE.reset(token)


def twin_with(module: nn.Module, others: Mapping[str, nn.Module]) -> nn.Module:
    """The same module with others in some places; all else is shared with it.

    Args:
        others: by their path in the module.
    """
    if "" in others:
        return others[""]
    twin = module.__class__.__new__(module.__class__)
    own = dict(module.__dict__)
    below: dict[str, dict[str, nn.Module]] = {}
    for path, other in others.items():
        name, _, rest = path.partition(".")
        below.setdefault(name, {})[rest] = other
    own["_modules"] = {
        name: twin_with(child, below[name]) if name in below else child
        for name, child in own["_modules"].items()
    }
    twin.__dict__.update(own)
    return twin


def follow(twin: nn.Module, original: nn.Module) -> None:
    """Gives a twin what was set on its original since it was made: its loss function, its mode."""
    inner = ("_modules", "_parameters", "_buffers")
    twin.__dict__.update({k: v for k, v in original.__dict__.items() if k not in inner})
