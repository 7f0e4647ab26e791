"""Words of a command line and lines of a YAML file -> options by name, still as text.

Knows how options are spelled, not which options there are: that is parse_args.py.
"""

import difflib
import functools
import json
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace

from options.fields import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    PLAIN,
    OptionError,
    StrictLoader,
    check_entries,
    check_value,
    spelled,
)


def command_words(argv: Sequence[str] | None = None) -> list[str]:
    """The words behind the command: `argv`, or those that this process was started with.

    A command without a file of its own at the root is the first word of `stageline`.
    """
    if argv is not None:
        return list(argv)
    return sys.argv[2:] if _is_behind_stageline() else sys.argv[1:]


def program_name() -> str:
    """What was started: `train_pp.py`, or `stageline infer`."""
    if _is_behind_stageline():
        return " ".join(["stageline", *sys.argv[1:2]])
    return Path(sys.argv[0]).name


def _is_behind_stageline() -> bool:
    return Path(sys.argv[0]).parts[-2:] == ("stageline", "__main__.py")


_STR, _FLOAT = "tag:yaml.org,2002:str", "tag:yaml.org,2002:float"
# YAML 1.1 takes a number without a dot, 1e-4, for text; YAML 1.2 does not
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


def read_options(text: str) -> tuple[Any, dict[str, int]]:
    """What a YAML text holds, and the line of each of its names.

    Raises:
        yaml.YAMLError: it is no plain YAML, nested too deep, or has a key twice.
    """
    loader = StrictLoader(text)
    lines = {}
    try:
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                lines[str(key.value)] = key.start_mark.line + 1
                if isinstance(value, yaml.CollectionNode):
                    _read_numbers(value)
                elif value.style is None and value.tag in PLAIN:
                    # as typed until its option's type is known: 1.50 may be a name
                    value.tag = _STR
        return (None if node is None else loader.construct_document(node)), lines
    except RecursionError:
        raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} deep") from None
    finally:
        loader.dispose()


def read_json_options(text: str) -> Any:
    """What a JSON text holds; YAML would refuse its tabs.

    Raises:
        ValueError: it is no JSON, nested too deep, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None


def _read_numbers(node: yaml.Node, seen: set[int] | None = None) -> None:
    seen = set() if seen is None else seen
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        is_plain = node.style is None and node.tag == _STR
        if is_plain and _NUMBER.fullmatch(node.value):
            node.tag = _FLOAT
    elif isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            _read_numbers(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _read_numbers(value, seen)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twin!r} comes twice")
    return content


HOW = "Write one option a line, as on the command line without the dashes: 'batch-size: 8'."
COMMAND_LINE = "command line"  # an origin
SHOWN = 200  # characters of a value in a message
OPTION = re.compile(r"--[A-Za-z][\w.-]*\+?(=|$)")


@dataclass
class Given:
    """One option as it was given: its values as text, and where it came from.

    Attributes:
        content: the value as a config file has it.
    """

    name: str
    values: list[str]
    origin: str
    content: Any = None

    def __str__(self) -> str:
        place = "" if self.origin == COMMAND_LINE else f" (in {self.origin})"
        return " ".join([spelled(self.name), *map(shortened, self.values)]) + place


def shortened(text: str) -> str:
    """A value as messages show it."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def read_words(words: Sequence[str]) -> list[Given]:
    """Reads `--name value`, `--name=value`, `--name v1 v2` and `--name`.

    Raises:
        OptionError: a word that belongs to no option.
    """
    given: list[Given] = []
    for word in ["--help" if word == "-h" else word for word in words]:
        name, has_value, value = word[2:].partition("=")
        if OPTION.match(word) and len(name) <= SHOWN:
            values = [value] if has_value else []
            given.append(Given(_plain_name(name), values, COMMAND_LINE))
        elif given and not word.startswith("--"):
            given[-1].values.append(word)
        else:
            raise OptionError(
                f"{shortened(word)!r} belongs to no option. Put the name before it, --name "
                f"value, or see --help."
            )
    return given


def read_config(path: str | Path) -> list[Given]:
    """Reads a YAML (or JSON) file that maps options, without their dashes, to values.

    Paths in it are relative to the current directory, as on the command line.

    Raises:
        OptionError: the file is missing, is no YAML, or no mapping of options.
    """
    path = Path(path).expanduser()
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise OptionError(
                f"--config {path} has {size} bytes. At most {MAX_FILE_BYTES} are read. {HOW}"
            )
        text = path.read_text(encoding="utf-8")
        is_json = path.suffix == ".json"
        content, lines = (read_json_options(text), {}) if is_json else read_options(text)
    except OSError as error:
        raise OptionError(
            f"--config {path} can't be read: {error.strerror}. Check the path; it is relative "
            f"to the directory you are in ({Path.cwd()})."
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise OptionError(
            f"--config {path} is not plain {kind}, so no option can be read: {error}\n  {HOW}"
        ) from error
    if content is not None and not isinstance(content, dict):
        raise OptionError(f"--config {path} holds a {type(content).__name__}. {HOW}")
    return _given_once(content or {}, lines, path)


def _given_once(content: dict[Any, Any], lines: Mapping[str, int], path: Path) -> list[Given]:
    """The options of a file; refuses one that stands there twice, or another config file."""
    found: dict[str, Given] = {}
    for key, value in content.items():
        place = f"{path}:{lines[str(key)]}" if str(key) in lines else str(path)
        name = _plain_name(str(key))
        check_value(value, spelled(name), place)
        if name in found:
            raise OptionError(
                f"{spelled(name)} came twice, in {found[name].origin} and {place}. Take one out."
            )
        if name == "config":
            raise OptionError(
                f"--config came in {place}. A config file reads no other one: name both on the "
                "command line, and the later one wins."
            )
        found[name] = Given(name, _as_words(value, name), place, value)
    return list(found.values())


def _plain_name(name: str) -> str:
    return name.replace("-", "_")


def _as_words(value: Any, name: str) -> list[str]:
    """A YAML value as it would be typed."""
    if isinstance(value, str):
        return [value]
    if name == "import" and isinstance(value, list):
        return [str(item) for item in value]
    return [json.dumps(value, default=str)]


def by_name(given: Iterable[Given]) -> dict[str, Given]:
    """Options by name; where one was given several times, the last."""
    return {item.name: item for item in given}


def unfolded(given: Sequence[Given], names: Iterable[str]) -> list[Given]:
    """The options with those of a mapping, `lora: {rank: 8}`, by their own names, `lora.rank`.

    Args:
        names: every option of the command.

    Raises:
        OptionError: a mapping has another value.
    """
    heads = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}
    found: list[Given] = []
    for item in given:
        if item.name not in heads:
            found.append(item)
            continue
        content = item.content
        if item.origin == COMMAND_LINE and len(item.values) == 1:
            try:
                content = read_options(item.values[0])[0]
            except yaml.YAMLError:
                content = None
        if not isinstance(content, dict):
            keys = dict.fromkeys(name.removeprefix(f"{item.name}.").partition(".")[0]
                                 for name in names if name.startswith(f"{item.name}."))  # fmt: skip
            raise OptionError(
                f"{item} is not a mapping of {', '.join(keys)}. Give one of them with its value: "
                f"{spelled(item.name)}.{next(iter(keys))} VALUE."
            )
        inner = [
            Given(f"{item.name}.{_plain_name(str(key))}", _as_words(value, ""), item.origin, value)
            for key, value in content.items()
        ]
        found += unfolded(inner, names)
    return found


def drop_rivals(options: dict[str, Given], rivals: Mapping[str, str]) -> None:
    """Of two options of which one follows from the other, takes the one out that was not typed.

    Args:
        rivals: option -> the one that follows from it.

    Raises:
        OptionError: both were typed.
    """
    for pair in rivals.items():
        items = [options[name] for name in pair if name in options]
        typed = [item for item in items if item.origin == COMMAND_LINE]
        if len(typed) == 2:
            raise OptionError(f"{items[0]} and {items[1]} were both given. Leave one out.")
        for item in items if typed else []:
            if item not in typed:
                del options[item.name]


def gathered(given: Sequence[Given], names: Sequence[str]) -> dict[str, Given]:
    """Options that hold a text each time they are given, as one list; commas do not part it.

    Raises:
        OptionError: several words came without quotes.
    """
    found: dict[str, Given] = {}
    for name in names:
        items = [item for item in given if item.name == name]
        # the command line replaces what a config file has, a later file an earlier one
        counting = [item for item in items if item.origin == COMMAND_LINE] or items[-1:]
        texts = [text for item in counting for text in _texts(item)]
        if counting:
            words = [json.dumps(texts or None)]
            found[name] = Given(name, words, counting[-1].origin)
    return found


def _texts(item: Given) -> list[str]:
    """The texts of an option that is a text, or of a config file's list."""
    if item.origin != COMMAND_LINE:
        content = item.content if isinstance(item.content, list) else [item.content]
        return [str(text) for text in content if text is not None]
    if len(item.values) != 1:
        raise OptionError(
            f"{item} has {len(item.values)} words. Put it in quotes, and repeat the option for "
            "more."
        )
    return item.values


def option_types(parser: ArgumentParser) -> dict[str, Any]:
    """Option name -> type hint."""
    return {
        action.dest: getattr(action, "_typehint", None) or action.type
        for action in parser._actions
        if action.option_strings
    }


def convert(
    parser: ArgumentParser, settings: Mapping[str, Given], *, also_known: Iterable[str]
) -> Namespace:
    """Text -> typed values; every error names the option, its value and the type."""
    hints = option_types(parser)
    typed_as = {
        action.dest: action.option_strings[0] for action in parser._actions if action.option_strings
    }
    if old := [name for name in settings if name not in hints]:
        known, moved = {*hints, *also_known}, old_names("moved")
        told = {name: why for name, why in old_names("gone").items() if name in old}
        told |= {
            name: f"{spelled(name)} is {spelled(moved[name])} now."
            for name in old
            if moved.get(name) in known
        }
        if told:
            raise OptionError(
                f"{', '.join(str(settings[name]) for name in told)}: there is no such option any "
                f"more. {' '.join(dict.fromkeys(told.values()))}"
            )
    words = []
    for name, item in settings.items():
        if name not in hints:
            raise OptionError(_unknown_option(item, list({**hints, **dict.fromkeys(also_known)})))
        word = _one_word(item, hints[name])
        if re.search(r"\d:\d", word) and re.fullmatch(
            r"((?!str|Any).)*(int|float).*", str(hints[name])
        ):
            raise OptionError(_explain(f'Parser key "{name}"', settings, hints))  # YAML: 1:30 is 90
        words.append(f"{typed_as[name]}={word}")
    try:
        return parser.parse_args(words)
    except ArgumentError as error:
        raise OptionError(_explain(str(error), settings, hints)) from error


def _one_word(item: Given, hint: Any) -> str:
    """The values of an option as one word that jsonargparse converts."""
    options = (hint, *get_args(hint))
    lists = [kind for kind in options if {kind, get_origin(kind)} & {list, tuple, set}]
    if not item.values and bool in options:
        return "true"
    if not item.values:
        raise OptionError(needs_value(item, f"a value of type {_type_name(hint)}"))
    if not lists:
        if len(item.values) > 1:
            raise OptionError(needs_value(item, f"one value of type {_type_name(hint)}"))
        return item.values[0]
    first = item.values[0]
    choices = {choice for kind in options for choice in get_args(kind) if isinstance(choice, str)}
    if len(item.values) == 1 and (first.startswith("[") or first in {*choices, "null"}):
        return first
    entries = [entry for value in item.values if value for entry in value.split(",")]
    check_entries(spelled(item.name), entries)
    if any(str in get_args(kind) for kind in lists):
        return json.dumps(entries)
    return f"[{','.join(entries)}]"


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def needs_value(item: Given, wanted: str) -> str:
    count = len(item.values)
    return (
        f"{item} has {count or 'no'} value{'s' if count > 1 else ''}. Expected: {wanted}, because "
        f"an option without it says nothing. Give it after {spelled(item.name)}, quoted if it "
        "holds spaces."
    )


@functools.cache
def old_names(section: str) -> dict[str, str]:
    """A section of old_names.yaml: moved, gone, gone_from_export or elsewhere."""
    path = Path(__file__).with_name("old_names.yaml")
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))[section]
    return {name: told for names, told in rows.items() for name in names.split()}


def with_new_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved options of a run of the release before this one, by their names now."""
    moved, gone = old_names("moved"), old_names("gone")
    plain = {_plain_name(name): value for name, value in saved.items()}
    return {
        spelled(moved[name])[2:] if name in moved else given: value
        for given, (name, value) in zip(saved, plain.items(), strict=True)
        if name not in gone
    }


_TABLE = Path(__file__).with_name("llamafactory_keys.yaml")


def _new_name(name: str, known: Sequence[str]) -> str:
    """Return a sentence on an option of Hugging Face's Trainer or of older scripts, or nothing."""
    groups = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    rows = {key: row for group in groups.values() for keys, row in group.items()
            for key in str(keys).split()}  # fmt: skip
    row = rows.get(name) or {"to": old_names("elsewhere").get(name, "")}
    found = str(row.get("to") or "").split(", ")
    if found[0] and found[0].partition(".")[0].replace("-", "_") in known:
        note = f" ({row['note']})" if row.get("note") else ""
        return f" It is {', '.join(f'--{one}' for one in found)} here{note}."
    reason = row.get("why") or row.get("drop")
    return f" There is none here: {reason.rstrip('.')}." if reason else ""


def _unknown_option(item: Given, known: Sequence[str]) -> str:
    head, dot, _ = item.name.partition(".")
    siblings = [spelled(name) for name in known if dot and name.startswith(head + ".")]
    near = difflib.get_close_matches(item.name, known, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(map(spelled, near))}?" if near else ""
    hint = _new_name(item.name, known) or hint
    if dot:
        hint += f" The chosen part takes: {', '.join(siblings) or 'no options of its own'}."
    return (
        f"{item} is an unknown option.{hint} Only known options are taken, because a mistyped one "
        f"would be left out silently. --help all with the keys of this run lists them."
    )


def _explain(message: str, settings: Mapping[str, Given], hints: Mapping[str, Any]) -> str:
    """Turns jsonargparse's message into ours."""
    if match := re.search(r"arguments are required: (.*)", message):
        missing = ", ".join(spelled(name.strip()) for name in match[1].split(","))
        return (
            f"{missing} is missing. A value was expected, because the chosen part has no default "
            f"for it. Give it on the command line or in --config; --help says what it means."
        )
    match = re.match(r'Parser key "([^"]+)"', message)
    item = settings.get(match[1]) if match else None
    if match is None or item is None:
        return f"The options can't be read: {message}. See --help for their types and correct it."
    return (
        f"{item} has a wrong value{_where(item.values)}. Expected: "
        f"{_type_name(hints[item.name])}, the type of this option, so that a slip is noticed "
        f"before anything is loaded. Correct the value; --help all lists all types."
    )


def _where(values: Sequence[str]) -> str:
    """Which place of a list can't be read; empty for other values."""
    text = values[0] if len(values) == 1 else ""
    if text.startswith(("[", "{")):
        try:
            StrictLoader(text).get_single_data()
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            return f" at character {mark.column + 1}" if mark else ""
    return ""
