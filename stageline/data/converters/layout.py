"""Where a format has what: names of columns, and the names that messages give fields and roles."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stageline.errors import DataError, UserError

Formatting = Literal["auto", "alpaca", "sharegpt", "openai", "text"]
FORMATTINGS = ("auto", "alpaca", "sharegpt", "openai", "text")
# the columns that hold the text of each format; names as in dataset_info.json
_TEXT_COLUMNS = {
    "alpaca": {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "history": "history",
    },
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages", "prompt": "prompt", "response": "completion"},
    "text": {"text": "text"},
}
_SHARED_COLUMNS = {
    "system": "system",
    "tools": "tools",
    "images": "images",
    "videos": "videos",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "kto_tag",
}
_TEXT_NAMES = {name for columns in _TEXT_COLUMNS.values() for name in columns}
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
# what else is written for a role of OpenAI's
_OPENAI_ALIASES = {"developer": "system", "function": "tool"}
CALL = "function call"


@dataclass(frozen=True)
class Tags:
    """The words of messages.

    Attributes:
        role, content: names of their fields.
        roles: word in the data -> role; CALL is an answer that calls functions.
    """

    role: str
    content: str
    roles: Mapping[str, str]

    @classmethod
    def of(cls, names: Mapping[str, str], *, aliases: Mapping[str, str] | None = None) -> "Tags":
        """The words of a table such as dataset_info.json has."""
        roles = {
            names["user_tag"]: "user",
            names["assistant_tag"]: "assistant",
            names["observation_tag"]: "tool",
            names["function_tag"]: CALL,
            names["system_tag"]: "system",
        }
        return cls(names["role_tag"], names["content_tag"], {**(aliases or {}), **roles})


OPENAI_TAGS = Tags.of(_OPENAI_TAGS, aliases=_OPENAI_ALIASES)
SHAREGPT_TAGS = Tags.of(_TAGS)


@dataclass(frozen=True)
class Layout:
    """How rows of one set are written.

    Attributes:
        columns: what -> the row's column; None: there is none.
        tags: the words of messages.
        ranking: rows have a chosen and a rejected answer.
        named: the columns that were given, not ours by default.
    """

    formatting: str
    columns: Mapping[str, str | None]
    tags: Tags
    ranking: bool = False
    named: frozenset[str] = field(default_factory=frozenset)

    def value(self, row: Mapping[str, Any], what: str) -> Any:
        """What a row has in a column; None where it has none."""
        name = self.columns.get(what)
        return None if name is None else row.get(name)

    def name(self, what: str) -> str:
        """The column's name, for errors."""
        return self.columns.get(what) or what


def make_layout(
    formatting: str,
    *,
    columns: Mapping[str, str | None] | None = None,
    tags: Mapping[str, str] | None = None,
    ranking: bool = False,
) -> Layout:
    """The layout that names from dataset_info.json describe.

    Where one of the text columns is named, those that are not named do not exist, as in that file.

    Raises:
        UserError: an unknown format, column or tag.
    """
    _check_known("--dataset.formatting", [formatting], FORMATTINGS[1:])
    columns, tags = dict(columns or {}), dict(tags or {})
    check_columns(columns, columns_of(formatting))
    _check_known("a name in `tags`", tags, list(_TAGS))
    text: dict[str, str | None] = dict.fromkeys(_TEXT_COLUMNS[formatting])
    if not _TEXT_NAMES & {name for name, column in columns.items() if column}:
        text.update(_TEXT_COLUMNS[formatting])
    defaults = _OPENAI_TAGS if formatting == "openai" else _TAGS
    aliases = _OPENAI_ALIASES if formatting == "openai" else None
    given = {name: column or None for name, column in columns.items()}
    return Layout(
        formatting=formatting,
        columns={**text, **_SHARED_COLUMNS, **given},
        tags=Tags.of({**defaults, **tags}, aliases=aliases),
        ranking=ranking or bool(columns.get("chosen")),
        named=frozenset(name for name, column in columns.items() if column),
    )


def columns_of(*formattings: str) -> list[str]:
    """What columns can be named for a format; of several formats for any of them."""
    text = [name for formatting in formattings for name in _TEXT_COLUMNS[formatting]]
    return [*dict.fromkeys(text), *_SHARED_COLUMNS]


def check_columns(columns: Iterable[str], known: list[str]) -> None:
    """Refuses names that no format has.

    Raises:
        UserError: lists the known ones.
    """
    _check_known("a name in `columns`", columns, known)


def _check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(
            f"{what} is {unknown[0]!r}. One of {', '.join(known)} was expected, because those are "
            "what rows are read by: correct it."
        )


def bad_row(source: str, what: str, expected: str, why: str, do: str = "") -> DataError:
    """The error for a row: what came, what was expected, why, what to do."""
    return DataError(f"{source}: {what}. {expected} expected, because {why}: {do or _CORRECT}.")


_CORRECT = "correct the row, or say how the set is written (formatting, columns, tags)"


def shown(value: Any, most: int = 80) -> str:
    """A value for an error, shortened."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
