"""How large a value may be, and YAML that is read without surprises.

Lists go through a YAML parser and a check of each entry: without limits ten megabytes of them
take hours, and a deeply nested one exhausts the stack.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import yaml

from options.fields import OptionError

MAX_FILE_BYTES = 2**20
MAX_CHARACTERS = 100_000
MAX_ENTRIES = 1_000
MAX_DEPTH = 20


class StrictLoader(yaml.SafeLoader):
    """Plain values only; refuses a key that comes twice, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen and key.tag.endswith(":str"):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} comes twice", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep=deep)


def read_yaml(text: str) -> Any:
    """The one document of `text`.

    Raises:
        yaml.YAMLError: it is no plain YAML, or nested too deep.
    """
    loader = StrictLoader(text)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} deep") from None
    finally:
        loader.dispose()


def check_value(value: Any, name: str, place: str) -> None:
    """Refuses what a file holds under one name, if it is too large; aliases count as often as used.

    Raises:
        OptionError: names the option and the limit.
    """
    for count, (depth, item) in enumerate(_walk(value, 0)):
        long = isinstance(item, str) and len(item) > MAX_CHARACTERS
        if long or depth > MAX_DEPTH or count > MAX_ENTRIES:
            what = f"has a text of {len(item)} characters" if long else (
                f"is nested more than {MAX_DEPTH} deep" if depth > MAX_DEPTH else "is longer"
            )  # fmt: skip
            raise OptionError(_too_large(f"{name} (in {place})", what))


def check_words(name: str, words: list[str]) -> None:
    """Refuses words of a command line that are too large for one option.

    Raises:
        OptionError: names the option, the limit and, for depth, the position.
    """
    total = sum(map(len, words))
    if total > MAX_CHARACTERS:
        raise OptionError(_too_large(name, f"has {total} characters"))
    for word in words:
        if word[:1] not in "[{":
            continue
        depth = 0
        for position, character in enumerate(word, 1):
            depth += (character in "[{") - (character in "]}")
            if depth > MAX_DEPTH:
                raise OptionError(
                    _too_large(name, f"is nested more than {MAX_DEPTH} deep (character {position})")
                )


def check_entries(name: str, entries: list[str]) -> None:
    """Refuses too many entries of a list, and an empty one.

    Raises:
        OptionError: names the option and the entry.
    """
    if len(entries) > MAX_ENTRIES:
        raise OptionError(_too_large(name, f"has {len(entries)} entries"))
    if "" in entries:
        raise OptionError(
            f"{name} {','.join(entries)} has nothing in place {entries.index('') + 1}. A value "
            "was expected on both sides of each comma, because a missing one may be a slip. Fill "
            "it in, or take the comma out."
        )


def _walk(value: Any, depth: int) -> Iterator[tuple[int, Any]]:
    yield depth, value
    if depth > MAX_DEPTH:
        return
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | set | tuple):
        for item in value:
            yield from _walk(item, depth + 1)


def _too_large(name: str, what: str) -> str:
    return (
        f"{name} {what}. At most {MAX_CHARACTERS} characters, {MAX_ENTRIES} entries and lists "
        f"{MAX_DEPTH} deep were expected, because an option is a setting and no data. Put data "
        "into a file that a part reads."
    )
