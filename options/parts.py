"""Read a component's own options: its signature without the arguments of the run.

Turns the signature and docstring of a part into options such as `--dataset.split_type`. Knows the
contract of each register (which arguments come from the run), never a key.
"""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from options.answer import EvaluateConfig
from options.command_line import program_name
from options.fields import argument_name, option_fields
from options.train import RunConfig
from register import ALL_REGISTERS, ROOT, Facts, Register

# types whose values can be written on a command line or in a YAML file
_PLAIN = (int, float, str, bool, type(None), Path, Any, list, tuple, dict, set, Parameter.empty)


@functools.cache
def _handed_options(register: str) -> frozenset[str]:
    """Return the keyword arguments that components of a registry get from options of the run."""
    items = [*option_fields(RunConfig).values(), *option_fields(EvaluateConfig).values()]
    targets = {register, f"{register}?"}
    return frozenset(
        argument_name(item) for item in items if targets & set(item.metadata["to"].split())
    )


@dataclass(frozen=True)
class ChosenPart:
    """A part that was chosen by its key, and the values of its own options."""

    register: str
    key: str
    part: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    facts: Any = Facts()  # an object of the register's class of facts

    @property
    def bound(self) -> Callable[..., Any]:
        """Return the component with its own options."""
        return functools.partial(self.part, **self.kwargs)


def chosen_part(register: str, key: str, kwargs: Mapping[str, Any] = {}) -> ChosenPart:
    """Return the part of a key with its facts.

    Of a register that takes several keys, "a,b", the part is a tuple of the parts of all.
    """
    own = ALL_REGISTERS[register]
    if not own.takes_several:
        return ChosenPart(register, key, own[key], dict(kwargs), own.entry(key).facts)
    parts = tuple(
        ChosenPart(register, one, own[one], dict(kwargs.get(one) or {}), own.entry(one).facts)
        for one in key.split(",")
    )
    named = {f"{one.key}.{name}": value for one in parts for name, value in one.kwargs.items()}
    return ChosenPart(register, key, parts, named)


def add_part_options(
    parser: Any, register: Register, key: str, *, listed: frozenset[str] = frozenset()
) -> None:
    """Add the options of a part to a jsonargparse parser; those of one of several have its key.

    Args:
        listed: names that the run supplies, but that are options here all the same.
    """
    for one in key.split(",") if register.takes_several else [key]:
        part, prefix = register[one], register.name
        if isinstance(part, str):
            continue
        if register.takes_several:
            prefix += f".{one}"
        target, method, bound = _target(part)
        items = [item for function in _functions(target, method) for item in _parameters(function)]
        # supplied by the run: positional arguments, what it hands over or counts, no plain values
        positional = [
            item.name
            for item in _parameters(target)
            if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)
            and item.name not in bound
        ]
        num_positional, handed = register.handed
        skipped = {*positional[:num_positional], *handed, *_handed_options(register.name), *bound}
        skipped.update(getattr(register.entry(one).facts, "counts", ()))
        skipped.update(item.name for item in items if not _is_plain(item.annotation))
        skipped -= listed
        if not {item.name for item in items} - skipped:
            continue
        group = parser.add_argument_group(f"{register.option} {one}", register.summary(one))
        adding: dict[str, Any] = {"as_group": False, "skip": skipped, "fail_untyped": False}
        if inspect.isclass(target):
            group.add_class_arguments(target, prefix, **adding)
        elif method is not None:
            group.add_method_arguments(target.__class__, method, prefix, **adding)
        else:
            group.add_function_arguments(target, prefix, **adding)
        if not group._group_actions:  # avoids an empty heading in --help
            parser._action_groups.remove(group)


def takes(part: Any, name: str) -> Literal["needs", "may have", "no"]:
    """Return whether a component has an argument of this name, and whether it is optional."""
    target, method, bound = _target(part)
    for function in _functions(target, method):
        for item in _parameters(function):
            if item.name == name and name not in bound:
                return "needs" if item.default is item.empty else "may have"
    return "no"


def _target(part: Any) -> tuple[Any, str | None, dict[str, Any]]:
    """Unwrap partials: (class, function or object, its method that is called, bound names)."""
    bound: dict[str, Any] = {}
    while isinstance(part, functools.partial):
        positional = [item.name for item in _parameters(part.func)][: len(part.args)]
        bound = {**dict(zip(positional, part.args, strict=False)), **part.keywords, **bound}
        part = part.func
    if not inspect.isclass(part) and not inspect.isroutine(part):
        part = inspect.unwrap(part)  # an object that was made of a function, to call like it
    is_object = not inspect.isclass(part) and not inspect.isroutine(part)
    return part, "__call__" if is_object else None, bound


def _parameters(function: Callable) -> list[Parameter]:
    """Return the arguments; one with the text of a type that is not imported has type `object`."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built-in functions have no signature to read
        return []
    known = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__globals__", {})
    for place, item in enumerate(found):
        if isinstance(item.annotation, str):
            alone = types.SimpleNamespace(__annotations__={"it": item.annotation})
            try:
                hint = typing.get_type_hints(alone, known)["it"]
            except (NameError, TypeError, AttributeError):
                hint = object
            found[place] = item.replace(annotation=hint)
    return found


def _functions(target: Any, method: str | None) -> list[Callable]:
    """Return the functions whose arguments a call reaches, with `__init__` of all bases."""
    if not inspect.isclass(target):
        return [getattr(target, method) if method else target]
    # without `object`: the signature of a built-in is parsed from its text, each time
    bases = target.__mro__[:-1]
    return [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]


def _is_plain(hint: Any) -> bool:
    """Return whether a type, and the types in it, are plain."""
    if hint in _PLAIN or typing.get_origin(hint) is Literal:
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType, list, tuple, dict, set):
        return all(_is_plain(item) for item in typing.get_args(hint) if item is not Ellipsis)
    return False


def _described(register: Register, key: str) -> str:
    """Return the first docstring line of a component and its `file:line`."""
    return f"{register.summary(key)} [{register.home(key).removeprefix(f'{ROOT}/')}]"


def list_parts() -> str:
    """Return every registry, key, first docstring line and home, as text."""
    lines = []
    for name, register in ALL_REGISTERS.items():
        lines.append(f"{name} ({register.option}): {register.holds}")
        width = max((len(key) for key in register), default=0)
        lines += [f"  {key:<{width}}  {_described(register, key)}" for key in sorted(register)]
        lines.append("")
    return "\n".join(lines)


def _choices(hint: re.Match[str]) -> str:
    """Return the members of a Literal or Union as `a | b`; they may be wrapped over lines."""
    return re.sub(r",(\s)", r" |\1", hint[1].replace("'", ""))


def help_text(
    parser: ArgumentParser,
    keys: Mapping[str, str | None],
    chosen: Mapping[str, str],
    *,
    action: str = "",
    num_left: int = 0,
) -> str:
    """Return the output of `--help`.

    Args:
        chosen: register -> key, where one is known.
        num_left: options that the parser does not know, since most people do not need them.
    """
    program = f"{program_name()} {action}".rstrip()
    lines = [f"usage: {program} {'--KEY-OPTION KEY ... ' if keys else ''}[options]", ""]
    if keys:
        lines.append("Parts, chosen by key (--help after choosing keys lists their own options):")
    for name in keys:
        register = ALL_REGISTERS[name]
        shown = f"{register.option} {chosen.get(name, 'KEY')}"
        for key in chosen[name].split(",") if name in chosen else ():
            lines.append(f"  {shown:<32} {_described(register, key)}")
        if name not in chosen:
            lines.append(f"  {shown:<32} {register.holds}")
            lines.append(f"  {'':<32} one of: {', '.join(sorted(register)) or '(none)'}")
    lines += [
        *([""] if keys else []),
        "  --import FILE.py | package.module | entry point    parts of your own; repeatable",
        "  --config FILE.yaml    options from a file; the command line wins",
        "  --list                every part with its key, first docstring line and file:line",
        *([f"  --help all            {num_left} more options, by group"] if num_left else []),
        "",
        "",
    ]
    text = re.sub(r", --\S+\+ \S+", "", parser.format_help())  # appending is not our way
    text = re.sub(r"Optional\[(\w+\[[^][]*\])\]", r"\1 | null", text)
    text = re.sub(r"Literal\[([^\]]*)\]", _choices, text)
    text = re.sub(r"Union\[((?:[^][]|\[[^][]*\])*)\]", _choices, text)
    for name in keys:
        text = text.replace(f"--{name}.", ALL_REGISTERS[name].option + ".")
    return "\n".join(lines) + text
