"""How often, how wide and where LoRA is put on each part of a model: tower, projector, decoder.

Targets are looked up in the whole model before a stage drops what others own: what matches nothing
is told on every stage alike, and a stage without such a layer is none the worse. Not here: the
layers themselves (`lora.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from stageline.errors import UserError
from stageline.modules.lora import (
    ALL_LINEAR,
    MAX_NAMES_SHOWN,
    Target,
    is_target,
    linear_names,
    wrap_linear,
)
from stageline.modules.lora_layer import PISSA

LORA_PARTS = {"vit": "vision tower", "mlp": "projector", "llm": "language model"}
EVERYTHING = ("all", ["all"], ALL_LINEAR, [ALL_LINEAR])
SETTINGS = ("num", "rank", "alpha", "target")


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

    @property
    def layer_options(self) -> dict[str, Any]:
        """What `wrap_linear` takes of it."""
        names = ("rank", "alpha", "dropout", "use_rslora", "use_dora", "start")
        return {name: getattr(self, name) for name in names}


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

    Raises:
        TypeError: an argument that no part has.
        UserError: DoRA or PiSSA for a stack of adapters.
    """
    kind: dict[str, Any] = {"use_rslora": use_rslora, "use_dora": use_dora, "start": lora_init}
    everywhere: dict[str, Any] = {
        "num": 0,
        "rank": lora_rank,
        "alpha": lora_alpha,
        "target": lora_target,
    }
    found = {}
    for part in LORA_PARTS:
        own = {name: of_parts.pop(f"{part}_lora_{name}", None) for name in SETTINGS}
        given = {name: value for name, value in own.items() if value is not None}
        chosen = {**everywhere, **given}
        chosen["target"] = None if chosen["target"] in EVERYTHING else chosen["target"]
        found[part] = PartLoRA(dropout=lora_dropout, exclude=lora_exclude, **kind, **chosen)
        _check_stack(part, found[part])
    if of_parts:
        raise TypeError(f"a stage model takes no argument {', '.join(map(repr, sorted(of_parts)))}")
    return found


def _check_stack(part: str, lora: PartLoRA) -> None:
    """Refuses on several adapters what is about the one weight below."""
    is_pissa = lora.start.startswith(PISSA)
    if lora.num > 1 and (lora.use_dora or is_pissa):
        option = "`use_dora`" if lora.use_dora else f"`lora_init` {lora.start}"
        raise UserError(
            f"{option} came with `{part}_lora_num` {lora.num}, 1 was expected: it is about the "
            "weight below, which is one adapter's alone. To build on an earlier adapter merge it: "
            "`adapter_path` FOLDER `create_new_adapter`."
        )


def find_targets(
    whole: nn.Module,
    parts: Mapping[str, list[str]],
    lora: Mapping[str, PartLoRA],
    *,
    kept: Iterable[str] = (),
) -> dict[str, PartLoRA]:
    """The same LoRA with full names for targets, those of all stages.

    Args:
        whole: the model before anything is dropped.
        parts: module path prefixes of each part.
        kept: paths of modules that are trained whole and get no LoRA.

    Raises:
        UserError: a part with LoRA has no layer that its target matches.
    """
    found = dict(lora)
    for part, one in lora.items():
        if not one.num:
            continue
        names = [
            name
            for prefix, skip in _prefixes(part, parts)
            for name in _linear_names_below(whole, prefix, skip=[*skip, *kept])
        ]
        chosen = frozenset(
            name
            for name in names
            if is_target(name, one.target)
            and (one.exclude is None or not is_target(name, one.exclude))
        )
        if not chosen:
            raise _no_match(part, one, names)
        found[part] = replace(one, target=chosen)
    return found


def _linear_names_below(whole: nn.Module, prefix: str, *, skip: list[str]) -> list[str]:
    try:
        module = whole.get_submodule(prefix)
    except AttributeError:
        return []  # a parameter by itself: the line end of LLaVA-NeXT
    return linear_names(module, prefix=prefix, skip=skip)


def wrap_parts(
    model: nn.Module, parts: Mapping[str, list[str]], lora: Mapping[str, PartLoRA]
) -> None:
    """Wraps the layers of each part, in place, as often as it says."""
    for part, one in lora.items():
        for prefix, skip in _prefixes(part, parts):
            for _ in range(one.num):
                _wrap(model, prefix, skip, one)


def _wrap(model: nn.Module, prefix: str, skip: list[str], lora: PartLoRA) -> None:
    try:
        module = model.get_submodule(prefix)
    except AttributeError:
        return  # another stage owns this part
    wrapped = wrap_linear(
        module, prefix=prefix, skip=skip, target=lora.target, **lora.layer_options
    )
    if wrapped is not module:  # the part is a linear layer itself
        model.set_submodule(prefix, wrapped)


def _prefixes(part: str, parts: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, list[str]]]:
    """(prefix of a part, those of others inside it)."""
    others = [prefix for other, own in parts.items() if other != part for prefix in own]
    for prefix in parts.get(part, ()):
        yield prefix, [other for other in others if other.startswith(prefix + ".")]


def _no_match(part: str, lora: PartLoRA, names: list[str]) -> UserError:
    if not names:
        return UserError(
            f"`{part}_lora_num` {lora.num} came, and the model has no linear layer in its "
            f"{LORA_PARTS[part]}; one at least was expected: LoRA goes on linear layers. Leave "
            f"`{part}_lora_num` out for this model."
        )
    target = lora.target if isinstance(lora.target, str) else ",".join(lora.target or ())
    endings = sorted({name.rpartition(".")[2] for name in names})
    if lora.exclude is not None and any(is_target(name, lora.target) for name in names):
        left_out = lora.exclude if isinstance(lora.exclude, str) else ",".join(lora.exclude)
        return UserError(
            f"`lora_exclude` {left_out} leaves none of the {len(names)} linear layers in the "
            f"{LORA_PARTS[part]}, one at least was expected: LoRA goes on what is left. Exclude "
            f"fewer of {', '.join(endings[:MAX_NAMES_SHOWN])}."
        )
    return UserError(
        f"`{part}_lora_target` (or `lora_target`) {target} matches none of the {len(names)} linear "
        f"layers in the {LORA_PARTS[part]}, at least one was expected: LoRA goes on linear layers. "
        f"Name some of {', '.join(endings[:MAX_NAMES_SHOWN])}, or give `{part}_lora_target` all."
    )
