"""Words of a command line and lines of a YAML file -> options by name, still as text.

Knows how options are spelled, not which options there are: that is parse_args.py.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from options.fields import OptionError
from options.limits import MAX_FILE_BYTES, check_value, read_yaml

SHOWN = 200  # characters of a value in a message
OPTION = re.compile(r"--[A-Za-z][\w.-]*\+?(=|$)")


@dataclass
class Given:
    """One option as it was given: its values as text, and where it came from."""

    name: str
    values: list[str]
    origin: str

    def __str__(self) -> str:
        place = "" if self.origin == "command line" else f" (in {self.origin})"
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
            given.append(Given(_plain_name(name), values, "command line"))
        elif given and not word.startswith("--"):
            given[-1].values.append(word)
        else:
            raise OptionError(
                f"{shortened(word)!r} belongs to no option. Options were expected, --name value, "
                f"because every value of a run has a name. Put the name before it, or see --help."
            )
    return given


def read_config(path: str | Path) -> list[Given]:
    """Reads a YAML file that maps options, without their dashes, to values.

    Raises:
        OptionError: the file is missing, is no YAML, or no mapping of options.
    """
    path = Path(path).expanduser()
    how = "Write one option a line, as on the command line without the dashes: 'batch-size: 8'."
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise OptionError(
                f"--config {path} has {size} bytes. At most {MAX_FILE_BYTES} were expected, "
                f"because it holds options and no data. {how}"
            )
        content = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"--config {path} can't be read: {error.strerror}. A YAML file with options was "
            f"expected, such as the config.yaml of a run folder. Check the path; it is relative to "
            f"the directory you are in ({Path.cwd()})."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--config {path} is not plain YAML, so no option can be read: {error}\n  {how}"
        ) from error
    if not isinstance(content, dict | None):
        raise OptionError(
            f"--config {path} holds a {type(content).__name__}. A mapping of options to values was "
            f"expected, because each value needs its option's name. {how}"
        )
    for name, value in (content or {}).items():
        check_value(value, typed(str(name)), str(path))
    return [
        Given(_plain_name(str(name)), _as_words(value, _plain_name(str(name))), str(path))
        for name, value in (content or {}).items()
    ]


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
