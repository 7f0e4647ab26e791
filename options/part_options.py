"""A part's own options: its signature, less what the run supplies.

Turns the signature and docstring of a part into options such as `--dataset.split_type`. Knows the
contract of each register (which arguments come from the run), never a key.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from register import ROOT, Register


@dataclass(frozen=True)
class Contract:
    """What a run hands to a part: so many positional arguments, and keyword arguments by name."""

    num_positional: int = 0
    names: frozenset[str] = frozenset()


def _contract(num_positional: int, names: str = "") -> Contract:
    return Contract(num_positional, frozenset(names.split()))


CONTRACTS: dict[str, Contract] = {
    "model": _contract(2, "images prompts samples batch_size max_new_tokens temperature seed"),
    "train_model": _contract(
        0,
        "config_path processor_path checkpoint_path stage num_stages frozen_vit frozen_mlp "
        "frozen_llm frozen_lm_head vit_lora_num mlp_lora_num llm_lora_num lora_rank lora_alpha "
        "lora_dropout lora_target visual_gpu_ratio vision_stages vision_partition partition dtype "
        "device seed "
        "gradient_checkpointing checkpoint_every checkpoint_mode offload_activations "
        "compile_layers logits_chunk trust_remote_code model_types new_rows vit_lora_rank "
        "mlp_lora_rank llm_lora_rank vit_lora_alpha mlp_lora_alpha llm_lora_alpha "
        "vit_lora_target mlp_lora_target llm_lora_target use_rslora use_dora lora_init "
        "lora_exclude modules_to_save adapter_path create_new_adapter lora_taken_from "
        "neftune_alpha",
    ),
    "builder": _contract(
        1,
        "visual_gpu_ratio dtype num_devices device adapter_path adapter_weights trust_remote_code "
        "placement",
    ),
    "prompt": Contract(),
    "prompt_fn": _contract(2, "processor for_generation examples"),
    "image_token": _contract(2, "processor"),
    "dataset": _contract(0, "dataset_path split"),
    "collate_fn": _contract(
        1,
        "prompt prompt_fn image_token processor pad_token_id max_token_num stage num_stages "
        "pad_to_multiple_of",
    ),
    "loss_fn": _contract(2, "num_targets step sim_fn"),
    "sim_fn": _contract(2),
    "metric": _contract(2),
    "optimizer": _contract(1, "learning_rate weight_decay"),
    "lr_scheduler": _contract(0, "learning_rate min_lr warmup_steps warmup_start_lr total_steps"),
    "tracker": _contract(0, "folder config start_step"),
    "engine": Contract(),
    "document": _contract(1),
    "splitter": _contract(1),
}


@dataclass
class ChosenPart:
    """A part that was chosen by its key, and the values of its own options."""

    register: str
    key: str
    part: Any
    kwargs: dict[str, Any] = field(default_factory=dict)


def add_part_options(
    parser: Any, register: Register, key: str, *, listed: frozenset[str] = frozenset()
) -> None:
    """Adds the options of one part to a jsonargparse parser, as a group of their own.

    Args:
        parser: a `jsonargparse.ArgumentParser`.
        listed: names that the run supplies, but that are options here all the same.
    """
    part = register[key]
    if isinstance(part, str):
        return
    target, method, bound = _target(part)
    skipped = (_supplied(register, target, method, bound=bound) | set(bound)) - listed
    group = parser.add_argument_group(f"{register.option} {key}", register.summary(key))
    adding: dict[str, Any] = {"as_group": False, "skip": skipped, "fail_untyped": False}
    if inspect.isclass(target):
        group.add_class_arguments(target, register.name, **adding)
    elif method is not None:
        group.add_method_arguments(target.__class__, method, register.name, **adding)
    elif inspect.isroutine(target) and _parameters(target):
        group.add_function_arguments(target, register.name, **adding)
    if not group._group_actions:  # nothing to list: no empty heading in --help
        parser._action_groups.remove(group)


def takes(part: Any, name: str) -> Literal["needs", "may have", "no"]:
    """Whether a part has an argument of this name, and whether it can do without."""
    target, method, bound = _target(part)
    for function in _functions(target, method):
        for item in _parameters(function):
            if item.name == name and name not in bound:
                return "needs" if item.default is item.empty else "may have"
    return "no"


def short_home(home: str) -> str:
    """`file:line` relative to the repository where it lies inside."""
    file, _, line = home.rpartition(":")
    path = Path(file)
    if path.is_relative_to(ROOT):
        path = path.relative_to(ROOT)
    return f"{path}:{line}"


def _target(part: Any) -> tuple[Any, str | None, dict[str, Any]]:
    """Unwraps partials: (class, function or object, its method that is called, bound names)."""
    bound: dict[str, Any] = {}
    while isinstance(part, functools.partial):
        positional = [item.name for item in _parameters(part.func)][: len(part.args)]
        bound = {**dict(zip(positional, part.args, strict=False)), **part.keywords, **bound}
        part = part.func
    is_object = not inspect.isclass(part) and not inspect.isroutine(part)
    return part, "__call__" if is_object else None, bound


def _parameters(function: Callable) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built-in functions have no signature to read
        return []


def _supplied(
    register: Register, target: Any, method: str | None, *, bound: dict[str, Any]
) -> set[str]:
    """Names of the arguments that are no options: supplied by the run, or no plain values."""
    contract = CONTRACTS[register.name]
    positional = [
        item.name
        for item in _parameters(target)
        if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)
        and item.name not in bound
    ]
    names = set(contract.names) | set(positional[: contract.num_positional])
    if register.name == "loss_fn":
        names |= set(getattr(target, "counts", ()))  # the run counts, and hands them over
    for function in _functions(target, method):
        hints = _hints(function)
        for item in _parameters(function):
            is_engine_input = register.name == "engine" and item.default is item.empty
            if is_engine_input or not _is_plain(hints.get(item.name, item.annotation)):
                names.add(item.name)
    return names


def _functions(target: Any, method: str | None) -> Iterator[Callable]:
    """The functions whose arguments a call can reach: of a class, also its bases' `__init__`."""
    if inspect.isclass(target):
        yield from (vars(base)["__init__"] for base in target.__mro__ if "__init__" in vars(base))
    else:
        yield getattr(target, method) if method else target


def _hints(function: Callable) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # names that exist for type checkers only
        return {}


def _is_plain(hint: Any) -> bool:
    """Whether values of this type can be written on a command line or in a YAML file."""
    if hint in (int, float, str, bool, type(None), Path, Any, inspect.Parameter.empty):
        return True
    if hint in (list, tuple, dict, set):
        return True
    origin = typing.get_origin(hint)
    if origin is Literal:
        return True
    if origin in (typing.Union, types.UnionType, list, tuple, dict, set):
        return all(_is_plain(item) for item in typing.get_args(hint) if item is not Ellipsis)
    return False
