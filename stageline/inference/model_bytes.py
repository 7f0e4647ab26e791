"""What each part of a model needs on its device, from the model on the meta device; loads nothing.

Parts: the layers; the tower with its projector; and the ends, which are embeddings, norms, head
and whatever else lies beside layers. Weights are counted as they will lie in memory, few bits
included. For caches and for the tensors of a pass the decoder runs once on the meta device, where
tensors have sizes and no values: windows, shared heads, latent attention and states of linear
layers are counted by the model's own code.
"""

import functools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import Cache, PretrainedConfig, PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

from stageline.inference.decoding.cache import GroupCache, whole_columns
from stageline.inference.decoding.sampler import choice_bytes
from stageline.inference.decoding.stage_decoder import answering, can_keep_logits
from stageline.inference.meta_model import blocks_path, layers_path, module_list, text_model_path
from stageline.model_folder import is_of_library
from stageline.pipeline.live_bytes import PeakBytes, tensor_bytes
from stageline.planner.cost import Cost
from stageline.stage import Stage

META = torch.device("meta")
BLOCK, NESTED_BLOCK = 64, 256  # weights below one scale, scales below one of theirs: bitsandbytes
_CODE_BYTES = 16 * 4  # the sixteen values of 4 bits
_NESTED_CODE_BYTES = _CODE_BYTES + 256 * 4 + 4  # and those of scales in 8 bits, and their offset


@dataclass(frozen=True)
class Stored:
    """How the linear layers of a model lie in memory.

    Attributes:
        bits: of a weight.
        group: weights that share a scale; 0: those of a row.
        scale_bytes: of one scale, with its share of what scales have in common.
        table_bytes: of each matrix besides.
        skipped: names of modules that stay as they are.
    """

    bits: int
    group: int = 0
    scale_bytes: float = 4
    table_bytes: int = 0
    skipped: tuple[str, ...] = ()

    def weight_bytes(self, shape: Iterable[int]) -> int:
        """Of one matrix with all that belongs to it."""
        rows, columns = shape
        numel = rows * columns
        num_scales = math.ceil(numel / self.group) if self.group else rows
        scales = num_scales * self.scale_bytes
        return math.ceil(numel * self.bits / 8 + scales) + self.table_bytes


def stored_of(config: PretrainedConfig) -> Stored | None:
    """What a config says of quantised weights; None: nothing, or nothing that is known here."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    given: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")))
    skipped = given.get("llm_int8_skip_modules") or given.get("modules_to_not_convert") or ()
    found = None
    if method.startswith("bitsandbytes") or "load_in_4bit" in given:
        if not given.get("load_in_4bit"):
            found = Stored(8)
        elif given.get("bnb_4bit_use_double_quant"):
            found = Stored(4, BLOCK, 1 + 4 / NESTED_BLOCK, _NESTED_CODE_BYTES)
        else:
            found = Stored(4, BLOCK, 4, _CODE_BYTES)
    elif method in ("gptq", "awq", "auto-round"):  # a half scale and a packed zero point a group
        bits = int(given.get("bits") or 4)
        found = Stored(bits, max(0, int(given.get("group_size") or 0)), 2 + bits / 8)
    elif method == "fp8":
        found = Stored(8, math.prod(given.get("weight_block_size") or (128, 128)))
    return found and replace(found, skipped=tuple(skipped))


def tensor_sizes(model: nn.Module, stored: Stored | None) -> dict[str, int]:
    """Name -> bytes of each parameter and buffer; one that several modules share has one name.

    Args:
        stored: of the linear layers; None: all as it is on the meta device.
    """
    sizes = {name: tensor.nbytes for name, tensor in model.named_parameters()}
    sizes |= {name: tensor.nbytes for name, tensor in model.named_buffers()}
    if stored is None:
        return sizes
    skipped = {*stored.skipped, *(get_keys_to_not_convert(model) if not stored.skipped else ())}
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if isinstance(module, nn.Linear) and weight in sizes and not _is_skipped(name, skipped):
            sizes[weight] = stored.weight_bytes(module.weight.shape)
    return sizes


def _is_skipped(name: str, skipped: set[str]) -> bool:
    """As the library reads such a list: whole names, and their beginnings or ends."""
    return any(
        name == one or name.startswith(f"{one}.") or name.endswith(f".{one}") or f".{one}." in name
        for one in skipped
    )


DEFAULT_LENGTH = 2048


@dataclass(frozen=True)
class Load:
    """What a model is asked for at once.

    Attributes:
        rows: answers that are made together.
        length: tokens of the longest prompt and its answer.
        images: pictures that the tower sees for each row; tiles of a cut picture count each.
        image_size: side of a picture in pixels, where the model does not say.
    """

    rows: int = 1
    length: int = DEFAULT_LENGTH
    images: int = 0
    image_size: int = 1024

    def __str__(self) -> str:
        rows = f"{self.rows} row{'s' if self.rows > 1 else ''}"
        images = f" and {self.images} images" if self.images else ""
        return f"{rows} of {self.length} tokens{images}"


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer.

    Attributes:
        cache: keys, values and states when the answer is complete. Its last token is in no cache.
        beyond: what a cache with a window holds of a long prompt until the first step.
        workspace: the fullest moment beside weights and caches, of the prompt or of a step.
    """

    weights: int
    cache: int = 0
    beyond: int = 0
    workspace: int = 0

    @property
    def lasting(self) -> int:
        """All but the workspace."""
        return self.weights + self.cache + self.beyond


def pass_bytes(model: PreTrainedModel, load: Load, *, image_tokens: int = 0) -> list[LayerBytes]:
    """Runs the decoder of a model that lies on the meta device; weights are left out.

    Args:
        image_tokens: of a row, where layers look at images themselves.
    """
    text_model = model.get_submodule(text_model_path(model))
    layers = list(module_list(model, layers_path(model)))
    peaks = [0] * len(layers)  # a layer that looks at images may be left out where there are none
    watch = PeakBytes(META)
    with on_meta(watch, model), _laps(layers, watch, peaks) as caches:
        text_model(**_inputs(model, load, image_tokens), use_cache=True)
    kept_layers = caches[0].layers[: len(layers)] if caches else []
    tensors = [layer_tensors(layer) for layer in kept_layers]
    tensors += [[]] * (len(layers) - len(tensors))  # layers that share the cache of others
    found, held_so_far = [], 0
    for own, peak in zip(tensors, peaks, strict=True):
        kept, held = tensor_bytes(own), sum(one.untyped_storage().nbytes() for one in own)
        held_so_far += held
        # a step joins old and new keys: for a moment both are there
        workspace = max(peak - held_so_far, kept // 2, 0)
        found.append(LayerBytes(0, kept, held - kept, workspace))
    return found


@contextmanager
def on_meta(watch: PeakBytes, model: nn.Module) -> Iterator[None]:
    """Has a model make tensors without values, and counts them."""
    with torch.no_grad(), META, _light_experts(model), _FusedAttention():
        with watch.watch():
            yield


def layer_tensors(layer: object) -> list[torch.Tensor]:
    """What a layer of a cache keeps, whatever kind it is of."""
    found, waiting = [], [*vars(layer).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor) and value.dim() > 0:  # sizes of windows are no cache
            found.append(value)
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
    return found


def _inputs(model: PreTrainedModel, load: Load, image_tokens: int) -> dict[str, Any]:
    """Hidden states of the prompt: made here, so that they count."""
    config = model.config.get_text_config(decoder=True)
    num_tokens = max(1, load.length - 1)
    inputs: dict[str, Any] = {
        "inputs_embeds": torch.empty(load.rows, num_tokens, config.hidden_size, dtype=model.dtype),
        "position_ids": torch.empty(load.rows, num_tokens, dtype=torch.long),
        "attention_mask": None,
    }
    if load.rows > 1:  # rows of different length: none can do without a mask
        shape = (load.rows, 1, num_tokens, num_tokens)
        inputs["attention_mask"] = torch.empty(shape, dtype=torch.bool)
    if image_tokens and getattr(config, "cross_attention_layers", None):
        states = torch.empty(load.rows, image_tokens, config.hidden_size, dtype=model.dtype)
        inputs["cross_attention_states"] = states
    return inputs


@contextmanager
def _laps(layers: Sequence[nn.Module], watch: PeakBytes, peaks: list[int]) -> Iterator[list[Cache]]:
    """Notes the peak within each layer; yields the cache that they get, by whatever name."""
    caches: list[Cache] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caches.extend(value for value in (*args, *kwargs.values()) if isinstance(value, Cache))
        watch.lap()

    def after(index: int, *_: object) -> None:
        peaks[index] = watch.lap()

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
            hook = functools.partial(after, index)
            hooks.enter_context(layer.register_forward_hook(hook))
        yield caches


class _FusedAttention(TorchFunctionMode):
    """Counts attention as the kernels of a GPU do it: scores never lie in memory as a whole."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = _attend if func is F.scaled_dot_product_attention else func
        return chosen(*args, **(kwargs or {}))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: object,
    **__: object,
) -> torch.Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)  # the kernels add numbers
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@contextmanager
def _light_experts(model: nn.Module) -> Iterator[None]:
    """Which rows an expert gets depends on values: here all go through all that they chose."""
    changed = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" and not isinstance(module, nn.ModuleList)
    ]
    for module in changed:
        module.forward = functools.partial(_pass_experts, module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _pass_experts(
    experts: nn.Module, hidden: torch.Tensor, *routed: torch.Tensor, **_: object
) -> torch.Tensor:
    """Makes what passes through experts make, all of it at once."""
    chosen = next((item for item in routed if item.dtype in (torch.long, torch.int)), None)
    num_chosen = 1 if chosen is None else chosen.shape[-1]
    num_rows = hidden.numel() // hidden.shape[-1] * num_chosen
    widths = [sum(p.shape[-2:]) for p in experts.parameters(recurse=False) if p.dim() == 3]
    held = hidden.new_empty((num_rows, sum(widths)))
    made = torch.empty_like(hidden)
    del held
    return made


# copies of the last logits that a step holds in float32 while it chooses a token
LOGIT_COPIES = 3


@dataclass(frozen=True)
class ModelBytes:
    """Of a whole model for one load.

    Attributes:
        ends: weights of embeddings, norms and head; a tied head counts once.
        vision: weights of tower and projector.
        blocks: of `vision`, those of each block of the tower, where it can be cut.
        vision_workspace: while the tower looks at the images of all rows.
        end_workspace: while a token is chosen from the logits.
    """

    layers: tuple[LayerBytes, ...]
    ends: int
    vision: int = 0
    vision_workspace: int = 0
    end_workspace: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def weights(self) -> int:
        """All of them."""
        return self.ends + self.vision + sum(layer.weights for layer in self.layers)


def measure_model(model: PreTrainedModel, load: Load) -> ModelBytes:
    """Looks at a model on the meta device; a config with quantised weights counts as such."""
    path, text_path = f"{layers_path(model)}.", text_model_path(model)
    sizes = tensor_sizes(model, stored_of(model.config))
    weights = [0] * len(module_list(model, path[:-1]))
    tower = blocks_path(model)
    blocks = [0] * (len(module_list(model, tower)) if tower else 0)
    ends = vision = 0
    for name, size in sizes.items():
        if name.startswith(path):
            weights[int(name[len(path) :].partition(".")[0])] += size
        elif _is_end(model, name, text_path):
            ends += size
        else:
            vision += size
            if tower and name.startswith(f"{tower}."):
                blocks[int(name[len(tower) + 1 :].partition(".")[0])] += size
    try:
        layers = pass_bytes(model, load, image_tokens=load.images * _image_tokens(model, load))
    except Exception as error:
        if is_of_library(model):
            raise
        print(
            f"what a pass of {type(model).__name__} takes could not be measured "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): layers are dealt out "
            "by their weights",
            file=sys.stderr,
        )
        layers = [LayerBytes(0)] * len(weights)
    config = model.config.get_text_config(decoder=True)
    logit = load.rows * config.vocab_size
    return ModelBytes(
        layers=tuple(
            replace(layer, weights=own) for layer, own in zip(layers, weights, strict=True)
        ),
        ends=ends,
        vision=vision,
        vision_workspace=_vision_workspace(model, load),
        blocks=tuple(blocks),
        end_workspace=logit * (model.dtype.itemsize + 4 * LOGIT_COPIES),
    )


def _is_end(model: PreTrainedModel, name: str, text_path: str) -> bool:
    if getattr(model.config, "vision_config", None) is None:
        return True
    head = model.get_output_embeddings()
    owner = model.get_submodule(name.rpartition(".")[0])
    return not text_path or name.startswith(f"{text_path}.") or owner is head


def _image_tokens(model: PreTrainedModel, load: Load) -> int:
    """Patches of one picture, or of all tiles where the tower always takes several."""
    config = getattr(model.config, "vision_config", None)
    if config is None:
        return 0
    height, width = _pair(getattr(config, "image_size", None) or load.image_size)
    patch_height, patch_width = _pair(getattr(config, "patch_size", None) or 14)
    tiles = getattr(config, "max_num_tiles", 1)
    return (height // patch_height * (width // patch_width) + 1) * tiles


def _vision_workspace(model: PreTrainedModel, load: Load) -> int:
    """The fullest moment of a tower with all images of all rows."""
    config, count = getattr(model.config, "vision_config", None), load.rows * load.images
    if config is None or not count:
        return 0
    if getattr(config, "image_size", None) is not None:
        try:
            return _measured_tower(model, count)
        except Exception:  # towers that take more than pixels, or sizes as values
            pass
    # all that the linear layers of the widest block take and give, as if at once
    text_path = text_model_path(model)
    widths = [
        _width(block)
        for name, blocks in model.named_modules()
        if isinstance(blocks, nn.ModuleList) and not name.startswith(f"{text_path}.")
        for block in blocks
    ]
    return count * _image_tokens(model, load) * max(widths, default=0) * model.dtype.itemsize


def _measured_tower(model: PreTrainedModel, count: int) -> int:
    config = model.config.vision_config
    height, width = _pair(config.image_size)
    watch = PeakBytes(META)
    with on_meta(watch, model):
        channels = getattr(config, "num_channels", 3)
        pixels = torch.empty(count, channels, height, width, dtype=model.dtype)
        held = (pixels, cast(Any, model).get_image_features(pixel_values=pixels))
    del held
    return watch.peak


def _width(block: nn.Module) -> int:
    return sum(sum(p.shape[-2:]) for p in block.parameters() if p.dim() == 2)


def _pair(size: int | list[int] | tuple[int, ...]) -> tuple[int, int]:
    height, width = size[:2] if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


# -- the stages of a training, while they answer ---------------------------------------------------
# How many places for keys and values there are follows from the way in which `AnswerGroups` reads
# and steps.


@dataclass(frozen=True)
class AnswerLoad:
    """What a pipeline is asked to answer.

    Attributes:
        num_prompts: that wait together.
        copies: answers to each.
        lot_size: prompts that are answered together.
        lots_at_once: that are on their way through the stages.
        prompt_tokens, answer_tokens: of the longest prompt and answer.
    """

    num_prompts: int
    copies: int
    lot_size: int
    lots_at_once: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def rows(self) -> int:
        """Answers of a lot, which one step brings forward together."""
        return min(self.num_prompts, self.lot_size) * self.copies

    @property
    def columns(self) -> int:
        """Tokens of a row in the last step; what that step draws is in no cache."""
        return self.prompt_tokens + self.answer_tokens - 1

    @property
    def cells(self) -> int:
        """Places for the keys and values of a token that buffers have at once, used or not.

        Those of rows that are as long as they may be, in lots that are all as far; and while a lot
        reads, those of the last prompt, before they are in its own.
        """
        num_full, rest = divmod(self.num_prompts, self.lot_size)
        num_rows = min(num_full, self.lots_at_once) * self.lot_size
        if num_full < self.lots_at_once:
            num_rows += rest
        width = whole_columns(self.columns)
        grown = self.prompt_tokens + max(1, self.prompt_tokens // 4)
        read = whole_columns(min(grown, self.columns))
        joining = self.copies * whole_columns(self.prompt_tokens) if self.rows > self.copies else 0
        beyond = max(0, self.rows * read + joining - self.rows * width)
        return num_rows * self.copies * width + beyond

    @property
    def moved_cells(self) -> int:
        """Places of a buffer that is there twice while its lot grows, at most."""
        return self.rows * whole_columns(self.columns)


def answer_cost(stage: Stage, loads: Sequence[AnswerLoad]) -> Cost:
    """The `cache` and `answering` of a stage on the meta device, or of a piece of one.

    Of the largest of some loads: caches of all lots when they take most, and the fullest moment
    beside them: of the pass over a prompt, of a step with the choice of its tokens, or of a buffer
    that moves.

    Keys and values of images that layers look at themselves are not counted, nor is a tower.
    """
    rows, columns = max(load.rows for load in loads), max(load.columns for load in loads)
    width = max(load.prompt_tokens for load in loads)
    _ = stage.can_decode  # tried here, not while tensors without values are measured
    with answering([stage]), torch.no_grad():
        prompt, _ = _pass(stage, _cache(stage, rows=1, columns=0, room=width), width)
        steps = _cache(stage, rows=rows, columns=columns - 1, room=columns)
        step, output = _pass(stage, steps, 1)
    num_cells = steps.window.row_capacity * steps.window.column_capacity
    buffers = steps.buffer_bytes()
    if stage.is_last:  # tokens are chosen when all between what came and the logits is gone
        # with ids and positions of this step and the next, which the group keeps
        came = tensor_bytes(stage.get_example_input(rows, 1)) + 4 * 8 * rows
        step = max(step, came + output.nbytes + choice_bytes(rows, output.shape[-1]))
    moved = max(buffers, default=0) // num_cells * max(load.moved_cells for load in loads)
    return Cost(
        cache=sum(buffers) // num_cells * max(load.cells for load in loads),
        answering=max(prompt, step, moved),
    )


def _cache(stage: Stage, *, rows: int, columns: int, room: int) -> GroupCache:
    """With so many columns in use, which nobody wrote, and room for as many as that."""
    cache = GroupCache(stage.num_cache_layers(), rows, fixed_layers=stage.fixed_layers())
    cache.begin(room, lengths=[room] * rows)
    cache.window.first_columns = [0] * rows
    cache.advance(columns)
    return cache


def _pass(stage: Stage, cache: GroupCache, num_new: int) -> tuple[int, torch.Tensor]:
    """The most that a pass makes beside the cache, with what comes in; and what it gives."""
    rows = cache.window.num_rows
    inputs = stage.get_example_input(rows, num_new)
    batch: dict[str, object] = {
        "position_ids": torch.empty(rows, num_new, dtype=torch.long, device=META),
        "past_key_values": cache,
    }
    if stage.is_last and can_keep_logits(stage):
        batch["logits_to_keep"] = 1
    watch = PeakBytes(META)
    with on_meta(watch, stage):
        inputs = tuple(torch.empty_like(value) for value in inputs)
        # one that has all its dimensions: the library would look into any other. Prompts of several
        # lengths are told apart by it; kernels for one alone do without
        kind = torch.bool if rows > 1 else _float_type(stage)
        mask = torch.empty(rows, 1, num_new, cache.window.width + num_new, dtype=kind)
        output = stage(*inputs, attention_mask=mask, **batch)
    output = output[0] if isinstance(output, tuple) else output
    return max(0, watch.peak - cache.num_bytes()), output


def _float_type(stage: Stage) -> torch.dtype:
    kinds = (p.dtype for p in stage.parameters() if p.is_floating_point())
    return next(kinds, torch.get_default_dtype())
