"""Proves that a decoder of transformers is a row of layers, and finds what lies before and after.

A rehearsal runs the model on two tokens without its layers, and looks at who hands which tensor to
whom. Nothing is looked up by the name of a family.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageline.streaming.recording import TAPE, NoPresetError, Tape, play, recorders, twin_with
from stageline.streaming.shells import shell_of


@dataclass(frozen=True)
class Layout:
    """Where the parts of a model lie, and what its rehearsal showed.

    Attributes:
        base: path of the model without its head; empty if it has none.
        norm: path of what comes after the layers; empty if nothing does.
        gives_tuple: layers return tuples.
        has_fixed: what travels beside the hidden states has no gradients.
        output_class: of the base model's output.
    """

    base: str
    layers: str
    norm: str
    gives_tuple: bool
    has_fixed: bool
    output_class: Any


def rehearse(model: nn.Module) -> list[Layout]:
    """Layouts that fit, the likeliest first.

    Raises:
        NoPresetError: the model has no row of layers, or computes between them.
    """
    layers = _find_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    # most models call their base as a whole, OPT calls the decoder inside
    bases = dict.fromkeys((names[id(model.base_model)], layers.rpartition(".")[0]))
    layouts, reasons = [], []
    for base in bases:
        for gives_tuple in (False, True):
            try:
                layouts.append(_rehearsed(model, base, layers, gives_tuple=gives_tuple))
            except Exception as error:  # the library's own, of models that want other inputs
                reasons.append(f"{type(error).__name__}: {error}")
    if not layouts:
        raise NoPresetError(f"{type(model).__name__} is no plain row of layers: {reasons[0]}")
    return layouts


def two_tokens(model: nn.Module) -> dict[str, Any]:
    """Inputs that every decoder takes."""
    device = model.get_input_embeddings().weight.device
    # not the padding: the library would warn that it is not masked
    token = 0 if getattr(model.config, "pad_token_id", None) != 0 else 1
    return {"input_ids": torch.full((1, 2), token, dtype=torch.long, device=device)}


def _find_layers(model: nn.Module) -> str:
    """Path of the list of layers, which lies beside the token embeddings."""
    names = {id(module): name for name, module in model.named_modules()}
    try:
        embedding = names.get(id(model.get_input_embeddings()), "")
    except (AttributeError, NotImplementedError):
        embedding = ""
    body = embedding.rpartition(".")[0]
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [
        name
        for name, child in model.get_submodule(body).named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if not embedding or len(lists) != 1:
        raise NoPresetError(
            f"{type(model).__name__} has {len(lists)} lists of {count} layers beside its "
            "embeddings, one was expected"
        )
    return f"{body}.{lists[0]}".lstrip(".")


def _rehearsed(model: nn.Module, base: str, layers: str, *, gives_tuple: bool) -> Layout:
    inner = layers.removeprefix(f"{base}.") if base else layers
    base_model = model.get_submodule(base)
    row = recorders(list(model.get_submodule(layers)), gives_tuple=gives_tuple)
    # leaves of their own: what depends on no weight is found, whether weights are frozen or not
    leaves = {
        id(each): each.detach().requires_grad_(True)
        for each in base_model.parameters()
        if each.is_floating_point()
    }
    stage = shell_of(twin_with(base_model, {inner: row}), leaves).eval()
    after = _AfterLayers(stage, inner)
    with torch.enable_grad(), after:
        tape, output = play(stage, {**two_tokens(model), "use_cache": False}, stops=False)
    norm = after.check(tape, output)
    body = layers.rpartition(".")[0]
    return Layout(
        base=base,
        layers=layers,
        norm=".".join(filter(None, (body, norm))) if norm else "",
        gives_tuple=gives_tuple,
        has_fixed=not any(tensor.requires_grad for tensor in tape.tensors),
        output_class=type(output),
    )


class _AfterLayers:
    """Notes which children of the layers' parent run after the last layer, in a rehearsal."""

    def __init__(self, base_model: nn.Module, layers: str) -> None:
        parent = base_model.get_submodule(layers.rpartition(".")[0])
        self._children = dict(parent.named_children())
        self._num_layers = len(base_model.get_submodule(layers))
        self._seen: list[tuple[str, Any, Any]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, child in self._children.items():
            if not isinstance(child, nn.ModuleList):
                self._handles.append(child.register_forward_hook(self._hook(name)))

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def check(self, tape: Tape, output: Any) -> str:
        """The child that makes the last hidden states of the last layer's output; empty: none."""
        if len(tape.calls) != self._num_layers:
            raise NoPresetError(f"{len(tape.calls)} of {self._num_layers} layers were called")
        last, source = output.last_hidden_state, tape.last_output
        if len(self._seen) > 1:
            raise NoPresetError(f"{len(self._seen)} modules run after the last layer")
        if not self._seen:
            _same(source, last)
            return ""
        name, got, made = self._seen[0]
        _same(got[0] if got else None, source)
        _same(made, last)
        return name

    def _hook(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple, output: Any) -> None:
            tape = TAPE.get()
            if tape is not None and len(tape.calls) == self._num_layers:
                self._seen.append((name, args, output))

        return note


def _same(left: Any, right: Any) -> None:
    """Refuses other numbers than those: a view of the same shape is the same."""
    is_same = (
        isinstance(left, torch.Tensor)
        and isinstance(right, torch.Tensor)
        and left.shape == right.shape
        and left.untyped_storage()._cdata == right.untyped_storage()._cdata
    )
    if not is_same:
        raise NoPresetError("the model computes between its last layer and its final norm")
