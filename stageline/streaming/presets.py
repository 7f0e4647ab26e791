"""Make a row of layers of a model of transformers: its stages, of one layer each.

The first piece embeds, the last one has the head, and each piece between them is a layer. As on the
stages of a pipeline, the model's own forward runs in every piece, and the split plan says what
crosses to the next one (stageline/stages/splice.py).
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache

from stageline.contracts import ROW_LENGTHS
from stageline.errors import UserError
from stageline.modules.router_records import ROUTER_LOGITS, recording_routers, watch_routers
from stageline.stages.causal_lm import run_whole
from stageline.stages.discover import is_pixel, rehearsed_plan, sizes_of
from stageline.stages.packing import host_positions, known_rows
from stageline.stages.splice import Spliced
from stageline.stages.split_plan import SplitPlan
from stageline.streaming.host_weights import shell_of
from stageline.streaming.passes import Fixed

ASKS = f"output_{ROUTER_LOGITS}"


class Piece(Spliced, nn.Module):
    """A stage of a model that keeps its weights: its beginning, one layer, or its end.

    Attributes:
        whole: a twin of the model, without what other pieces own.
        original: the model; its mode, and what is set on it later, hold here too.
    """

    original: Any
    _routers: tuple[torch.Tensor, ...] | None = None  # records of all layers, for the last piece

    def __init__(self, model: nn.Module, plan: SplitPlan, stage: int) -> None:
        nn.Module.__init__(self)
        self.__dict__["original"] = model  # not a child: its layers belong to other pieces
        self.plan, self.stage = plan, stage
        self.layers = range(max(stage - 1, 0), min(stage, plan.size))
        self.whole = shell_of(model, {})
        self.splice(self.whole)
        self.intercept()
        base = self.whole.base_model
        self._can_record = ROUTER_LOGITS in (getattr(base, "_can_record_outputs", None) or {})
        if self._can_record:
            own = self.whole.get_submodule(plan.layers)
            watch_routers(base, [layer for i, layer in enumerate(own) if i in self.layers])
            base.register_forward_hook(self._give_routers)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.plan.size + 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first piece takes what the model takes, the others what the one before returns."""
        model = self.original
        set_later = ((k, v) for k, v in vars(model).items() if not isinstance(v, dict))
        vars(self.whole).update((k, v) for k, v in set_later if k != "forward")
        if self.training != model.training:
            self.train(model.training)
        if self.is_first:
            came, routers, inputs = (), (), self._inputs(args, kwargs)
            has_pictures = any(is_pixel(name) for name in inputs)
        else:
            came, routers, has_pictures, fixed = args[0]
            (inputs,) = fixed.tensors
        own = {name: value for name, value in inputs.items() if name != ROW_LENGTHS}
        asks = bool(self._can_record and own.get(ASKS, getattr(model.config, ASKS, False)))
        if self._can_record:
            own[ASKS] = asks and self.is_last
        self._routers = routers if asks and self.is_last else None
        anywhere = next(v for v in (*came, *inputs.values()) if isinstance(v, torch.Tensor))
        with known_rows(inputs, looks=False), recording_routers(asks) as found:
            run = functools.partial(self.whole, **own)
            made = self.run_spliced(run, came, has_pictures=has_pictures, ids=anywhere)
        if self.is_last:
            return made
        left = {name: value for name, value in inputs.items() if not is_pixel(name)}
        return made, (*routers, *found), has_pictures, Fixed((left,))

    def _inputs(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the forward of each piece; only this waits for a device."""
        names = list(inspect.signature(type(self.original).forward).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        inputs = {name: value for name, value in given.items() if value is not None}
        of_layers = ("output_hidden_states", "output_attentions")
        config = self.original.config
        refuse({name: getattr(config, name, False) for name in of_layers} | inputs, of_layers)
        inputs["use_cache"] = False
        has_ids = "input_ids" in inputs and "position_ids" not in inputs
        if has_ids and "attention_mask" in names:
            mask = inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
            if isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool(mask.all()):
                inputs[ROW_LENGTHS] = mask.sum(dim=1)
            inputs |= host_positions(self.whole.base_model, inputs)
        return inputs

    def _give_routers(self, base: nn.Module, args: tuple, output: Any) -> None:
        """Give the last piece the records of all other layers."""
        if self._routers is not None:
            output[ROUTER_LOGITS] = self._routers


def sequential_of(model: nn.Module) -> nn.Sequential:
    """The beginning, the layers and the end of a model; weights are shared with it.

    Raises:
        NotImplementedError: the model is not one of transformers, or cannot be split exactly.
    """
    if not hasattr(model, "get_input_embeddings"):  # one of peft hands it on
        raise NotImplementedError(f"{type(model).__name__} is not a model of transformers")
    config: Any = model.config
    takes = inspect.signature(type(model).forward).parameters
    if config.is_encoder_decoder or "input_features" in takes:
        raise NotImplementedError(f"{type(model).__name__} reads more than text and pictures")
    weights = (*model.parameters(), *model.buffers())
    on_meta: Any = shell_of(model, {id(weight): weight.detach().to("meta") for weight in weights})
    try:
        plan = rehearsed_plan(
            on_meta,
            run_whole,
            sizes=functools.partial(sizes_of, config),
            takes_pictures=getattr(config, "vision_config", None) is not None,
        )
    except UserError as error:
        raise NotImplementedError(str(error)) from error
    row = nn.Sequential(*(Piece(model, plan, stage) for stage in range(plan.size + 2)))
    return row.train(model.training)


def refuse(inputs: Mapping[str, Any], others: tuple[str, ...] = ()) -> None:
    """Refuse keys and values of earlier tokens, to which micro-batches would append in turn."""
    for name, value in inputs.items():
        if isinstance(value, Cache) or (name in ("use_cache", *others) and value):
            raise ValueError(
                f"{name}: a model that streams in micro-batches gives no such output. Leave it "
                "out; for generation use the original model."
            )
