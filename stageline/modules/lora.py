"""LoRA (Hu et al. 2021, arXiv 2106.09685): small trainable matrices next to frozen linear layers.

A wrapped layer `linear` keeps its weight as `linear.lora_module.weight` and gains
`linear.lora.lora_A.weight` and `linear.lora.lora_B.weight`; wrapping again nests. A module with
fused weights of experts is wrapped once for all of them: `experts.lora_module.down_proj`,
`experts.lora.down_proj.lora_A.weight`. Works on the meta device. Not here: files (see
`stageline/checkpoint/adapter.py`).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from stageline.errors import UserError
from stageline.modules.expert_weight import ExpertWeight, LowRank, expert_parameters, reads_instead
from stageline.modules.lora_layer import (
    ExpertLoRALayer,
    ExpertParameter,
    Linear,
    LoRALayer,
    dense_weight,
    init_lora_layer,
    linear_sizes,
    put_weight,
)

WRAPPED = "lora_module"
ALL_LINEAR = "all-linear"
EVERYTHING = ("all", ALL_LINEAR)
MAX_NAMES_SHOWN = 20
# None: every layer; a list of endings or expressions; one expression; a set of full names
Target = list[str] | str | frozenset[str] | None


def wrapped_module(name: str) -> str:
    """Return the plain path of the layer that a parameter of a wrapped layer belongs to."""
    return re.split(rf"\.{WRAPPED}\.|\.lora\.(?:\w+\.)?lora_", name, maxsplit=1)[0]


class LoRAWrapper(nn.Module):
    """A linear layer (or a wrapped one) and its adapter; stands in the layer's place.

    Args:
        module: `nn.Linear`, `Conv1D` or a `LoRAWrapper`.
        rank: rank of the adapter.
        alpha: the adapter's output is scaled by alpha / rank.
        dropout: on the adapter's input.
        use_rslora: it is scaled by alpha / sqrt(rank) (arXiv 2312.03732).
        use_dora: a magnitude for each output, too; not together with another adapter.
        start: see `init_lora_layer`.
        dtype: of the adapter; None: the weight's, or float32 where that holds no floats.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        use_rslora: bool = False,
        use_dora: bool = False,
        start: str = "default",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not is_linear(module):
            raise UserError(
                f"LoRA needs a linear layer; {type(module).__name__} is not one. Choose an "
                "nn.Linear or Conv1D, or train the module whole with `modules_to_save`."
            )
        self.lora_module = module
        self.in_features, self.out_features = linear_sizes(innermost(module))
        weight = self.weight
        self.lora = LoRALayer(
            self.in_features,
            self.out_features,
            rank=rank,
            scale=alpha / rank**0.5 if use_rslora else alpha / rank,
            dropout=dropout,
            use_dora=use_dora,
            device=weight.device,
            dtype=dtype or (weight.dtype if weight.is_floating_point() else None),
        )
        self.lora.use_rslora, self.lora.start = use_rslora, start

    @property
    def weight(self) -> torch.Tensor:
        """Return the innermost weight: model code reads its dtype."""
        return innermost(self).weight

    @property
    def bias(self) -> torch.Tensor | None:
        return innermost(self).bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lora.added_to(self.lora_module(x), x, innermost(self))


class ExpertsLoRA(LoRAWrapper):
    """A module with fused weights of experts (or a wrapped one) and adapters of some of them.

    The module's own forward pass reads weights with the adapters' products added; attributes are
    those of the module.

    Args:
        leaves: last names of the weights with an adapter.
        rank, alpha, use_rslora, start, dtype: as of `LoRAWrapper`.
    """

    def __init__(
        self,
        module: nn.Module,
        leaves: Iterable[str],
        *,
        rank: int,
        alpha: float,
        use_rslora: bool = False,
        start: str = "default",
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.lora_module = module
        experts = innermost(module)
        layers: dict[str, nn.Module] = {}
        for leaf in leaves:
            weight = cast(torch.Tensor, experts._parameters[leaf])
            layers[leaf] = layer = ExpertLoRALayer(
                weight,
                rank=rank,
                is_transposed=getattr(experts, "is_transposed", False),  # peft reads it too
                scale=alpha / rank**0.5 if use_rslora else alpha / rank,
                device=weight.device,
                dtype=dtype or (weight.dtype if weight.is_floating_point() else None),
            )
            layer.use_rslora, layer.start = use_rslora, start
        self.lora = nn.ModuleDict(layers)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("lora_module"), name)

    @property
    def weight(self) -> torch.Tensor:
        return innermost(self).weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        experts, own = innermost(self), {}
        for leaf, layer in adapters_in(self).items():
            before = getattr(experts, leaf)
            term = LowRank(*cast(ExpertLoRALayer, layer).factors(), layer.scale)
            weight = before if isinstance(before, ExpertWeight) else ExpertWeight(before)
            own[leaf] = ExpertWeight(weight.base, (*weight.terms, term))
        with reads_instead(experts, own):
            return self.lora_module(*args, **kwargs)


def adapters_in(wrapper: LoRAWrapper) -> dict[str, LoRALayer]:
    """Return the adapters of a wrapper by the last name of what they adapt; "": the whole layer."""
    if isinstance(wrapper, ExpertsLoRA):
        return {leaf: cast(LoRALayer, layer) for leaf, layer in wrapper.lora._modules.items()}
    return {"": wrapper.lora}


class RowChoice:
    """Adapter of each row of a pass; the layers of one stage share it.

    Attributes:
        rows: number of each row's adapter, 0: none; empty: no row has one.
        numbers: those of `rows`, each once, rising.
    """

    def __init__(self) -> None:
        self.rows: tuple[int, ...] = ()
        self.numbers: tuple[int, ...] = ()
        self._places: dict[int, torch.Tensor] = {}

    def begin(self, rows: Iterable[int]) -> None:
        """Set the rows of the pass that follows."""
        self.rows, self._places = tuple(rows), {}
        self.numbers = tuple(sorted(set(self.rows)))

    def places(self, number: int, device: torch.device) -> torch.Tensor:
        """Return the rows that have an adapter."""
        if number not in self._places:
            found = [place for place, one in enumerate(self.rows) if one == number]
            self._places[number] = torch.tensor(found, device=device)
        return self._places[number]


class RowLoRA(nn.Module):
    """A linear layer and adapters of which each row of a batch has one or none; only to answer.

    Attributes:
        adapters: by number.
    """

    def __init__(self, module: Linear, choice: RowChoice) -> None:
        super().__init__()
        self.lora_module = module
        self.choice = choice
        self.adapters = nn.ModuleDict()
        self.in_features, self.out_features = linear_sizes(module)

    @property
    def weight(self) -> torch.Tensor:
        """Return that of the layer: model code reads its dtype."""
        return self.lora_module.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.lora_module.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.lora_module(x)
        numbers = self.choice.numbers
        here = [number for number in numbers if str(number) in self.adapters]
        if not here:
            return result
        if len(numbers) == 1:
            return self._added_to(result, here[0], x)
        # models may have put rows and tokens together
        num_rows = len(self.choice.rows)
        assert len(x) % num_rows == 0, f"{list(x.shape)} has not {num_rows} rows"
        x_B, result_B = (
            value if len(value) == num_rows else value.unflatten(0, (num_rows, -1))
            for value in (x, result)
        )
        for number in here:
            own = self.choice.places(number, x.device)
            result_B = result_B.index_copy(0, own, self._added_to(result_B[own], number, x_B[own]))
        return result_B.reshape(result.shape)

    def _added_to(self, result: torch.Tensor, number: int, x: torch.Tensor) -> torch.Tensor:
        layer = cast(LoRALayer, self.adapters[str(number)])
        return layer.added_to(result, x, self.lora_module)


def is_linear(module: nn.Module | None) -> bool:
    """Whether a module can be wrapped: also one of another class that says so itself.

    Of linear layers' own subclasses those that give one output for each of its rows: routers give
    tuples, grouped products other sizes.
    """
    known = isinstance(module, (nn.Linear, Conv1D, LoRAWrapper)) and _gives_rows(module)
    known = known and not isinstance(module, ExpertsLoRA)
    return known or getattr(module, "is_linear_layer", False)


@torch.no_grad()
def _gives_rows(module: nn.Module) -> bool:
    """Whether a layer gives one row of outputs for one of inputs; only doubtful ones are tried."""
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return True
    if not type(module).__module__.startswith("transformers.models."):
        return True  # quantised, say
    row = torch.zeros(1, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    try:
        made = module(row)
    except RuntimeError:  # it takes rows of another shape
        return False
    return isinstance(made, torch.Tensor) and made.shape == (1, module.out_features)


def wrap_linear(
    module: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    target: Target = None,
    prefix: str = "",
    skip: Iterable[str] = (),
    seed: int = 0,
    **kind: Any,
) -> nn.Module:
    """Put an adapter on linear layers and on fused weights of experts that the target names.

    In place; a layer that has one gets a further one.

    Args:
        module: where to look; it may be a linear layer itself.
        target: None: every linear layer; a list: endings of names (`q_proj`, `mlp.down_proj`, of
            experts `experts.down_proj`), entries with regular-expression characters must match a
            full name; a string: one expression for full names; a frozenset: full names. What it
            does not match here is on another stage: `find_targets` looks for it in the whole model.
        prefix: the module's own path, for full names.
        skip: paths that are left alone, with all below them.
        seed: of A, with the parameter's full name; weights on meta are drawn when they are filled.
        kind: `use_rslora`, `use_dora` and `start` of `LoRAWrapper`.

    Returns:
        The module, or its wrapper when it is a linear layer itself.
    """
    root = module
    for parent, inner, name in list(_candidates(module, prefix, tuple(skip))):
        if not is_target(name, target):
            continue
        wrapper = LoRAWrapper(inner, rank=rank, alpha=alpha, dropout=dropout, **kind)
        full_name = f"{name}.lora" if name else "lora"
        init_lora_layer(wrapper.lora, full_name, seed=seed, base=innermost(wrapper))
        if parent is None:
            root = wrapper
        else:
            parent._modules[name.rpartition(".")[2]] = wrapper
    for parent, inner, name in list(_expert_modules(module, prefix, tuple(skip))):
        found = expert_parameters(innermost(inner))
        leaves = [one for one in found if is_target(f"{name}.{one}", target, is_parameter=True)]
        if not leaves:
            continue
        options = {key: kind[key] for key in ("use_rslora", "start", "dtype") if key in kind}
        experts = ExpertsLoRA(inner, leaves, rank=rank, alpha=alpha, **options)
        for one, layer in adapters_in(experts).items():
            init_lora_layer(layer, f"{name}.lora.{one}".lstrip("."), seed=seed)
        if parent is None:
            root = experts
        else:
            parent._modules[name.rpartition(".")[2]] = experts
    return root


Found = tuple[nn.Module | None, nn.Module, str]  # parent, what was found in it, full name


def _expert_modules(
    module: nn.Module, name: str, skip: tuple[str, ...], parent: nn.Module | None = None
) -> Iterator[Found]:
    """Yield every module with fused weights of experts."""
    if name and name in skip:
        return
    if expert_parameters(innermost(module)):
        yield parent, module, name
    elif not isinstance(module, LoRAWrapper):
        for leaf, child in module.named_children():
            yield from _expert_modules(child, f"{name}.{leaf}" if name else leaf, skip, module)


def expert_names(module: nn.Module, *, prefix: str = "", skip: Iterable[str] = ()) -> list[str]:
    """Return the full names of the fused weights that `wrap_linear` would look at."""
    return [
        f"{name}.{leaf}" if name else leaf
        for _, found, name in _expert_modules(module, prefix, tuple(skip))
        for leaf in expert_parameters(innermost(found))
    ]


def _candidates(
    module: nn.Module, name: str, skip: tuple[str, ...], parent: nn.Module | None = None
) -> Iterator[Found]:
    """Yield every linear layer that is called as a module."""
    if name and name in skip:
        return
    if is_linear(module):
        if "weight" in vars(module):
            return  # another stage has the weight, zeros stand for it here
        yield parent, module, name
        return
    # attention of torch reads the weight of its linear layer and never calls it
    if isinstance(module, ExpertsLoRA | nn.MultiheadAttention):
        return
    for leaf, child in module.named_children():
        yield from _candidates(child, f"{name}.{leaf}" if name else leaf, skip, module)


def linear_names(module: nn.Module, *, prefix: str = "", skip: Iterable[str] = ()) -> list[str]:
    """Return the full names of the layers that `wrap_linear` would look at."""
    return [name for _, _, name in _candidates(module, prefix, tuple(skip))]


def is_target(name: str, target: Target, *, is_parameter: bool = False) -> bool:
    """Whether a target, see `wrap_linear`, means the layer of this full name.

    Args:
        is_parameter: the name is that of a fused weight of experts, which an ending means only if
            it has the module's name too: `down_proj` means linear layers.
    """
    if target is None or target == ALL_LINEAR:
        return not is_parameter
    if isinstance(target, frozenset):
        return name in target
    if isinstance(target, str):
        return re.fullmatch(target, name) is not None
    return any(
        re.fullmatch(one, name) is not None
        if re.search(r"[*+?()\[\]|^$\\]", one)
        else name == one
        or (name.endswith("." + one) and (not is_parameter or "." in one))
        or (one in EVERYTHING and not is_parameter)
        for one in target
    )


def endings_of(names: Iterable[str], num_parts: int = 1) -> list[str]:
    """Return the last parts of names, as many as an error shows."""
    return sorted({".".join(n.split(".")[-num_parts:]) for n in names})[:MAX_NAMES_SHOWN]


class Adapted(NamedTuple):
    """An adapter and what it adapts, below all adapters."""

    lora: LoRALayer
    base: Linear | ExpertParameter


def lora_stacks(model: nn.Module) -> dict[str, list[Adapted]]:
    """Return plain name of a module, or of a weight of experts -> its adapters, innermost first."""
    stacks: dict[str, list[Adapted]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoRAWrapper):
            continue
        base = innermost(module)
        for leaf, layer in adapters_in(module).items():
            path = ".".join(filter(None, (strip_lora(name), leaf)))
            one = Adapted(layer, ExpertParameter(base, leaf) if leaf else base)
            stacks.setdefault(path, []).insert(0, one)
    return stacks


Place = tuple[nn.Module, str, LoRAWrapper]  # parent, name in it, what stands there


def outermost(model: nn.Module) -> list[Place]:
    """Return where the outermost adapters of a model are."""
    return [
        (parent, leaf, child)
        for parent in model.modules()
        if not isinstance(parent, LoRAWrapper)
        for leaf, child in parent._modules.items()
        if isinstance(child, LoRAWrapper)
    ]


@contextmanager
def _replaced(
    places: Iterable[Place], stand_in: Callable[[LoRAWrapper], nn.Module]
) -> Iterator[None]:
    """While open, something else stands in the places of wrapped layers."""
    places = list(places)
    try:
        for parent, leaf, wrapper in places:
            parent._modules[leaf] = stand_in(wrapper)
        yield
    finally:
        for parent, leaf, wrapper in places:
            parent._modules[leaf] = wrapper


def unwrapped(model: nn.Module) -> AbstractContextManager[None]:
    """While open, wrapped layers stand in their places without adapters: names are plain."""
    return _replaced(outermost(model), innermost)


def adapters_off(models: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """While open, the outermost adapter of every layer has no part in the passes.

    The layer below stands in the adapter's place, so what runs is the very code and weights of the
    model as it was before the adapter was trained. Adapters below the outermost stay: they belong
    to the model that training began with.
    """
    places = [place for model in models for place in outermost(model)]
    return _replaced(places, lambda wrapper: wrapper.lora_module)


def innermost(module: nn.Module) -> Linear:
    """Return the layer below all adapters."""
    while isinstance(module, LoRAWrapper):
        module = module.lora_module
    return cast(Linear, module)  # `is_linear` said so when it was wrapped


@torch.no_grad()
def merge_lora(model: nn.Module) -> nn.Module:
    """Add every adapter to its weight and remove it; return the model.

    The sum is made in at least float32 and rounded once to the weight's dtype.

    Raises:
        UserError: a weight is quantised.
    """
    for stack in lora_stacks(model).values():
        base = stack[0].base
        weight = dense_weight(base)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if len(stack) == 1:
            total = stack[0].lora.merged(weight)
        else:
            total = weight.to(dtype) + sum(one.lora.delta(dtype) for one in stack)
        put_weight(base, total, why="merging an adapter")
    if isinstance(model, LoRAWrapper):
        return innermost(model)
    for parent, leaf, wrapper in outermost(model):
        parent._modules[leaf] = innermost(wrapper)
    return model


def strip_lora(name: str) -> str:
    """Return a module's or parameter's name in the model without any LoRA."""
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def is_lora_name(name: str) -> bool:
    """Whether a name is that of a weight of an adapter, of any depth."""
    pattern = r"(^|\.)lora\.(\w+\.)?lora_([AB]\.weight|magnitude_vector)$"
    return re.search(pattern, name) is not None


def is_expert_lora(name: str) -> bool:
    """Whether a name is that of a weight of an adapter of experts."""
    return re.search(r"(^|\.)lora\.\w+\.lora_[AB]\.weight$", name) is not None


def key_map_without_last_lora(names: Iterable[str]) -> dict[str, str]:
    """Map names in a checkpoint that holds all but the outermost adapter to names here.

    The outermost adapter's own weights are not in the map: they start fresh.
    """
    key_map = {}
    for name in names:
        parts = name.split(".")
        if WRAPPED in parts:
            parts.remove(WRAPPED)  # the first one is the outermost wrapper's
            key_map[".".join(parts)] = name
        elif not is_lora_name(name):
            key_map[name] = name
    return key_map


def trained_besides(model: nn.Module) -> list[str]:
    """Return the names of what is trained and would still be there with adapters off."""
    inside = {
        id(parameter)
        for _, _, wrapper in outermost(model)
        for name, parameter in wrapper.named_parameters()
        if not name.startswith("lora_module.")
    }
    named = model.named_parameters()
    return [name for name, p in named if p.requires_grad and id(p) not in inside]


def begun_adapters(model: nn.Module) -> list[str]:
    """Return the names of outermost adapters that add something already."""
    found = []
    for name, parameter in model.named_parameters():
        is_outermost = is_lora_name(name) and ".lora_B." in name and "lora_module." not in name
        if not is_outermost or parameter.is_meta:
            continue
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if bool(torch.any(own != 0)):
            found.append(name)
    return found
