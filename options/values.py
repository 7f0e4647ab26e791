"""Text -> typed values with jsonargparse, and errors that name the option, its value and its type.

Does not know which options there are; the parser that is passed in does.
"""

import difflib
import json
import re
from argparse import ArgumentError
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace

from options.command_line import Given, typed
from options.fields import OptionError
from options.limits import check_entries, read_yaml


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
    words = []
    for name, item in settings.items():
        if name not in hints:
            raise OptionError(_unknown_option(item, [*hints, *also_known]))
        words.append(f"--{_dashed(name)}={_one_word(item, hints[name])}")
    try:
        return parser.parse_args(words)
    except ArgumentError as error:
        raise OptionError(_explain(str(error), settings, hints)) from error


def _dashed(name: str) -> str:
    # part options keep the underscores of the signature; see add_part_options
    return name if "." in name else name.replace("_", "-")


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
    check_entries(typed(item.name), entries)
    if any(str in get_args(kind) for kind in lists):
        return json.dumps(entries)
    return f"[{','.join(entries)}]"


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def needs_value(item: Given, wanted: str) -> str:
    count = len(item.values)
    return (
        f"{item} has {count or 'no'} value{'s' if count > 1 else ''}. Expected: {wanted}, because "
        f"an option without it says nothing. Give it after {typed(item.name)}, quoted if it holds "
        f"spaces."
    )


def _unknown_option(item: Given, known: Sequence[str]) -> str:
    head, dot, _ = item.name.partition(".")
    siblings = [typed(name) for name in known if dot and name.startswith(head + ".")]
    near = difflib.get_close_matches(item.name, known, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(map(typed, near))}?" if near else ""
    if dot:
        hint += f" The chosen part takes: {', '.join(siblings) or 'no options of its own'}."
    return (
        f"{item} is an unknown option.{hint} Only known options are taken, because a mistyped one "
        f"would be left out silently. --help with the keys of this run lists all of them."
    )


def _explain(message: str, settings: Mapping[str, Given], hints: Mapping[str, Any]) -> str:
    """Turns jsonargparse's message into ours."""
    if match := re.search(r"arguments are required: (.*)", message):
        missing = ", ".join(typed(name.strip()) for name in match[1].split(","))
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
        f"before anything is loaded. Correct the value; --help lists all types."
    )


def _where(values: Sequence[str]) -> str:
    """Which place of a list can't be read; empty for other values."""
    text = values[0] if len(values) == 1 else ""
    if text.startswith(("[", "{")):
        try:
            read_yaml(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            return f" at character {mark.column + 1}" if mark else ""
    return ""
