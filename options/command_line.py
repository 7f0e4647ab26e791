"""Words of a command line and lines of a YAML file -> options by name, still as text.

Knows how options are spelled, not which options there are: that is parse_args.py.
"""

import functools
import json
import re
import sys
from argparse import ArgumentError
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace

from options.fields import HELP, OptionError, as_list, spelled
from register import did_you_mean


def command_words(argv: Sequence[str] | None = None) -> list[str]:
    """Return the words behind the command: `argv`, or those that this process was started with."""
    return list(argv) if argv is not None else sys.argv[2 if _is_module() else 1 :]


def program_name() -> str:
    """Return what was started as it is typed: `stageline train`, also for train_pp.py."""
    name = sys.argv[1] if _is_module() else HELP["files"].get(Path(sys.argv[0]).name, "")
    for option, command in (("--plan", "plan"), ("--check-only", "validate")):
        name = command if name == "train" and option in sys.argv else name
    return f"stageline {name}" if name else Path(sys.argv[0]).name


def _is_module() -> bool:
    return Path(sys.argv[0]).parts[-2:] == ("stageline", "__main__.py")


_STR = "tag:yaml.org,2002:str"
# types that YAML gives to words without quotes
_PLAIN = [f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "timestamp")]


class _StrictLoader(yaml.SafeLoader):
    """Plain values only; refuses a key that comes twice, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == _STR and key.value in seen:
                raise ValueError(
                    f"{key.value!r} comes twice, again in line {key.start_mark.line + 1}"
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 reads a number without a dot, 1e-4, as text
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_options(text: str) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML text, and the line of each of its names."""
    loader = _StrictLoader(text)
    lines = {}
    node = loader.get_single_node()
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[str(key.value)] = key.start_mark.line + 1
            # keep the text until the option's type is known: 1.50 may be a name
            if value.tag in _PLAIN and value.style is None:
                value.tag = _STR
    return (None if node is None else loader.construct_document(node)), lines


HOW = "Write one option a line, as on the command line without the dashes: 'batch-size: 8'."
JSON_HOW = """Write one object of options and values: {"batch-size": 8}."""
COMMAND_LINE = "command line"  # an origin
SHOWN = 200  # characters of a value in a message
OPTION = re.compile(r"--[A-Za-z][\w.-]*\+?(=|$)")


@dataclass
class Given:
    """One option as it was given: its values as text, and where it came from."""

    name: str
    values: list[str]
    origin: str
    content: Any = None  # the value in a config file

    def __str__(self) -> str:
        place = "" if self.origin == COMMAND_LINE else f" (in {self.origin})"
        values = [shortened(value) or "''" for value in self.values]
        return " ".join([spelled(self.name), *values]) + place


def shortened(text: str) -> str:
    """Return a value as messages show it."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def read_words(words: Sequence[str], names: Iterable[str] = ()) -> list[Given]:
    """Read `--name value`, `--name=value`, `--name v1 v2` and `--name`."""
    given: list[Given] = []
    for word in ["--help" if word == "-h" else word for word in words]:
        name, has_value, value = word[2:].partition("=")
        if OPTION.match(word):
            values = [value] if has_value else []
            given.append(Given(name.replace("-", "_"), values, COMMAND_LINE))
        elif given and not word.startswith("--"):
            given[-1].values.append(word)
        else:
            raise OptionError(f"{shortened(word)!r} belongs to no option. Put --NAME before it.")
    return [one for item in given for one in _unfolded(item, names)]


def read_config(path: str | Path, names: Iterable[str] = ()) -> list[Given]:
    """Read a YAML (or JSON) file that maps options, without their dashes, to values.

    Paths in it are relative to the current directory, as on the command line. Options in a mapping
    get their own `names`.
    """
    path = Path(path).expanduser()
    is_json = path.suffix == ".json"
    kind, how = ("JSON", JSON_HOW) if is_json else ("plain YAML", HOW)
    try:
        text = path.read_text(encoding="utf-8")
        if is_json:
            json.loads(text)  # YAML would take more than JSON has
            text = text.expandtabs()  # YAML refuses the tabs that JSON allows between words
        content, lines = read_options(text)
    except OSError as error:
        raise OptionError(
            f"--config {path} can't be read: {error.strerror}. Correct it; it is relative to the "
            f"directory you are in ({Path.cwd()})."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionError(f"--config {path} is not {kind}: {error}\n  {how}") from error
    if content is not None and not isinstance(content, dict):
        raise OptionError(f"--config {path} holds a {type(content).__name__}. {how}")
    found: dict[str, Given] = {}
    for key, value in (content or {}).items():
        line = lines.get(str(key))  # none for a key such as on, which YAML reads as true
        item = _of_file(str(key), value, f"{path}:{line}" if line else str(path))
        if item.name == "config":
            raise OptionError(
                f"--config is in {item.origin}. A config file reads no other one: name both on the "
                "command line, the later one wins."
            )
        for one in _unfolded(item, names):
            first = found.setdefault(one.name, one)
            if first is not one:
                raise OptionError(
                    f"{spelled(one.name)} is given twice, in {first.origin} and {one.origin}. Drop "
                    "one."
                )
    return list(found.values())


def _of_file(key: str, value: Any, origin: str) -> Given:
    """Return an option with its YAML value as it would be typed."""
    name = key.replace("-", "_")
    if isinstance(value, str):
        words = [value]
    elif name == "import" and isinstance(value, list):
        words = [str(item) for item in value]
    else:
        words = [json.dumps(value, default=str)]
    return Given(name, words, origin, value)


def _unfolded(item: Given, names: Iterable[str]) -> list[Given]:
    """Return the options in a mapping, `lora.rank` of `lora: {rank: 8}`; another one as it is."""
    inside = [name for name in names if name.startswith(f"{item.name}.")]
    if not inside:
        return [item]
    content = item.content
    if item.origin == COMMAND_LINE:
        try:
            content = read_options(" ".join(item.values))[0]
        except (ValueError, yaml.YAMLError):
            content = None
    if not isinstance(content, dict):
        raise OptionError(
            f"{item} is not a mapping. Give one of {', '.join(map(spelled, inside))} with its "
            "value."
        )
    return [
        one
        for key, value in content.items()
        for one in _unfolded(_of_file(f"{item.name}.{key}", value, item.origin), names)
    ]


def by_name(given: Iterable[Given], repeated: Sequence[str] = ()) -> dict[str, Given]:
    """Return options by name; where one was given several times, the last.

    A `repeated` one holds the texts of all times that it was typed, or what a file has.
    """
    found: dict[str, Given] = {}
    for item in given:
        if item.name in repeated:
            before, texts = found.get(item.name), as_list(item.content)
            if item.origin == COMMAND_LINE:
                if len(item.values) != 1:
                    raise OptionError(
                        f"{item} has {len(item.values)} words. Put it in quotes, and repeat the "
                        "option for more."
                    )
                texts = item.values
                if before is not None and before.origin == COMMAND_LINE:
                    texts = [*before.content, *texts]
            words = [json.dumps([str(text) for text in texts] or None)]
            item = Given(item.name, words, item.origin, texts)
        found[item.name] = item
    return found


def drop_rivals(options: dict[str, Given], following: Mapping[str, str]) -> None:
    """Drop the option that was not typed, of each option and the one that follows from it."""
    for pair in following.items():
        items = [options[name] for name in pair if name in options]
        typed = [item for item in items if item.origin == COMMAND_LINE]
        if len(typed) == 2:
            raise OptionError(f"{items[0]} and {items[1]} were both given. Drop one of them.")
        for item in items if typed else []:
            if item not in typed:
                del options[item.name]


def convert(
    parser: ArgumentParser, settings: Mapping[str, Given], *, also_known: Iterable[str]
) -> Namespace:
    """Convert text to typed values."""
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    hints = {name: getattr(one, "_typehint", None) or one.type for name, one in actions.items()}
    unknown = {name: item for name, item in settings.items() if name not in hints}
    refuse_unknown(unknown, [*dict.fromkeys([*hints, *also_known])])
    words = [
        f"{actions[name].option_strings[0]}={_one_word(item, hints[name])}"
        for name, item in settings.items()
    ]
    try:
        return parser.parse_args(words)
    except ArgumentError as error:
        message = str(error)
        if missing := re.search(r"arguments are required: (.*)", message):
            options = ", ".join(spelled(name.strip()) for name in missing[1].split(","))
            message = f"{options} is missing. Give it on the command line or in --config."
        match = re.match(r'Parser key "([^"]+)"', message)
        if match and match[1] in settings:
            wanted = _in_words(hints[match[1]])
            message = f"{settings[match[1]]} has a wrong value. Give {wanted}."
        raise OptionError(message) from error


def refuse_unknown(unknown: Mapping[str, Given], known: Sequence[str]) -> None:
    """Refuse options that a run does not have; a renamed one is named."""
    moved, gone = old_names("moved"), old_names("gone")
    told = {name: gone[name] for name in unknown if name in gone}
    told |= {
        name: f"{spelled(name)} is {spelled(moved[name])} now."
        for name in unknown
        if moved.get(name) in known
    }
    if told:
        raise OptionError(
            f"{', '.join(str(unknown[name]) for name in told)}: there is no such option any more. "
            f"{' '.join(dict.fromkeys(told.values()))}"
        )
    for item in unknown.values():
        raise OptionError(_unknown_option(item, known))


def _one_word(item: Given, hint: Any) -> str:
    """Return the values of an option as one word that jsonargparse converts."""
    options = (hint, *get_args(hint))
    lists = [kind for kind in options if {kind, get_origin(kind)} & {list, tuple, set}]
    if not item.values and bool in options:
        return "true"
    if not item.values or (len(item.values) > 1 and not lists):
        raise OptionError(needs_value(item, _in_words(hint)))
    first = item.values[0]
    choices = {choice for kind in options for choice in get_args(kind) if isinstance(choice, str)}
    is_whole = first.startswith("[") or first in {*choices, "null"}
    if not lists or (len(item.values) == 1 and is_whole):
        return first
    entries = [entry for value in item.values if value for entry in value.split(",")]
    if any(str in get_args(kind) for kind in lists):
        return json.dumps(entries)
    return f"[{','.join(entries)}]"


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_WORDS |= {dict: "a mapping (NAME: VALUE)", type(None): "null"}
_SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}


def _in_words(hint: Any) -> str:
    """Return the values that a type allows: `a whole number`; `auto, cpu or cuda`."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        words = [str(one) for one in inside]
    elif kind in (Union, UnionType):  # null is only a default
        kinds = [one for one in inside if one is not type(None)]
        words = [text for one in kinds for text in _in_words(one).replace(" or ", ", ").split(", ")]
    elif kind in (list, tuple, set):
        several = " or ".join(dict.fromkeys(_SEVERAL.get(one, "values") for one in inside[:1]))
        return f"a list of {several or 'values'} (A,B)"
    else:
        return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def needs_value(item: Given, wanted: str) -> str:
    """Return the error of an option with too few or too many values."""
    count = len(item.values)
    return (
        f"{item} has {count or 'no'} value{'s' if count > 1 else ''}. Give {wanted} after "
        f"{spelled(item.name)}, quoted if it holds spaces."
    )


@functools.cache
def old_names(section: str) -> dict[str, str]:
    """Return a section of old_names.yaml: moved or gone."""
    path = Path(__file__).with_name("old_names.yaml")
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))[section]
    return {name: told for names, told in rows.items() for name in names.split()}


def with_new_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved options of a run of the release before this one, by their names now."""
    moved, gone = old_names("moved"), old_names("gone")
    found = {}
    for given, value in saved.items():
        name = given.replace("-", "_")
        if name not in gone:
            found[spelled(moved[name])[2:] if name in moved else given] = value
    return found


def _unknown_option(item: Given, known: Sequence[str]) -> str:
    head, dot, _ = item.name.partition(".")
    hint = did_you_mean(item.name, known, spelled)
    # an option of LLaMA-Factory and Hugging Face's Trainer
    table = Path(__file__).with_name("llamafactory_keys.yaml")
    groups = yaml.safe_load(table.read_text(encoding="utf-8")).values()
    rows = [row for group in groups for row in group.items()]
    row: dict[str, str] = next((row for keys, row in rows if item.name in str(keys).split()), {})
    found = str(row.get("to") or "").split(", ")
    if found[0].partition(".")[0].replace("-", "_") in known:
        note = f" ({row['note']})" if row.get("note") else ""
        hint = f" It is {', '.join(f'--{one}' for one in found)} here{note}."
    elif reason := row.get("why") or row.get("drop"):
        hint = f" There is none here: {reason.rstrip('.')}."
    if dot:
        siblings = [spelled(name) for name in known if name.startswith(head + ".")]
        hint += f" The component takes: {', '.join(siblings) or 'no options of its own'}."
    return f"unknown option {item}.{hint} `{program_name()} --help all` lists all."
