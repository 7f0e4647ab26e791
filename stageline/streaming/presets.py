"""Makes a row of layers of any decoder of transformers, without model code: intro, blocks, outro.

The intro is the model's own forward up to the first layer, each block one layer, the outro its own
forward from the last layer on: softcaps, scaled logits, losses are the library's. That the layers
are such a row is proved by a rehearsal with two tokens, not looked up by a name.
"""

import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageline.modules.router_records import ROUTER_LOGITS, recording_routers, watch_routers
from stageline.streaming.flow import Fixed
from stageline.streaming.recording import (
    Call,
    NoPresetError,
    Tape,
    follow,
    play,
    recorders,
    twin_with,
)
from stageline.streaming.rehearsal import Layout, rehearse, two_tokens

# flag of a call -> why it is refused
_REFUSED = {
    "use_cache": "no block keeps a cache",
    "past_key_values": "no block reads a cache",
    "output_hidden_states": "hidden states of layers do not travel",
    "output_attentions": "attention weights of layers do not travel",
}
_ENDING: ContextVar[tuple[torch.Tensor, tuple] | None] = ContextVar("end of the layers")


@dataclass(frozen=True)
class Script:
    """How layers and head are called.

    Attributes:
        calls: of each layer, with slots of the tensors that travel beside the hidden states.
        head: of the whole model, with slots of its inputs.
        records_routers: blocks hand their router logits on.
    """

    calls: tuple[Call, ...]
    head: Call
    records_routers: bool


class Intro(nn.Module):
    """The model up to its first layer."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.model = _without_the_end(model, layout)
        self.__dict__["_original"] = model  # no child: its layers are others'
        self._has_fixed = layout.has_fixed
        self._num_layers = len(model.get_submodule(layout.layers))
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

    def __init__(self, model: nn.Module, layout: Layout) -> None:
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
    for layout in rehearse(model):
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
    watch_routers(model.get_submodule(layout.base), model.get_submodule(layout.layers))
    return row.train(model.training)


def _row(model: nn.Module, layout: Layout) -> nn.Sequential:
    layers = model.get_submodule(layout.layers)
    blocks = (Block(layer, number) for number, layer in enumerate(layers))
    return nn.Sequential(Intro(model, layout), *blocks, Outro(model, layout))


def _without_the_end(model: nn.Module, layout: Layout) -> nn.Module:
    """The model with recorders for layers and without what comes after them."""
    layers = list(model.get_submodule(layout.layers))
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


def _refuse_generation(inputs: dict[str, Any], config: Any) -> None:
    for name, reason in _REFUSED.items():
        asked = inputs.get(name)
        # a config's use_cache is a habit of generation; asked for in a call it is meant
        if asked is None and name.startswith("output_"):
            asked = getattr(config, name, False)
        if asked is not None and asked is not False:
            raise ValueError(
                f"{name} came to a model that streams layer by layer: {reason}. Leave it out; "
                "for generation use the original model."
            )
