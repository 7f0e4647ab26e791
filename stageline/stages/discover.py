"""Finds the parts of a transformers model by the order of its modules' calls.

The usual names (vision tower, projector, language model, head) follow from the split plan: what is
read only for pictures is tower and projector. Works for every model of transformers
whose layers are called in a row.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from stageline.errors import UserError
from stageline.stages.example_batch import image_token, picture_batch
from stageline.stages.rehearsal import stand_ins
from stageline.stages.split_plan import SplitPlan, longer, make_plan


@dataclass(frozen=True)
class ModelPaths:
    """Module paths of the parts of a model, empty when the model has no such part.

    Attributes:
        text_model: contains layers and embeddings, and nothing of the other parts.
        beside_tower: other towers that see pictures.
        beside_text: the embeddings of tokens, where `text_model` does not hold them.
        beside_projector: other parts that turn features into embeddings: projectors of features
            that go to deeper layers, and parameters of the base model itself (the line end of
            LLaVA-NeXT). Like the projector, only the first stage has them.
        behind: modules after the layers, except the head.
    """

    text_model: str
    layers: str
    head: str
    vision_tower: str
    projector: str
    beside_projector: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    beside_tower: tuple[str, ...] = ()
    beside_text: tuple[str, ...] = ()


Batch = Mapping[str, torch.Tensor]
Run = Callable[[PreTrainedModel, Batch], object]
Sizes = Callable[[Batch], dict[str, int]]
_PLANS: dict[str, SplitPlan] = {}
_PATH = re.compile(r'"_name_or_path": "(?:[^"\\]|\\.)*"')  # a model's folder does not matter
_ROWS = range(7, 500)  # from 7: a small multiple of the length is not taken for all tokens
_TOKENS = range(17, 500)


def plan_of(
    whole: PreTrainedModel, run: Run, *, kind: str, sizes: Sizes, takes_pictures: bool = False
) -> SplitPlan:
    """The split plan of a model on meta; found once for each configuration.

    Args:
        run: (whole, batch) -> its forward pass.
        kind: tells apart what is run of the same model.
        sizes: batch -> what the letters in the shapes of borders stand for.
        takes_pictures: it is rehearsed with pictures, too.
    """
    model = type(whole)
    facts = [kind, model.__module__, model.__qualname__, str(whole.dtype), takes_pictures]
    key = json.dumps(facts) + _PATH.sub("", whole.config.to_json_string(use_diff=False))
    if key not in _PLANS:
        _PLANS[key] = rehearsed_plan(whole, run, sizes=sizes, takes_pictures=takes_pictures)
    return _PLANS[key]


def rehearsed_plan(
    whole: PreTrainedModel, run: Run, *, sizes: Sizes, takes_pictures: bool
) -> SplitPlan:
    """Return the split plan of a model on meta, without the store; arguments as for `plan_of`."""
    dtype, text = whole.dtype, whole.config.get_text_config(decoder=True)
    try:
        with stand_ins(whole, dtype=dtype) as used, _plain_attention(whole):
            plan = make_plan(
                whole,
                functools.partial(run, whole),
                text_batch(whole.config),
                pictures=pictured_batch(whole, sizes) if takes_pictures else None,
                is_pixel=is_pixel,
                sizes=sizes,
                depth=getattr(text, "num_hidden_layers", None),
                numbers=frozenset(_numbers(whole.config.to_dict())),
            )
    except UserError:
        raise
    except Exception as error:
        told = str(error).partition("\n")[0]
        raise UserError(
            f"{type(whole).__name__} ({whole.config.model_type}) cannot be split over stages: "
            f"the tracing pass without weights ended in {type(error).__name__}: {told}. Train it "
            "on one GPU, or write a subclass of StageModel (docs/add_a_model.md)."
        ) from error
    return plan.in_dtype(dtype, used)


@contextmanager
def _plain_attention(whole: PreTrainedModel) -> Iterator[None]:
    """While open, use eager attention of transformers: a kernel may need a GPU or a compiler."""
    configs = {id(m.config): m.config for m in whole.modules() if isinstance(m, PreTrainedModel)}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation_internal = "eager"
    try:
        yield
    finally:
        for config, chosen in before:
            config._attn_implementation_internal = chosen


def is_pixel(name: str) -> bool:
    """Whether an input of the model goes only to the first stage."""
    return name.startswith("pixel_")


def sizes_of(config: PretrainedConfig | None, batch: Batch) -> dict[str, int]:
    """Rows, tokens, their product and image tokens of a micro-batch."""
    rows, tokens = batch["input_ids"].shape
    sizes = {"B": rows, "T": tokens, "BT": rows * tokens}
    token = None if config is None else image_token(config)
    if token is not None:
        sizes["N"] = int((batch["input_ids"] == token).sum())
    return sizes


def text_batch(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """A micro-batch of text whose numbers of rows and tokens stand nowhere in the configuration."""
    numbers, text = set(_numbers(config.to_dict())), config.get_text_config(decoder=True)
    rows = next(one for one in _ROWS if one not in numbers)
    tokens = next(one for one in _TOKENS if one != rows and not numbers & {one, rows * one})
    fields = config.to_dict().items()
    special = [value for name, value in fields if name.endswith(("token_id", "token_index"))]
    ids = [one for one in range(min(text.vocab_size, 4 * tokens)) if one not in special]
    places = torch.arange(rows * tokens) * 7 % len(ids)
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[-1, -3:] = 0
    return {"input_ids": torch.tensor(ids)[places].view(rows, tokens), "attention_mask": mask}


def pictured_batch(whole: PreTrainedModel, sizes: Sizes) -> Batch:
    """A micro-batch with pictures in its first row; its sizes are not in the configuration."""
    numbers = set(_numbers(whole.config.to_dict()))
    rows = next(one for one in _ROWS if one not in numbers)
    for count in range(2, 9):
        pictures = (count, *[0] * (rows - 1))
        with torch.no_grad():
            batch: Batch = picture_batch(whole.config, whole, rows=pictures, dtype=whole.dtype)
        for _ in range(32):
            found = list(sizes(batch).values())
            if len(set(found)) == len(found) and numbers.isdisjoint(found):
                return batch
            batch = longer(batch)
    raise UserError(
        f"{type(whole).__name__} ({whole.config.model_type}) cannot be split over stages: its "
        "configuration has every number of image tokens of a small micro-batch. Write a subclass "
        "of StageModel (docs/add_a_model.md)."
    )


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, int):
        yield value


def find_paths(whole: PreTrainedModel, plan: SplitPlan) -> ModelPaths:
    """Return the parts of a model, by its plan and by its heads and towers in transformers."""
    names = {id(module): name for name, module in whole.named_modules()}
    head = names.get(id(whole.get_output_embeddings()), "")
    vision = getattr(whole.config, "vision_config", None)
    models = [
        (name, module)
        for name, module in whole.named_modules()
        if isinstance(module, PreTrainedModel) and module is not whole
    ]
    # the outermost model inside whose configuration is that of the vision tower
    is_vision = (name for name, one in models if type(one.config) is type(vision))
    tower = next(is_vision, "") if vision is not None else ""
    beside_tower: list[str] = []
    kinds = [
        type(getattr(whole.config, n, None)) for n in whole.config.sub_configs if "vision" in n
    ]
    for name, one in models if tower else ():
        if type(one.config) in kinds and not any(is_in(name, o) for o in (tower, *beside_tower)):
            beside_tower.append(name)
    steps = plan.layers.split(".")
    ancestors = [".".join(steps[:count]) for count in range(1, len(steps))]
    # the outermost that holds the layers, and neither head nor what makes embeddings of pictures
    text_model = next(
        (path for path in ancestors if not any(is_in(one, path) for one in (head, tower) if one)),
        plan.layers,
    )
    known = (text_model, tower, head, names.get(id(whole.get_input_embeddings()), ""))
    rest = [path for path in _outermost(whole, known) if path]
    places = {
        path: set[int]().union(*(where for name, where in plan.owners.items() if is_in(name, path)))
        for path in rest
    }
    behind = tuple(path for path in rest if places[path] == {plan.size})
    projectors = [path for path in rest if path not in behind] if tower else []
    if tower:
        projectors += _mergers(whole, plan, tower)
    return ModelPaths(
        text_model=text_model,
        layers=plan.layers,
        head=head,
        vision_tower=tower,
        projector=next(iter(projectors), ""),
        beside_projector=tuple(projectors[1:]),
        behind=behind,
        beside_tower=tuple(beside_tower),
        beside_text=() if is_in(known[-1], text_model) else known[-1:],
    )


def is_in(path: str, parent: str) -> bool:
    """Whether a path is that of a module or inside of it."""
    return path == parent or path.startswith(parent + ".")


def _outermost(whole: nn.Module, known: tuple[str, ...]) -> list[str]:
    """Return paths of other modules and parameters with weights, outermost first."""
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        prefix = f"{path}." if path else ""
        for name, child in module.named_children():
            here = prefix + name
            if here in known or next(child.parameters(), None) is None:
                continue
            if any(is_in(one, here) for one in known if one):
                visit(child, here)
            elif not isinstance(child, PreTrainedModel):  # an audio tower, say
                found.append(here)
        found.extend(
            prefix + name for name in module._parameters if module._parameters[name] is not None
        )

    visit(whole, "")
    return found


def _mergers(whole: PreTrainedModel, plan: SplitPlan, tower: str) -> list[str]:
    """Modules of a tower that make features of the language model's width behind its blocks.

    Behind the first block at least: mergers of Qwen-VL and those of deepstack features.
    """
    config = whole.config
    width = config.get_text_config(decoder=True).hidden_size
    blocks = tower_blocks(whole.get_submodule(tower), config)
    is_begun, found = False, list[str]()
    for name, last in plan.seen.items():
        is_begun = is_begun or name.startswith(f"{tower}.{blocks}.")
        is_outside = name.startswith(tower + ".") and not is_in(name, f"{tower}.{blocks}")
        is_new = is_begun and is_outside and not any(is_in(name, one) for one in found)
        if is_new and last == width:
            if any(weight.ndim > 1 for weight in whole.get_submodule(name).parameters()):
                found.append(name)
    lists = {name.rpartition(".")[0] for name in found if name.rpartition(".")[2].isdigit()}
    return [*(one for one in found if one.rpartition(".")[0] not in lists), *sorted(lists)]


def tower_blocks(tower: nn.Module, config: PretrainedConfig) -> str:
    """Path of the list of a tower's blocks; empty where there is none."""
    vision = getattr(config, "vision_config", None)
    count = getattr(vision, "num_hidden_layers", None) or getattr(vision, "depth", None)
    lists = (
        path
        for path, module in tower.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    )
    return next(lists, "")
