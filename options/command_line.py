"""Words of a command line and lines of a YAML file -> options by name, still as text.

Knows how options are spelled, not which options there are: that is parse_args.py.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from options.config_file import Entry, NoMapping, read_json_options, read_options
from options.fields import OptionError
from options.limits import MAX_FILE_BYTES, check_value

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
        return " ".join([typed(self.name), *map(shortened, self.values)]) + place


def shortened(text: str) -> str:
    """A value as messages show it."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def typed(name: str) -> str:
    """An option as it is typed: `--batch-size`, `--loss-fn.label_smoothing`."""
    head, dot, tail = name.partition(".")
    return "--" + head.replace("_", "-") + dot + tail


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
                f"{shortened(word)!r} belongs to no option. Options were expected, --name value, "
                f"because every value of a run has a name. Put the name before it, or see --help."
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
                f"--config {path} has {size} bytes. At most {MAX_FILE_BYTES} were expected, "
                f"because it holds options and no data. {HOW}"
            )
        text = path.read_text(encoding="utf-8")
        entries = read_json_options(text) if path.suffix == ".json" else read_options(text)
    except OSError as error:
        raise OptionError(
            f"--config {path} can't be read: {error.strerror}. A YAML file with options was "
            f"expected, such as the config.yaml of a run folder. Check the path; it is relative to "
            f"the directory you are in ({Path.cwd()})."
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise OptionError(
            f"--config {path} is not plain {kind}, so no option can be read: {error}\n  {HOW}"
        ) from error
    if isinstance(entries, NoMapping):
        raise OptionError(
            f"--config {path} holds a {entries.kind}. A mapping of options to values was "
            f"expected, because each value needs its option's name. {HOW}"
        )
    return list(_given_once(entries, path))


def _given_once(entries: Iterable[Entry], path: Path) -> Iterator[Given]:
    """The options of a file; refuses one that stands there twice, or another config file."""
    seen: dict[str, str] = {}
    for entry in entries:
        place = f"{path}:{entry.line}" if entry.line else str(path)
        name = _plain_name(entry.name)
        check_value(entry.value, typed(name), place)
        if name in seen:
            raise OptionError(
                f"{typed(name)} came twice, in {seen[name]} and {place}. It was expected once, "
                "because nobody could see which of the two counts: take one out."
            )
        if name == "config":
            raise OptionError(
                f"--config came in {place}. A config file reads no other one: name both on the "
                "command line, and the later one wins."
            )
        seen[name] = place
        yield Given(name, _as_words(entry.value, name), place, entry.value)


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
            f"{item} has {len(item.values)} words. One text was expected, because each "
            f"{typed(item.name)} is one: put it in quotes, and repeat {typed(item.name)} for more."
        )
    return item.values
