"""The entries of a config file with their lines; numbers are read as in YAML 1.2.

Knows no option: command_line.py turns entries into what would have been typed.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

from options.limits import MAX_DEPTH, StrictLoader

_STR, _FLOAT = "tag:yaml.org,2002:str", "tag:yaml.org,2002:float"
_MERGE = "tag:yaml.org,2002:merge"
# YAML 1.1 takes a number without a dot, 1e-4, for text
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


@dataclass(frozen=True)
class Entry:
    """One option of a file.

    Attributes:
        line: where it stands; None where the format does not tell.
    """

    name: str
    value: Any
    line: int | None = None


@dataclass(frozen=True)
class NoMapping:
    """What a file holds in place of options."""

    kind: str


def read_options(text: str) -> list[Entry] | NoMapping:
    """The entries of a YAML text.

    Raises:
        yaml.YAMLError: it is no plain YAML, nested too deep, or has a key twice.
    """
    loader = StrictLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            value = loader.construct_document(node)
            return [] if value is None else NoMapping(type(value).__name__)
        for _, value in node.value:
            if isinstance(value, yaml.CollectionNode):
                _read_numbers(value)  # a value alone is text until its option's type is known
        lines = [key.start_mark.line + 1 for key, _ in node.value]
        merges = any(key.tag == _MERGE for key, _ in node.value)
        content = loader.construct_document(node)
        if merges:  # what `<<` brings along has no line of its own
            return [Entry(str(name), value) for name, value in content.items()]
        return [
            Entry(str(name), value, line)
            for (name, value), line in zip(content.items(), lines, strict=True)
        ]
    except RecursionError:
        raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} deep") from None
    finally:
        loader.dispose()


def read_json_options(text: str) -> list[Entry] | NoMapping:
    """The entries of a JSON text; YAML would refuse its tabs.

    Raises:
        ValueError: it is no JSON, nested too deep, or has a key twice.
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    if not isinstance(content, dict):
        return NoMapping(type(content).__name__)
    return [Entry(name, value) for name, value in content.items()]


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
