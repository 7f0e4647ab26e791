"""Put LoRA on the parts of a model: tower, projector, decoder, each with its own settings.

Targets are looked up in the whole model before a stage drops the layers of others: a target that
matches nothing is reported on every stage, and a stage may have no such layer. Not here: the layers
themselves (`lora.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from stageline.errors import UserError, spelled
from stageline.modules.lora import (
    EVERYTHING,
    Target,
    endings_of,
    expert_names,
    is_target,
    linear_names,
    wrap_linear,
)
from stageline.modules.lora_layer import PISSA

LORA_PARTS = {"vit": "vision tower", "mlp": "projector", "llm": "language model"}
LAYER_OPTIONS = ("rank", "alpha", "dropout", "use_rslora", "use_dora", "start")


@dataclass(frozen=True)
class PartLoRA:
    """LoRA of one part.

    Attributes:
        num: adapters stacked on each layer; 0: none.
        target: see `wrap_linear`.
        exclude: layers of the target that get none, told in the same way; None: all get one.
        use_rslora, use_dora, start: see `LoRAWrapper`.
    """

    num: int = 0
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target: Target = None
    exclude: Target = None
    use_rslora: bool = False
    use_dora: bool = False
    start: str = "default"


def lora_of_parts(
    *,
    lora_rank: int = 8,
    lora_alpha: float = 16.0,
    lora_dropout: float = 0.0,
    lora_target: list[str] | str | None = None,
    lora_exclude: list[str] | str | None = None,
    use_rslora: bool = False,
    use_dora: bool = False,
    lora_init: str = "default",
    **of_parts: Any,
) -> dict[str, PartLoRA]:
    """Part -> its LoRA.

    Args:
        lora_exclude: layers that get no LoRA in any part, see `PartLoRA`.
        lora_init: how a new adapter starts, see `init_lora_layer`.
        of_parts: `vit_lora_num`, `vit_lora_rank`, `vit_lora_alpha`, `vit_lora_target`, and the same
            of `mlp` and `llm`; what is left out or None is what the options of all parts say.
    """
    kind: dict[str, Any] = {"use_rslora": use_rslora, "use_dora": use_dora, "start": lora_init}
    kind |= {"dropout": lora_dropout, "exclude": lora_exclude}
    found = {}
    for part in LORA_PARTS:
        chosen: dict[str, Any] = dict(num=0, rank=lora_rank, alpha=lora_alpha, target=lora_target)
        own = {name: of_parts.pop(f"{part}_lora_{name}", None) for name in chosen}
        chosen |= {name: value for name, value in own.items() if value is not None}
        if chosen["target"] in (*EVERYTHING, *([one] for one in EVERYTHING)):
            chosen["target"] = None
        found[part] = PartLoRA(**kind, **chosen)
        is_pissa = found[part].start.startswith(PISSA)
        if found[part].num > 1 and (use_dora or is_pissa):  # both are about the one weight below
            option = "`use_dora`" if use_dora else f"`lora_init` {lora_init}"
            raise UserError(
                f"{option} allows 1 adapter, not `{part}_lora_num` {found[part].num}. To build on "
                "an earlier one merge it: `adapter_path` FOLDER `create_new_adapter`."
            )
    if of_parts:
        raise TypeError(f"a stage model takes no argument {', '.join(map(repr, sorted(of_parts)))}")
    return found


def find_targets(
    whole: nn.Module,
    parts: Mapping[str, list[str]],
    lora: Mapping[str, PartLoRA],
    *,
    kept: Iterable[str] = (),
    notes: list[str] | None = None,
) -> dict[str, PartLoRA]:
    """The same LoRA with full names for targets, those of all stages.

    Args:
        whole: the model before anything is dropped.
        parts: module path prefixes of each part.
        kept: paths of modules that are trained whole and get no LoRA.
        notes: gets a line about experts that a target leaves out.

    Raises:
        UserError: a target means nothing in its part, or what experts cannot have.
    """
    found = dict(lora)
    for part, one in lora.items():
        if not one.num:
            continue
        here: list[tuple[nn.Module, dict[str, Any]]] = [
            (module, {"prefix": prefix, "skip": [*skip, *kept]})
            for prefix, skip in _prefixes(part, parts)
            if (module := module_at(whole, prefix)) is not None
        ]
        names = [name for module, place in here for name in linear_names(module, **place)]
        experts = [name for module, place in here for name in expert_names(module, **place)]
        chosen, excluded = (
            frozenset(
                name
                for group, is_parameter in ((names, False), (experts, True))
                for name in group
                if is_target(name, target, is_parameter=is_parameter)
            )
            for target in (one.target, one.exclude if one.exclude is not None else frozenset())
        )
        if not chosen - excluded:
            raise _no_match(part, one, names, experts)
        chosen -= excluded
        # these cannot be split into a product for each expert; peft refuses them too
        kinds = {
            f"`lora_dropout` {one.dropout:g}": one.dropout > 0,
            "`use_dora`": one.use_dora,
            f"`lora_init` {one.start}": one.start not in ("default", "gaussian"),
        }
        told = [kind for kind, is_set in kinds.items() if is_set]
        if told and (on_experts := endings_of(chosen & set(experts), 2)):
            raise UserError(
                f"{told[0]} does not work with LoRA on experts ({on_experts[0]}), neither here nor "
                "in peft. Drop one of the two."
            )
        left_out = endings_of(set(experts) - chosen - excluded, 2)
        if left_out and notes is not None and not isinstance(one.target, frozenset):
            notes.append(
                f"warning: experts of the {LORA_PARTS[part]} get no LoRA: {', '.join(left_out)}. "
                + spelled("Name them in `lora_target` to adapt them, or in `lora_exclude`.")
            )
        found[part] = replace(one, target=chosen)
    return found


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path; None where another stage has it."""
    try:
        return model.get_submodule(path)
    except AttributeError:  # or it is a parameter: LLaVA-NeXT's line end
        return None


def wrap_parts(
    model: nn.Module, parts: Mapping[str, list[str]], lora: Mapping[str, PartLoRA]
) -> None:
    """Wrap the layers of each part in place, `num` times."""
    for part, one in lora.items():
        for prefix, skip in _prefixes(part, parts):
            for _ in range(one.num):
                module = module_at(model, prefix)
                if module is None:
                    continue
                kind = {name: getattr(one, name) for name in LAYER_OPTIONS}
                wrapped = wrap_linear(module, prefix=prefix, skip=skip, target=one.target, **kind)
                if wrapped is not module:  # the part is a linear layer itself
                    model.set_submodule(prefix, wrapped)


def _prefixes(part: str, parts: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, list[str]]]:
    """(prefix of a part, those of others inside it)."""
    others = [prefix for other, own in parts.items() if other != part for prefix in own]
    for prefix in parts.get(part, ()):
        yield prefix, [other for other in others if other.startswith(prefix + ".")]


def _no_match(part: str, lora: PartLoRA, names: list[str], experts: list[str]) -> UserError:
    if not names and not experts:
        return UserError(
            f"`{part}_lora_num` {lora.num}: the model has no linear layer in its "
            f"{LORA_PARTS[part]}. Drop `{part}_lora_num`."
        )
    target = lora.target if isinstance(lora.target, str) else ",".join(lora.target or ())
    endings = ", ".join([*endings_of(names), *endings_of(experts, 2)])
    is_meant = any(is_target(name, lora.target) for name in names) or any(
        is_target(name, lora.target, is_parameter=True) for name in experts
    )
    if lora.exclude is not None and is_meant:
        left_out = lora.exclude if isinstance(lora.exclude, str) else ",".join(lora.exclude)
        return UserError(
            f"`lora_exclude` {left_out} leaves none of the {len(names)} linear layers in the "
            f"{LORA_PARTS[part]}. Exclude fewer of {endings}."
        )
    return UserError(
        f"`{part}_lora_target` (or `lora_target`) {target} matches none of the {len(names)} linear "
        f"layers in the {LORA_PARTS[part]}. Name some of {endings}, or give `{part}_lora_target` "
        "all."
    )
