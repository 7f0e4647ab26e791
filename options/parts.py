"""Read a component's own options: its signature without the arguments of the run.

Turns the signature and docstring of a part into options such as `--dataset.split_type`. Knows the
contract of each register (which arguments come from the run), never a key.
"""

import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal

from options.answer import EvaluateConfig
from options.command_line import program_name
from options.fields import HELP, argument_name, option_fields, option_groups, spelled
from options.train import RunConfig
from register import ALL_REGISTERS, ROOT, Facts, Register

# types whose values can be written on a command line or in a YAML file
_PLAIN = (int, float, str, bool, type(None), Path, Any, list, tuple, dict, set, Parameter.empty)


FEW = 20  # options that --help shows without `all`; of more, the common ones
_WORDS = {int: "N", float: "X", bool: "true|false", str: "TEXT", dict: "{A: B}"}
_WORDS |= dict.fromkeys((list, tuple, set), "A,B")


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
    parser: Any, register: Register, key: str, *, listed: Container[str] = ()
) -> None:
    """Add the options of a part to a jsonargparse parser; those of one of several have its key.

    Args:
        listed: what the run supplies, but is an option here all the same: `dataset.split`.
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
        skipped = {name for name in skipped if f"{prefix}.{name}" not in listed}
        if not {item.name for item in items} - skipped:
            continue
        group = parser.add_argument_group(f"{register.option} {one}", _described(register, one))
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
    return f"{register.summary(key)} [{register.entry(key).home.removeprefix(f'{ROOT}/')}]"


def list_parts() -> str:
    """Return every registry, key, first docstring line and home, as text."""
    lines = []
    for name, register in ALL_REGISTERS.items():
        lines.append(f"{name} ({register.option}): {register.holds}")
        width = max((len(key) for key in register), default=0)
        lines += [f"  {key:<{width}}  {_described(register, key)}" for key in sorted(register)]
        lines.append("")
    return "\n".join(lines)


def _value_word(name: str, hint: Any) -> str:
    """Return what follows an option in --help: N, A,B or its choices."""
    words: list[str] = []
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for one in typing.get_args(hint) if is_union else (hint,):
        kind = typing.get_origin(one) or one
        if kind is not type(None):
            word = _WORDS.get(kind, "VALUE")
            words += map(str, typing.get_args(one)) if kind is Literal else [word]
    text = "|".join(words)
    is_path = name.endswith(("path", "dir", "prompts", "exported", "resume"))
    return text.replace("TEXT", "PATH") if is_path else text


def _row(name: str, text: str, hint: Any, default: Any) -> str:
    """Return an option in --help, with its default in words or as a value."""
    text, _, shown = " ".join(text.split()).removesuffix(".").partition("; default: ")
    if not shown and default not in (None, "", [], {}):
        values = default if isinstance(default, list | tuple) else [default]
        plain = [f"{one:g}" if isinstance(one, float) else str(one) for one in values]
        shown = str(default).lower() if isinstance(default, bool) else ",".join(plain)
    if shown and re.search(r"\([^()]* = [^()]*\)$", text):
        text = f"{text[:-1]}; default: {shown})"
    elif shown:
        text = f"{text} (default: {shown})".lstrip()
    is_switch = hint is bool and default is False
    return _line(name if is_switch else f"{name} {_value_word(name, hint)}", text)


def _line(head: str, text: str) -> str:
    """Return a line of --help, with its text from column 28 on."""
    first = f"  {head}  ".ljust(28) if len(head) < 25 else f"  {head}\n{' ' * 28}"
    body = textwrap.wrap(text, 72, break_on_hyphens=False, break_long_words=False)
    return (first + f"\n{' ' * 28}".join(body)).rstrip()


def help_text(
    config_class: type, parser: Any, keys: Mapping[str, str], *, shows_all: bool, action: str
) -> str:
    """Return the output of `--help`; keys: register -> its component, or what that follows from."""
    program, groups = f"{program_name()} {action}".rstrip(), option_groups(config_class)
    num_left = sum(len(items) for _, items in groups)
    if not shows_all and num_left > FEW:
        common = {name: names.split() for name, names in HELP["sections"].items()}
        for name in ("Optimization", "Checkpoints") if "Check" in dict(groups) else ():
            del common[name]  # a check trains nothing
        for title, items in groups:
            items[:] = [one for one in items if one.name in common.get(title, ())]
    num_left -= sum(len(items) for _, items in groups)
    lines = [f"usage: {program} [CONFIG.yaml] [NAME=VALUE ...] [--option VALUE ...]"]
    example = HELP["examples"].get(program.partition(" ")[2])
    lines += [f"example: {program} {example}"] if example else []
    for title, items in groups:
        lines += ["", f"{title}:"] if items else []
        for one in items:
            lines.append(_row(spelled(one.name), one.metadata["help"], one.type, one.default))
    lines += [
        "",
        "Components (see `stageline list`; --help shows options of those that are named):",
    ]
    for name, key in keys.items():
        own = ALL_REGISTERS[name]
        lines.append(_line(f"{own.option} KEY ({key})", own.holds))
    lines += [
        _line("--import FILE.py", "components of your own, also package.module; repeatable"),
        _line("--config FILE.yaml", "options from a file; the command line wins"),
        *([_line("--help all", f"{num_left} more options")] if num_left else []),
    ]
    for group in parser._action_groups:
        actions = [one for one in group._group_actions if "." in one.dest]
        lines += ["", f"{group.title}: {group.description}"] if actions else []
        for one in actions:
            head, _, tail = one.dest.partition(".")
            hint = getattr(one, "_typehint", None) or one.type
            name = f"{ALL_REGISTERS[head].option}.{tail}"
            lines.append(_row(name, one.help or "", hint, one.default))
    return "\n".join(lines)
