"""How often, how wide and where LoRA is put on each part of a model: tower, projector, decoder.

Targets are looked up in the whole model before a stage drops what others own: what matches nothing
is told on every stage alike, and a stage without such a layer is none the worse. Not here: the
layers themselves (`lora.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from stageline.errors import UserError
from stageline.modules.lora import MAX_NAMES_SHOWN, Target, is_target, linear_names, wrap_linear

LORA_PARTS = {"vit": "vision tower", "mlp": "projector", "llm": "language model"}
ALL = "all"
SETTINGS = ("num", "rank", "alpha", "target")


@dataclass(frozen=True)
class PartLoRA:
    """LoRA of one part.

    Attributes:
        num: adapters stacked on each layer; 0: none.
        target: see `wrap_linear`.
    """

    num: int = 0
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target: Target = None

    @property
    def layer_options(self) -> dict[str, object]:
        """What `wrap_linear` takes of it."""
        return {"rank": self.rank, "alpha": self.alpha, "dropout": self.dropout}


def lora_of_parts(
    *,
    lora_rank: int = 8,
    lora_alpha: float = 16.0,
    lora_dropout: float = 0.0,
    lora_target: list[str] | str | None = None,
    **of_parts: object,
) -> dict[str, PartLoRA]:
    """Part -> its LoRA.

    Args:
        of_parts: `vit_lora_num`, `vit_lora_rank`, `vit_lora_alpha`, `vit_lora_target`, and the same
            of `mlp` and `llm`; what is left out or None is what the options of all parts say.

    Raises:
        TypeError: an argument that no part has.
    """
    everywhere = {"num": 0, "rank": lora_rank, "alpha": lora_alpha, "target": lora_target}
    found = {}
    for part in LORA_PARTS:
        own = {name: of_parts.pop(f"{part}_lora_{name}", None) for name in SETTINGS}
        given = {name: value for name, value in own.items() if value is not None}
        chosen = {**everywhere, **given}
        chosen["target"] = None if chosen["target"] in (ALL, [ALL]) else chosen["target"]
        found[part] = PartLoRA(dropout=lora_dropout, **chosen)
    if of_parts:
        raise TypeError(f"a stage model takes no argument {', '.join(map(repr, sorted(of_parts)))}")
    return found


def find_targets(
    whole: nn.Module, parts: Mapping[str, list[str]], lora: Mapping[str, PartLoRA]
) -> dict[str, PartLoRA]:
    """The same LoRA with full names for targets, those of all stages.

    Args:
        whole: the model before anything is dropped.
        parts: module path prefixes of each part.

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
            for name in linear_names(whole.get_submodule(prefix), prefix=prefix, skip=skip)
        ]
        chosen = frozenset(name for name in names if is_target(name, one.target))
        if not chosen:
            raise _no_match(part, one, names)
        found[part] = replace(one, target=chosen)
    return found


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
            f"--{part}-lora-num {lora.num} came, and the model has no linear layer in its "
            f"{LORA_PARTS[part]}; one at least was expected: LoRA goes on linear layers. Leave "
            f"--{part}-lora-num out for this model."
        )
    target = lora.target if isinstance(lora.target, str) else ",".join(lora.target or ())
    endings = sorted({name.rpartition(".")[2] for name in names})
    return UserError(
        f"--{part}-lora-target (or --lora-target) {target} matches none of the {len(names)} linear "
        f"layers in the {LORA_PARTS[part]}, at least one was expected: LoRA goes on linear layers. "
        f"Name some of {', '.join(endings[:MAX_NAMES_SHOWN])}, or give --{part}-lora-target all."
    )
