"""Start without a checkpoint: the same random weights for every number of stages.

Each module draws from a seed of its own, made of the run's seed and the module's name, with the
model's own `_init_weights`.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from stageline.contracts import part_name
from stageline.device import generators_kept
from stageline.errors import NonFiniteError, UserError
from stageline.modules.lora import (
    LoRAWrapper,
    adapters_in,
    innermost,
    is_lora_name,
    strip_lora,
    unwrapped,
)
from stageline.modules.lora_layer import Pair, init_lora_layer, name_seed
from stageline.modules.pass_through import DONE, PassThrough
from stageline.stage import Stage

MOST_NAMED = 3


def check_finite(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    what: str,
    cure: str,
    place_of: Callable[[str], str] = lambda name: "",
) -> None:
    """Refuse floating tensors with inf or nan; one pass over each.

    Args:
        what: what they are: "weights of step 200".
        cure: what to do about it, a sentence.
        place_of: name -> where it comes from, such as a file.

    Raises:
        NonFiniteError: names the first ones that are not finite.
    """
    bad = [(name, tensor) for name, tensor in named_tensors if not is_finite(tensor)]
    if not bad:
        return
    told = []
    for name, tensor in bad[:MOST_NAMED]:
        values = tensor.detach().float()
        nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
        told.append(f"{name} ({place_of(name)}{nan} nan, {inf} inf of {values.numel()} values)")
    more = f" and {len(bad) - MOST_NAMED} more tensors" if len(bad) > MOST_NAMED else ""
    raise NonFiniteError(f"{what} are not finite: {', '.join(told)}{more}. {cure}")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are numbers. Makes no copy, unless their sum overflows."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return True
    tensor = tensor.detach()
    if tensor.element_size() == 1:  # eight bits: torch has few operations on them
        tensor = tensor.float()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool(tensor.sum(dtype=wide).isfinite()) or bool(tensor.isfinite().all())


CPU = torch.device("cpu")
UNSET = -(2**31)  # for whole numbers what NaN is for others


def init_split_model(
    model: Stage, *, seed: int, device: torch.device | str, dtype: torch.dtype
) -> None:
    """Fill a stage that is on meta with random weights, in place.

    Args:
        model: a stage model, with or without LoRA.
        seed: the same seed gives the same weights on any number of stages and any device: the
            host draws, since the numbers of a GPU depend on its count of multiprocessors.
        device: of the weights, at the end.
        dtype: of the parameters; buffers keep their own.

    Raises:
        UserError: the model's own code leaves a parameter without a value.
    """
    model.loaded_from = None
    materialise(model, device=CPU, dtype=dtype)
    with unwrapped(model):
        run_init(model, seed=seed, device=CPU)
        check_filled(model, "the model's own _init_weights")
    cast(nn.Module, model).to(device)
    init_lora(model, seed=seed)


def float32_names(whole: object, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a test for names of weights that a family keeps in float32 in a model of a half type.

    One is the bias of DeepSeek-V3's routers. They are those that `from_pretrained` keeps.
    """
    plan = whole._get_dtype_plan(dtype) if isinstance(whole, PreTrainedModel) else ()
    kept = re.compile("|".join(one.replace("*", ".*") for one in plan) or "(?!)")
    return lambda name: not is_lora_name(name) and kept.search(strip_lora(name)) is not None


def loaded_dtype(
    build: Callable[..., PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype
) -> Callable[[str], torch.dtype]:
    """Return a function of a weight's name: the type that `from_pretrained` with `dtype` gives it.

    Args:
        build: (config, dtype) -> the model.
    """
    with torch.device("meta"):
        built = build(copy.deepcopy(config), dtype=dtype)
    dtypes = {name: tensor.dtype for name, tensor in built.state_dict().items()}
    is_kept = float32_names(built, dtype)
    return lambda name: torch.float32 if is_kept(name) else dtypes.get(name, dtype)


@torch.no_grad()
def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round weights in place, to the types that `from_pretrained` with this `dtype` gives them."""
    dtype_of = loaded_dtype(type(model)._from_config, model.config, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype_of(name))


@torch.no_grad()
def materialise(
    model: nn.Module, *, device: torch.device, dtype: torch.dtype, casts_others: bool = True
) -> None:
    """Give every meta tensor memory, filled with NaN; a weight of two modules stays one.

    Args:
        casts_others: also moves and casts tensors that are not on meta.
    """
    made: dict[int, nn.Parameter] = {}
    whole = getattr(model, "whole", None)
    # transformers builds some tensors in another dtype than the model's on purpose
    built: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    if whole is not None and next(whole.parameters(), None) is not None:
        built = (whole.dtype,)
    is_kept = float32_names(whole, dtype)
    for path, module in model.named_modules():
        for name, old in module._parameters.items():
            if old is None or not (old.is_meta or casts_others):
                continue
            if id(old) not in made:
                own = dtype if old.dtype in built else old.dtype
                own = torch.float32 if is_kept(f"{path}.{name}") else own
                value = _filled(old, device, own)
                new = nn.Parameter(value, requires_grad=old.requires_grad)
                made[id(old)] = made[id(new)] = new
            module._parameters[name] = made[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None and (buffer.is_meta or casts_others):
                is_wide = buffer.is_floating_point() and is_kept(f"{path}.{name}")
                own = torch.float32 if is_wide else buffer.dtype
                module._buffers[name] = _filled(buffer, device, own)


def _filled(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor.detach().to(device=device, dtype=dtype)
    value = torch.empty(tensor.shape, device=device, dtype=dtype)
    # a value that is never set is found by this
    if value.is_floating_point():
        return value.fill_(torch.nan)
    return value.fill_(UNSET) if dtype in (torch.int64, torch.int32) else value.zero_()


@torch.no_grad()
def run_init(model: nn.Module, *, seed: int, device: torch.device) -> None:
    """Run every module's own initialisation; tensors that carry the mark `DONE` keep their value.

    Buffers that are not in checkpoints (rotary frequencies) get their values here too.
    """
    root = getattr(model, "whole", None) or model
    holders: dict[int, list[nn.Module]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    shared = {key for key, modules in holders.items() if len(modules) > 1}
    marked: list[torch.Tensor] = []
    guarded: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    owner = root if isinstance(root, PreTrainedModel) else None
    with generators_kept([device]) as generators:

        def visit(module: nn.Module, name: str, owner: PreTrainedModel | None) -> None:
            """Children first, as transformers does; a model inside a model decides below it."""
            for leaf, child in module.named_children():
                child_owner = child if isinstance(child, PreTrainedModel) else owner
                visit(child, f"{name}.{leaf}" if name else leaf, child_owner)
            if isinstance(module, PassThrough):
                return  # it may have the class of a layer, and has nothing of one
            # code of torch and of model folders (nn.init, weight.data.normal_()) ignores the mark
            knows_mark = owner is not None and type(owner).__module__.startswith("transformers.")
            if not knows_mark:
                _guard(module, guarded)
            # not by torch.manual_seed, which goes through all backends: 80 times as long
            for generator in generators:
                generator.manual_seed(name_seed(seed, name))
            if owner is not None:
                owner._init_weights(module)
            elif hasattr(module, "reset_parameters"):
                cast(Callable[[], None], module.reset_parameters)()
            for parameter in module.parameters(recurse=False):
                # a tied weight is drawn once, by the embedding: the last stage's head comes later
                if id(parameter) in shared and not hasattr(parameter, DONE):
                    setattr(parameter, DONE, True)
                    marked.append(parameter)
            if not knows_mark:
                _guard(module, guarded)  # the modules around it may write to its weights, too

        visit(root, "", owner)
    for values, name, tensor in guarded:
        values[name] = tensor
    for tensor in marked:
        delattr(tensor, DONE)


def _guard(module: nn.Module, guarded: list[tuple[dict[str, Any], str, torch.Tensor]]) -> None:
    """Put zeros, which take memory when written to, in the place of a module's marked tensors."""
    stores: list[dict[str, Any]] = [module._parameters, module._buffers, module.__dict__]
    for values in stores:
        for name, value in list(values.items()):
            if isinstance(value, torch.Tensor) and hasattr(value, DONE):
                zeros = torch.zeros(value.shape, dtype=value.dtype)
                is_weight = isinstance(value, nn.Parameter)
                values[name] = nn.Parameter(zeros, requires_grad=False) if is_weight else zeros
                guarded.append((values, name, value))


@torch.no_grad()
def init_fresh(model: Stage, *, seed: int) -> None:
    """Draw the weights in `model.keys_fresh`, which a checkpoint lacked, as `run_init` would."""
    for path in sorted({name.rpartition(".")[0] for name in getattr(model, "keys_fresh", ())}):
        module = model.get_submodule(path)
        device = next(module.parameters()).device
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(name_seed(seed, path))
            assert model.whole is not None  # transformers' loader reports fresh keys
            model.whole._init_weights(module.to(CPU))
        module.to(device)


def init_lora(
    model: nn.Module,
    *,
    seed: int,
    only_outermost: bool = False,
    taken: Mapping[str, Pair] | None = None,
) -> None:
    """Start the adapters: A random by its name and the seed, B zero, or as `lora_init` says.

    Args:
        taken: plain module name -> what PiSSA took out of its weight when the run began.
    """
    for name, wrapper in list(model.named_modules()):
        full_name = f"{name}.lora" if name else "lora"
        plain = strip_lora(name)
        is_inner = plain != name
        if isinstance(wrapper, LoRAWrapper) and not (only_outermost and is_inner):
            for leaf, layer in adapters_in(wrapper).items():
                init_lora_layer(
                    layer,
                    f"{full_name}.{leaf}" if leaf else full_name,
                    seed=seed,
                    base=None if leaf else innermost(wrapper),
                    taken=(taken or {}).get(plain),
                )


def check_filled(model: nn.Module, source: str) -> None:
    """Refuse a model with a tensor that is on meta or was never given a value."""
    adapters = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, LoRAWrapper)
        for tensor in module.lora.parameters()
    }
    empty = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            is_unset = True
        elif tensor.is_floating_point() or tensor.is_complex():
            is_unset = not is_finite(tensor) and bool(torch.isnan(tensor).any())
        else:
            is_unset = tensor.dtype in (torch.int64, torch.int32) and bool((tensor == UNSET).any())
        if is_unset and id(tensor) not in adapters:
            empty.append(name)
    if empty:
        raise UserError(
            f"{len(empty)} tensors have no value, or NaN, after {source}: {', '.join(empty[:10])} "
            f"of the stage model {part_name(type(model))}. Give the module a reset_parameters() "
            "that sets them, or start from a checkpoint that is whole (`model_path`)."
        )
