"""How an option of a run is declared, spelled and checked against its own limits.

Knows no option by name: those are in train.py and its neighbours.
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
from typing import Any, Literal, dataclass_transform

_HUB = "hub:"
# as stageline.hub reads them: a name, and what is a file all the same
_HUB_NAME = re.compile(r"(hub:)?(\w[\w.-]*)/\w[\w.-]*?(@\w[\w./-]*)?")
_FILE = re.compile(r".*\.(jsonl?|ndjson|[ct]sv|txt|parquet|arrow|safetensors|bin|py|ya?ml|idx)")
_SNAPSHOT = re.compile(r"(.+)/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")
_INDEX = ".idx"


class OptionError(ValueError):
    """An option, or a combination of options, that cannot be run."""

    exit_code = 2


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Options:
    """Base of the classes of options, whose fields are `option(...)`: frozen dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def option(
    default: Any,
    help_text: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    is_path: bool = False,
    is_pattern: bool = False,
    takes_name: bool = False,
    is_named: bool = False,
    is_output: bool = False,
    is_common: bool = False,
    is_needed: bool = False,
    is_saved: bool = True,
    needs: Sequence[str] = (),
    excludes: Sequence[str] = (),
    instead_of: str = "",
    not_streamed: str = "",
    to: str = "",
    argument: str = "",
    resume: Literal["course", "steps", "length", "free"] = "course",
    shapes_answers: bool = True,
    in_check: bool = True,
) -> Any:
    """Declare a field of an options class: default, help text, and what holds for it.

    Args:
        is_path: a file or folder that has to exist, or several.
        is_pattern: of a path: *, ? and [ make a pattern, and it may be the prefix of a corpus.
        takes_name: of a path: a name on a hub, `owner/name[@revision]`, will do.
        is_named: of several paths: each may be NAME=PATH.
        is_output: a folder that the run makes.
        is_common: `--help` shows it, not only `--help all`.
        is_needed: a value has to be given.
        is_saved: the saved config has it.
        needs: options, as they are typed, without which this one has no effect; one of several,
            "--bf16 or --fp16". A lower-case word behind is the value that is meant, as in
            "--quantization nf4"; another one is an example.
        excludes: options, as they are typed, with a value or any, that cannot be given as well.
        instead_of: the option whose value follows from this one. A typed one of the two holds; in a
            saved config, which has both, this one.
        not_streamed: why `--engine streaming` cannot follow it.
        to: registers whose parts get it; with a ? behind, only if it is not the default.
        argument: the name that parts get it by; {} stands for the name of the mapping, as in
            "{}_lora_rank" of `parts.vit.lora_rank`.
        resume: whether a resumed run may have another value: course: no; steps: no, but the start
            model's scores do not depend on it; length: where the learning rates of the steps done
            stay; free: yes.
        shapes_answers: an evaluation with another value gives other answers.
        in_check: it holds while a split is checked; else its default does.
    """
    facts = {
        name: value for name, value in locals().items() if name not in ("default", "help_text")
    }
    return field(default=default, metadata={"help": help_text, **facts})


# a resumed run may have another value
free_option = functools.partial(option, resume="free")
# it changes no answer of an evaluation
side_option = functools.partial(option, shapes_answers=False)


def mapping(kind: Any) -> Any:
    """A field that holds several settings: `lora: {rank: 8}` in a file, or `--lora.rank 8`.

    Args:
        kind: the options class of these settings.
    """
    return field(default=kind(), metadata={"holds": kind})


def option_fields(config: Any) -> dict[str, dataclasses.Field]:
    """The fields of an options class or of an instance, by name; `lora.rank` in a mapping."""
    found = {}
    for item in dataclasses.fields(config):
        held = item.metadata.get("holds")
        if held is None:
            found[item.name] = item
            continue
        for name, inner in option_fields(held).items():
            inner = found[f"{item.name}.{name}"] = copy.copy(inner)
            inner.name = f"{item.name}.{name}"
    return found


def value_of(config: Any, name: str) -> Any:
    """The value of an option, by its name in `option_fields`."""
    return operator.attrgetter(name)(config)


def replaced(config: Any, values: Mapping[str, Any]) -> Any:
    """The options with other values, by their names in `option_fields`."""
    own = {name: value for name, value in values.items() if "." not in name}
    for head in {name.partition(".")[0] for name in values} - own.keys():
        inner = {
            name.partition(".")[2]: value
            for name, value in values.items()
            if name.startswith(f"{head}.")
        }
        own[head] = replaced(getattr(config, head), inner)
    return dataclasses.replace(config, **own)


def argument_name(item: dataclasses.Field) -> str:
    """The name of the keyword argument that gets an option."""
    *parents, name = item.name.split(".")
    return (item.metadata["argument"] or name).format(*parents[-1:])


def given_options(config: Any, *, of: type | None = None) -> dict[str, Any]:
    """The options that have another value than their default.

    Args:
        of: a class that declares some of them; None: all.
    """
    found = {name: value_of(config, name) for name in option_fields(of or config)}
    fields = option_fields(config)
    return {name: value for name, value in found.items() if value != fields[name].default}


def handed_to(register: str, config: Any) -> dict[str, Any]:
    """The options that a part of a register gets, by name."""
    found = {}
    for name, item in option_fields(config).items():
        value = value_of(config, name)
        targets = item.metadata["to"].split()
        if register in targets or (f"{register}?" in targets and value != item.default):
            found[argument_name(item)] = value
    return found


def check_together(config: Any) -> None:
    """Refuse options without one that they need, and two that exclude each other.

    Raises:
        OptionError: names both.
    """
    fields = option_fields(config)

    def is_given(text: str, *, exactly: bool) -> bool:
        """Whether an option was given, and with the value behind it if it counts exactly."""
        name, _, wanted = text[2:].replace("-", "_").partition(" ")
        value = value_of(config, name)
        return str(value) == wanted if exactly else value != fields[name].default

    def is_value(text: str) -> bool:
        """Whether the word behind an option is the one that is meant: not `FOLDER`, nor `2`."""
        return text.partition(" ")[2][:1].islower()

    for name, value in given_options(config).items():
        shown = spelled(name)
        if value is not True:
            values = value if isinstance(value, list) else [value]
            texts = [f"{one:g}" if isinstance(one, float) else str(one) for one in values]
            shown += " " + ",".join(texts)
        for needed in fields[name].metadata["needs"]:
            choices = needed.split(" or ")
            if not any(is_given(one, exactly=is_value(one)) for one in choices):
                told = [one if is_value(one) else one.split()[0] for one in choices]
                raise OptionError(
                    f"{shown} requires {' or '.join(told)}. Add {choices[0]} or drop "
                    f"{spelled(name)}."
                )
        for other in fields[name].metadata["excludes"]:
            if is_given(other, exactly=" " in other):
                raise OptionError(f"{shown} and {other} exclude each other. Drop one of them.")


def option_groups(config_class: type) -> list[tuple[str, list[dataclasses.Field]]]:
    """The fields of an options class, by the class that declares them, in order of the help."""
    seen: set[str] = set()
    groups = []
    by_name = {item.name: item for item in dataclasses.fields(config_class)}
    for declaring in filter(dataclasses.is_dataclass, reversed(config_class.__mro__)):
        own = [item.name for item in dataclasses.fields(declaring) if item.name not in seen]
        seen.update(own)
        plain = [by_name[name] for name in own if "holds" not in by_name[name].metadata]
        if plain:
            groups.append(((declaring.__doc__ or "").strip(), plain))
    for name, item in by_name.items():
        if held := item.metadata.get("holds"):
            inner = [one for path, one in option_fields(config_class).items()
                     if path.startswith(f"{name}.")]  # fmt: skip
            groups.append((f"{(held.__doc__ or '').strip()} (a mapping)", inner))
    return groups


def common_options(config_class: type) -> list[tuple[str, list[dataclasses.Field]]]:
    """The options that most people need, as one group; all, where none is marked as such."""
    groups = option_groups(config_class)
    found = [item for _, items in groups for item in items if item.metadata["is_common"]]
    return [("Options that most runs need", found)] if found else groups


def spelled(name: str) -> str:
    """An option as it is typed: `--batch-size`, `--loss-fn.label_smoothing`."""
    head, dot, tail = name.partition(".")
    return "--" + head.replace("_", "-") + dot + tail


def expanded(item: dataclasses.Field, value: Any) -> Any:
    """A path without `~`; an empty one (an empty shell variable) is none; others as they are."""
    if isinstance(value, str) and (item.metadata["is_path"] or item.metadata["is_output"]):
        return str(Path(value).expanduser()) if value else item.default
    if isinstance(value, list) and item.metadata["is_path"]:
        return [on_path(item, one, lambda path: str(Path(path).expanduser())) for one in value]
    return value


_NAMED = re.compile(r"(\w[\w./-]*)=(.+)")


def split_name(item: dataclasses.Field, value: str) -> tuple[str, str]:
    """(name, path) of NAME=PATH; of a path alone the name is empty."""
    match = _NAMED.fullmatch(value) if item.metadata["is_named"] else None
    return (match[1], match[2]) if match and not Path(value).exists() else ("", value)


def on_path(item: dataclasses.Field, value: str, change: Callable[[str], str]) -> str:
    """The value with another path behind its name."""
    name, path = split_name(item, value)
    return f"{name}={change(path)}" if name else change(path)


def check_limits(config: Any) -> None:
    """Check each number against the limits of its field, and that each given path exists.

    Raises:
        OptionError: names the option, its value and the limit.
    """
    for name, item in option_fields(config).items():
        facts = item.metadata
        for value in _as_list(value_of(config, name)) if facts["is_path"] else ():
            path = split_name(item, value)[1]
            # of a pattern, or the beginning of a corpus's names, the part that takes it will say
            is_pattern = any(sign in path for sign in "*?[") or Path(f"{path}{_INDEX}").exists()
            is_there = Path(path).exists() or (facts["is_pattern"] and is_pattern)
            if not (is_there or _is_name(item, path)):
                hint = ""
                if facts["takes_name"] and _HUB_NAME.fullmatch(path) and not _FILE.fullmatch(path):
                    owner = path.partition("/")[0]
                    hint = (
                        f" The folder {owner} is here, so it is a path; {_HUB}{path} is the name."
                    )
                raise OptionError(
                    f"{spelled(item.name)} {path}: there is no such file or folder. Give: "
                    f"{facts['help']}. The path is relative to the directory you are in "
                    f"({Path.cwd()}).{hint}"
                )
        value = value_of(config, name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(item, value)


def _as_list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value] if value is not None else []


def _check_number(item: dataclasses.Field, value: float) -> None:
    least, most, below = (item.metadata[name] for name in ("at_least", "at_most", "below"))
    is_right = (
        math.isfinite(value)
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (below is None or value < below)
    )
    if not is_right:
        wanted = [f"at least {least:.15g}"] if least is not None else ["a finite number"]
        wanted += [f"at most {most:.15g}"] if most is not None else []
        wanted += [f"below {below:.15g}"] if below is not None else []
        raise OptionError(
            f"{spelled(item.name)} {value:.15g} is out of range. Give a value that is "
            f"{' and '.join(wanted)}: {item.metadata['help']} (default {item.default})."
        )


def absolute(item: dataclasses.Field, value: Any) -> Any:
    """A path of an option as it is written into a config; other values as they are."""
    if isinstance(value, list):
        return [absolute(item, one) for one in value]
    if isinstance(value, str) and split_name(item, value)[0]:
        return on_path(item, value, lambda path: absolute(item, path))
    is_path = item.metadata["is_path"] or item.metadata["is_output"]
    if not is_path or not value or _is_name(item, value):
        return value
    if item.metadata["takes_name"] and (match := _SNAPSHOT.fullmatch(value)):
        from huggingface_hub.constants import HF_HUB_CACHE

        # a folder of the hub's cache by its name and commit, which other machines know as well
        if Path(match[1]) == Path(HF_HUB_CACHE).resolve():
            return f"{_HUB}{match[2]}/{match[3]}@{match[4]}"
    return str(Path(value).absolute())


def _is_name(item: dataclasses.Field, value: str) -> bool:
    """Whether a path is a name on a hub: never where a folder of the owner's name lies here."""
    match = _HUB_NAME.fullmatch(value) if item.metadata["takes_name"] else None
    is_path = match and (Path(value).exists() or Path(match[2]).exists() or _FILE.fullmatch(value))
    return bool(match and (match[1] or not is_path))
