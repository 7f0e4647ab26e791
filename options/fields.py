"""Declare options, spell them, and check their values against their own limits.

No option is named here: they are in train.py and the other modules of this folder.
"""

import copy
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import yaml

from register import FrozenClass

_HUB = "hub:"
# the same patterns as in stageline.hub: hub names, and file names that look like them
_HUB_NAME = re.compile(r"(hub:)?(\w[\w.-]*)/\w[\w.-]*?(@\w[\w./-]*)?")
_FILE = re.compile(r".*\.(jsonl?|ndjson|[ct]sv|txt|parquet|arrow|safetensors|bin|py|ya?ml|idx)")
_SNAPSHOT = re.compile(r"(.+)/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")
_NAMED = re.compile(r"(\w[\w./-]*)=(.+)")
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_UNITS["g"] = _UNITS["gib"]

# sections and examples of --help
HELP = yaml.safe_load(Path(__file__).with_name("help.yaml").read_text(encoding="utf-8"))


class OptionError(ValueError):
    """An option, or a combination of options, that cannot be run."""

    exit_code = 2


class Options(FrozenClass):
    """Base of the classes of options, whose fields are `option(...)`."""


def option(
    default: Any,
    help_text: str,
    *,
    ge: float | None = None,
    le: float | None = None,
    is_path: bool = False,
    is_pattern: bool = False,
    takes_name: bool = False,
    is_named: bool = False,
    is_output: bool = False,
    is_needed: bool = False,
    is_saved: bool = True,
    needs: Sequence[str] = (),
    excludes: Sequence[str] = (),
    to: str = "",
    argument: str = "{name}",
    resume: Literal["course", "steps", "length", "free"] = "course",
    shapes_answers: bool = True,
) -> Any:
    """Declare a field of an options class.

    Args:
        ge, le: the least and the largest value.
        is_path: one or several files or folders that exist; also a pattern or the prefix of a
            corpus (`is_pattern`), a name on a hub (`takes_name`), NAME=PATH (`is_named`).
        is_output: a folder that the run makes.
        is_needed: a value has to be given.
        is_saved: the saved config has it.
        needs: options, as they are typed, without which this one has no effect; one of several,
            "--bf16 or --fp16". A lower-case word behind is the value that is meant, as in
            "--quantization nf4"; another one is an example. {part} is as in `argument`.
        excludes: options, as they are typed, with a value or any, that cannot be given as well.
        to: registers whose components get it; with a ? behind, only if it is not the default.
        argument: the name that components get it by; {part} is the mapping that `{name}` is in.
        resume: whether a resumed run may have another value: course: no; steps: no, but the start
            model's scores do not depend on it; length: where past learning rates stay; free: yes.
        shapes_answers: an evaluation with another value gives other answers.
    """
    facts = {name: value for name, value in locals().items() if name != "default"}
    return field(default=default, metadata={"help": facts.pop("help_text"), **facts})


# a resumed run may have another value
free_option = functools.partial(option, resume="free")
# a folder or a name on a hub
model_option = functools.partial(option, is_path=True, takes_name=True)
# it changes no answer of an evaluation
side_option = functools.partial(option, shapes_answers=False)


def mapping(kind: Any) -> Any:
    """Declare a field of several settings: `lora: {rank: 8}` in a file, or `--lora.rank 8`."""
    return field(default=kind(), metadata={"holds": kind})


def option_fields(config: Any) -> dict[str, dataclasses.Field]:
    """Return the fields of an options class or instance, by name; `lora.rank` in a mapping."""
    return dict(_fields_of(config if isinstance(config, type) else type(config)))


@functools.cache  # a start asks for them some hundred times
def _fields_of(kind: type) -> dict[str, dataclasses.Field]:
    found = {}
    for item in dataclasses.fields(kind):
        if (held := item.metadata.get("holds")) is None:
            found[item.name] = item
        for inner in map(copy.copy, _fields_of(held).values() if held else ()):
            inner.name = f"{item.name}.{inner.name}"
            found[inner.name] = inner
    return found


def value_of(config: Any, name: str) -> Any:
    """Return the value of an option, by its name in `option_fields`."""
    return operator.attrgetter(name)(config)


def replaced(config: Any, values: Mapping[str, Any]) -> Any:
    """Return the options with other values, by their names in `option_fields`."""
    own: dict[str, Any] = {}
    for name, value in values.items():
        head, dot, tail = name.partition(".")
        held = own.get(head, getattr(config, head))
        own[head] = replaced(held, {tail: value}) if dot else value
    return dataclasses.replace(config, **own)


def argument_name(item: dataclasses.Field) -> str:
    """Return the name of the keyword argument that gets an option."""
    *parents, name = item.name.split(".")
    return item.metadata["argument"].format(name=name, part="".join(parents[-1:]))


def given_options(config: Any, *, of: type | None = None) -> dict[str, Any]:
    """Return the options, all or those `of` a class, with another value than their default."""
    fields = option_fields(config)
    found = {name: value_of(config, name) for name in option_fields(of or config)}
    return {name: value for name, value in found.items() if value != fields[name].default}


def refuse(problems: Mapping[str, object]) -> None:
    """Raise the first of these errors whose condition holds."""
    for text, is_there in problems.items():
        if is_there:
            raise OptionError(text)


def refuse_beside(excluded: Mapping[str, object], other: str, cure: str = "Drop one.") -> None:
    """Refuse the first of these options that is given, since it does not go with another."""
    refuse({f"{name} does not go with {other}. {cure}": v for name, v in excluded.items()})


def handed_to(register: str, config: Any) -> dict[str, Any]:
    """Return the options that a component of a register gets, by name."""
    found = {}
    for name, item in option_fields(config).items():
        value = value_of(config, name)
        targets = item.metadata["to"].split()
        if register in targets or (f"{register}?" in targets and value != item.default):
            found[argument_name(item)] = value
    return found


def check_together(config: Any) -> None:
    """Refuse options without one that they need, and two that exclude each other."""
    fields, given = option_fields(config), given_options(config)

    def is_given(text: str, exactly: bool) -> bool:
        """Return whether an option was given, and with the value after it if `exactly`."""
        name, _, wanted = text[2:].replace("-", "_").partition(" ")
        return str(value_of(config, name)) == wanted if exactly else name in given

    for name, value in given.items():
        shown = spelled(name)
        if value is not True:
            values = value if isinstance(value, list) else [value]
            texts = [f"{one:g}" if isinstance(one, float) else str(one) for one in values]
            shown += " " + ",".join(texts)
        part = "".join(name.split(".")[-2:-1])
        for needed in (text.format(part=part) for text in fields[name].metadata["needs"]):
            # FOLDER and 2 are examples, nf4 is a required value
            choices = {one: one.partition(" ")[2][:1].islower() for one in needed.split(" or ")}
            # an option that is turned off needs nothing
            if value is not False and not any(is_given(*one) for one in choices.items()):
                told = [one if exactly else one.split()[0] for one, exactly in choices.items()]
                raise OptionError(
                    f"{shown} requires {' or '.join(told)}. Add {next(iter(choices))} or drop "
                    f"{spelled(name)}."
                )
        for other in fields[name].metadata["excludes"]:
            if is_given(other, " " in other):
                raise OptionError(f"{shown} and {other} exclude each other. Drop one of them.")


def option_groups(config_class: type) -> list[tuple[str, list[dataclasses.Field]]]:
    """Return the fields of an options class by title: sections in order, the common ones first."""
    kinds = filter(dataclasses.is_dataclass, config_class.__mro__)
    # the last base that declares a field titles it
    titles = {item.name: kind.__doc__ or "" for kind in kinds for item in dataclasses.fields(kind)}
    held = {item.name: item.metadata.get("holds") for item in dataclasses.fields(config_class)}
    common = {name: title for title, names in HELP["sections"].items() for name in names.split()}
    groups: dict[str, list[dataclasses.Field]] = {title: [] for title in HELP["sections"]}
    fields = option_fields(config_class)
    for name in sorted(fields, key=[*common, *fields].index):
        head, dot, _ = name.partition(".")
        title = common.get(name) or (str(held[head].__doc__) if dot else titles[head])
        groups.setdefault(title, []).append(fields[name])
    places = {title: place for place, title in enumerate(HELP["sections"])}
    found = sorted(groups.items(), key=lambda group: places.get(group[0].partition(":")[0], -1))
    return [group for group in found if group[1]]


def spelled(name: str) -> str:
    """Return an option as it is typed: `--batch-size`, `--loss-fn.label_smoothing`."""
    head, dot, tail = name.partition(".")
    return "--" + head.replace("_", "-") + dot + tail


def num_bytes(text: str, option: str, *, unit: str = "") -> int:
    """Return the bytes of an option such as 24GiB or 80GB; `unit` is the unit of a bare number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    size = int(float(match[1]) * _UNITS.get(match[2] or unit, 0)) if match else 0
    if size < 1:
        raise OptionError(
            f"{option} cannot be read: {text!r} is not a size. Give one such as 24GiB or 80GB."
        )
    return size


def as_list(value: Any) -> list[Any]:
    """Return one value, or several, as a list; an empty one for none."""
    return value if isinstance(value, list) else [value] if value else []


def split_name(item: dataclasses.Field, value: str) -> tuple[str, str]:
    """Return (name, path) of NAME=PATH; the name of a bare path is empty."""
    match = _NAMED.fullmatch(value) if item.metadata["is_named"] else None
    return (match[1], match[2]) if match and not Path(value).exists() else ("", value)


def with_paths(item: dataclasses.Field, value: Any, change: Callable[[str], str]) -> Any:
    """Return the value of a path option, one or several, with each path changed."""
    if isinstance(value, list):
        return [with_paths(item, one, change) for one in value]
    name, path = split_name(item, value)
    return f"{name}={change(path)}" if name else change(path)


def expanded(item: dataclasses.Field, value: Any) -> Any:
    """Return a path without `~`; an empty one (an empty shell variable) means the default."""
    if value is None or not (item.metadata["is_path"] or item.metadata["is_output"]):
        return value
    if not value:
        return item.default
    return with_paths(item, value, lambda path: str(Path(path).expanduser()))


def absolute(item: dataclasses.Field, value: Any) -> Any:
    """Return a path of an option as it is written into a config; other values as they are."""

    def change(path: str) -> str:
        if _is_name(item, path):
            return path
        if item.metadata["takes_name"] and (match := _SNAPSHOT.fullmatch(path)):
            from huggingface_hub.constants import HF_HUB_CACHE

            # a folder of the hub's cache becomes name and commit, which other machines can fetch
            if Path(match[1]) == Path(HF_HUB_CACHE).resolve():
                return f"{_HUB}{match[2]}/{match[3]}@{match[4]}"
        return str(Path(path).absolute())

    is_path = item.metadata["is_path"] or item.metadata["is_output"]
    return with_paths(item, value, change) if is_path and value else value


def check_limits(config: Any) -> None:
    """Refuse needed options without a value, numbers beyond a limit, and paths of nothing."""
    fields = option_fields(config)
    needed = [name for name, item in fields.items() if item.metadata["is_needed"]]
    if missing := [spelled(name) for name in needed if value_of(config, name) in (None, [])]:
        are, them = ("are", "them") if missing[1:] else ("is", "it")
        told = f"{' and '.join(missing)} {are} missing."
        raise OptionError(f"{told} Give {them} on the command line or in --config.")
    for name, item in fields.items():
        facts, value = item.metadata, value_of(config, name)
        for one in as_list(value) if facts["is_path"] else ():
            path = split_name(item, one)[1]
            # a pattern, or the prefix of a corpus, is left to the component that reads it
            is_pattern = any(sign in path for sign in "*?[") or Path(f"{path}.idx").exists()
            if Path(path).exists() or (facts["is_pattern"] and is_pattern) or _is_name(item, path):
                continue
            raise OptionError(
                f"{spelled(name)} {path}: there is no such file or folder. Correct it; it is "
                f"relative to the directory you are in ({Path.cwd()})."
            )
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        least, most = facts["ge"], facts["le"]
        low, high = (-math.inf if least is None else least), (math.inf if most is None else most)
        if not (math.isfinite(value) and low <= value <= high):
            wanted = [f"at least {least:.15g}"] if least is not None else ["a finite number"]
            wanted += [f"at most {most:.15g}"] if most is not None else []
            default = "" if item.default is None else f" (default {item.default})"
            raise OptionError(
                f"{spelled(name)} {value:.15g} is out of range. Give a value of "
                f"{' and '.join(wanted)}{default}."
            )


def _is_name(item: dataclasses.Field, value: str) -> bool:
    """Return whether a path is a hub name: not if a folder with the owner's name exists here."""
    match = _HUB_NAME.fullmatch(value) if item.metadata["takes_name"] else None
    is_path = match and (Path(value).exists() or Path(match[2]).exists() or _FILE.fullmatch(value))
    return bool(match and (match[1] or not is_path))
