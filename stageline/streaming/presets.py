"""Makes a row of layers of any decoder of transformers, without model code: intro, blocks, outro.

The intro is the model's own forward up to the first layer, each block one layer, the outro its own
forward from the last layer on: masks, position embeddings, softcaps, losses are the library's. How
the layers are called is noted by recorders in their places. That they are such a row is proved by a
warm-up run on two tokens, not looked up by the name of a family.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import Cache, PreTrainedModel

from stageline.modules.router_records import ROUTER_LOGITS, recording_routers, watch_routers
from stageline.streaming.host_weights import shell_of
from stageline.streaming.passes import Fixed

TAPE: ContextVar["Tape | None"] = ContextVar("tape of the recorders", default=None)


class NoPresetError(NotImplementedError):
    """The model is no row of layers that hand one tensor on."""


class Recorded(Exception):
    """Ends a forward pass at the last layer: what comes after it is another's business."""


@dataclass(frozen=True)
class ArgumentSlot:
    """Stands for a tensor; -1 is the hidden states, which each layer gets from the one before."""

    number: int


HIDDEN = ArgumentSlot(-1)


@dataclass(frozen=True)
class LayerCall:
    """Arguments of one call with slots in place of tensors."""

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    def filled(self, tensors: Sequence[torch.Tensor], hidden: torch.Tensor | None = None) -> Any:
        """The arguments with their tensors."""
        leaves = [
            (hidden if leaf == HIDDEN else tensors[leaf.number])
            if isinstance(leaf, ArgumentSlot)
            else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.structure)


@dataclass
class Tape:
    """The calls of one forward pass.

    Attributes:
        stops: the pass ends at the last layer.
        hidden: what the first layer gets.
        calls: of each layer, its (args, kwargs).
        tensors: each that a call has beside the hidden states, once.
    """

    stops: bool
    hidden: torch.Tensor | None = None
    last_output: torch.Tensor | None = None
    calls: list[LayerCall] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    _slots: dict[int, ArgumentSlot] = field(default_factory=dict)

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Writes a layer's call down; gives what stands for its output."""
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

    def call(self, arguments: Any, hidden: torch.Tensor | None = None) -> LayerCall:
        """Arguments with slots; their tensors go into `tensors`."""
        leaves, structure = pytree.tree_flatten(arguments)
        return LayerCall(tuple(self._slot(leaf, hidden) for leaf in leaves), structure)

    def _slot(self, leaf: Any, hidden: torch.Tensor | None) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf is hidden:
            return HIDDEN
        if id(leaf) not in self._slots:
            self._slots[id(leaf)] = ArgumentSlot(len(self.tensors))
            self.tensors.append(leaf)
        return self._slots[id(leaf)]


class CallRecorder(nn.Module):
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
        CallRecorder(layer, is_last=number == last, gives_tuple=gives_tuple)
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


@dataclass(frozen=True)
class DecoderLayout:
    """Where the parts of a model lie, and what its warm-up run showed.

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


def find_layouts(model: nn.Module) -> list[DecoderLayout]:
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
                layouts.append(_warm_up_run(model, base, layers, gives_tuple=gives_tuple))
            except Exception as error:  # the library's own, of models that want other inputs
                reasons.append(f"{type(error).__name__}: {error}")
    if not layouts:
        raise NoPresetError(f"{type(model).__name__} is no plain row of layers: {reasons[0]}")
    return layouts


def two_tokens(model: nn.Module) -> dict[str, Any]:
    """Inputs that every decoder takes."""
    embedding = cast(PreTrainedModel, model).get_input_embeddings()
    device = cast(torch.Tensor, embedding.weight).device
    # not the padding: the library would warn that it is not masked
    token = 0 if getattr(model.config, "pad_token_id", None) != 0 else 1
    return {"input_ids": torch.full((1, 2), token, dtype=torch.long, device=device)}


def _list_at(model: nn.Module, path: str) -> Sequence[nn.Module]:
    return list(cast(nn.ModuleList, model.get_submodule(path)))  # `_find_layers` looked


def _find_layers(model: nn.Module) -> str:
    """Path of the list of layers, which lies beside the token embeddings."""
    names = {id(module): name for name, module in model.named_modules()}
    try:
        embedding = names.get(id(cast(PreTrainedModel, model).get_input_embeddings()), "")
    except (AttributeError, NotImplementedError):
        embedding = ""
    body = embedding.rpartition(".")[0]
    config = cast(PreTrainedModel, model).config
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
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


def _warm_up_run(model: nn.Module, base: str, layers: str, *, gives_tuple: bool) -> DecoderLayout:
    inner = layers.removeprefix(f"{base}.") if base else layers
    base_model = model.get_submodule(base)
    row = recorders(_list_at(model, layers), gives_tuple=gives_tuple)
    # leaves of their own: what depends on no weight is found, whether weights are frozen or not
    leaves = {
        id(each): each.detach().requires_grad_(True)
        for each in base_model.parameters()
        if each.is_floating_point()
    }
    stage = shell_of(twin_with(base_model, {inner: row}), leaves).eval()
    last_calls: list[tuple[str, Any, Any]] = []  # (name, arguments, output) behind the last layer

    def note(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        tape = TAPE.get()
        if tape is not None and len(tape.calls) == len(row):
            last_calls.append((name, args, output))

    for name, child in stage.get_submodule(inner.rpartition(".")[0]).named_children():
        if not isinstance(child, nn.ModuleList):
            child.register_forward_hook(functools.partial(note, name))  # ends with the shell
    with torch.enable_grad():
        tape, output = play(stage, {**two_tokens(model), "use_cache": False}, stops=False)
    if len(tape.calls) != len(row):
        raise NoPresetError(f"{len(tape.calls)} of {len(row)} layers were called")
    norm = _check_end(tape.last_output, last_calls, output.last_hidden_state)
    body = layers.rpartition(".")[0]
    return DecoderLayout(
        base=base,
        layers=layers,
        norm=".".join(filter(None, (body, norm))) if norm else "",
        gives_tuple=gives_tuple,
        has_fixed=not any(tensor.requires_grad for tensor in tape.tensors),
        output_class=type(output),
    )


def _check_end(source: Any, calls: Sequence[tuple[str, Any, Any]], last: Any) -> str:
    """The child that makes the last hidden states of the last layer's output; empty: none."""
    if len(calls) > 1:
        raise NoPresetError(f"{len(calls)} modules run after the last layer")
    if not calls:
        _same(source, last)
        return ""
    name, args, made = calls[0]
    _same(args[0] if args else None, source)
    _same(made, last)
    return name


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


_ENDING: ContextVar[tuple[torch.Tensor, tuple | None] | None] = ContextVar("end of the layers")


@dataclass(frozen=True)
class Script:
    """How layers and head are called.

    Attributes:
        calls: of each layer, with slots of the tensors that travel beside the hidden states.
        head: of the whole model, with slots of its inputs.
        records_routers: blocks hand their router logits on.
    """

    calls: tuple[LayerCall, ...]
    head: LayerCall
    records_routers: bool


class Intro(nn.Module):
    """The model up to its first layer."""

    _original: nn.Module

    def __init__(self, model: nn.Module, layout: DecoderLayout) -> None:
        super().__init__()
        self.model = _without_the_end(model, layout)
        self.__dict__["_original"] = model  # no child: its layers are others'
        self._has_fixed = layout.has_fixed
        self._num_layers = len(_list_at(model, layout.layers))
        self._names = list(inspect.signature(type(model).forward).parameters)[1:]
        base = model.get_submodule(layout.base)
        self._can_record = ROUTER_LOGITS in (getattr(base, "_can_record_outputs", None) or {})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        follow(self.model, self._original)
        inputs = dict(zip(self._names, args, strict=False)) | kwargs
        _refuse_generation(inputs, self.model.config)
        inputs["use_cache"] = False
        tape, _ = play(self.model, inputs, stops=True)
        if len(tape.calls) != self._num_layers:
            raise ValueError(
                f"the model called {len(tape.calls)} of its {self._num_layers} layers; all were "
                "expected, because each is a layer that streams: set its layerdrop to 0"
            )
        notes = Tape(stops=True)
        script = Script(tuple(tape.calls), notes.call(inputs), self._records(inputs))
        travelling = Fixed(tape.tensors) if self._has_fixed else tuple(tape.tensors)
        return tape.hidden, (), travelling, Fixed(notes.tensors), script

    def _records(self, inputs: dict[str, Any]) -> bool:
        flag = f"output_{ROUTER_LOGITS}"
        asked = inputs.get(flag)
        if asked is None:
            asked = getattr(self.model.config, flag, False)
        return bool(asked) and self._can_record


class Block(nn.Module):
    """One layer."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.layer = layer
        self._number = number

    def forward(self, value: Any) -> Any:
        hidden, records, travelling, head, script = value
        tensors = travelling.tensors if isinstance(travelling, Fixed) else travelling
        args, kwargs = script.calls[self._number].filled(tensors, hidden)
        with recording_routers(script.records_routers) as found:
            output = self.layer(*args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        return hidden, (*records, *found), travelling, head, script


class Outro(nn.Module):
    """The model from its last layer on."""

    _original: nn.Module

    def __init__(self, model: nn.Module, layout: DecoderLayout) -> None:
        super().__init__()
        norm = model.get_submodule(layout.norm) if layout.norm else nn.Identity()
        self.model = twin_with(model, {layout.base: Finish(norm, layout.output_class)})
        self._is_bare = not layout.base
        self.__dict__["_original"] = model

    def forward(self, value: Any) -> Any:
        hidden, records, _, head, script = value
        if not self._is_bare:
            follow(self.model, self._original)
        inputs = script.head.filled(head.tensors)
        token = _ENDING.set((hidden, records if script.records_routers else None))
        try:
            output = self.model(**inputs)
        finally:
            _ENDING.reset(token)
        return output.to_tuple() if self._is_bare and inputs.get("return_dict") is False else output


class Finish(nn.Module):
    """Stands in the place of the model without its head: gives what the layers gave."""

    def __init__(self, norm: nn.Module, output_class: Any) -> None:
        super().__init__()
        self.norm = norm
        self._output_class = output_class

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ending = _ENDING.get()
        assert ending is not None
        hidden, records = ending
        output = self._output_class(last_hidden_state=self.norm(hidden))
        if records is not None:
            output[ROUTER_LOGITS] = records
        return output


def sequential_of(model: nn.Module) -> nn.Sequential:
    """Intro, blocks and outro of a decoder; weights are shared with the model.

    Raises:
        NoPresetError: the model is no decoder of transformers, or not such a row of layers.
    """
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "base_model_prefix"):
        raise NoPresetError(f"{type(model).__name__} is no model of transformers")
    reasons = []
    for layout in find_layouts(model):
        try:
            row = _row(model, layout)
            with torch.no_grad():
                row[-1](row[0](**two_tokens(model)))  # does the model call its base as a whole?
            break
        except Exception as error:  # the library's own, of models that do
            reasons.append(f"{type(error).__name__}: {error}")
    else:
        raise NoPresetError(f"{type(model).__name__} cannot run in parts: {reasons[0]}")
    held = {id(parameter) for parameter in row.parameters()}
    missing = [name for name, each in model.named_parameters() if id(each) not in held]
    if missing:
        raise NoPresetError(f"{type(model).__name__} has {missing[0]} outside of the row of layers")
    watch_routers(model.get_submodule(layout.base), _list_at(model, layout.layers))
    return row.train(model.training)


def _row(model: nn.Module, layout: DecoderLayout) -> nn.Sequential:
    layers = _list_at(model, layout.layers)
    blocks = (Block(layer, number) for number, layer in enumerate(layers))
    return nn.Sequential(Intro(model, layout), *blocks, Outro(model, layout))


def _without_the_end(model: nn.Module, layout: DecoderLayout) -> nn.Module:
    """The model with recorders for layers and without what comes after them."""
    layers = _list_at(model, layout.layers)
    others: dict[str, nn.Module] = {
        layout.layers: recorders(layers, gives_tuple=layout.gives_tuple)
    }
    if layout.norm:
        others[layout.norm] = nn.Identity()
    above, names = model, layout.base.split(".") if layout.base else []
    for depth, name in enumerate(names):  # heads lie beside the base, or beside what holds it
        path = [*names[:depth], ""]
        beside = [other for other, _ in above.named_children() if other != name]
        others |= {".".join(path) + other: nn.Identity() for other in beside}
        above = above.get_submodule(name)
    return twin_with(model, others)


def refuse_caches(inputs: Mapping[str, Any]) -> None:
    """Refuse keys and values of earlier tokens: micro-batches would append to each other's."""
    for name, value in inputs.items():
        if isinstance(value, Cache) or (name == "use_cache" and value):
            raise ValueError(
                f"{name}: a model that streams in micro-batches keeps no cache. Leave it out; for "
                "generation use the original model."
            )


def _refuse_generation(inputs: dict[str, Any], config: Any) -> None:
    refuse_caches(inputs)
    for name in ("output_hidden_states", "output_attentions"):
        asked = inputs.get(name)
        if getattr(config, name, False) if asked is None else asked:
            raise ValueError(
                f"{name}: those of single layers do not leave a model that streams. Leave it out; "
                "for generation use the original model."
            )
