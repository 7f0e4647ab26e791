"""Makes the converter of a set, or finds out by the columns of each row which one it needs."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from stageline.data.converters.alpaca import convert_alpaca
from stageline.data.converters.layout import (
    FORMATTINGS,
    OPENAI_TAGS,
    SHAREGPT_TAGS,
    Layout,
    bad_row,
    check_columns,
    columns_of,
    make_layout,
    shown,
)
from stageline.data.converters.media import place_media
from stageline.data.converters.openai import convert_openai
from stageline.data.converters.sharegpt import convert_sharegpt
from stageline.data.converters.tools import read_tools
from stageline.errors import UserError

Converter = Callable[[dict[str, Any], str], dict[str, Any]]
_PLAIN = ("question", "answer")


def make_converter(
    formatting: str = "auto",
    *,
    columns: dict[str, str] | None = None,
    tags: dict[str, str] | None = None,
    ranking: bool = False,
) -> Converter:
    """A function (row, source) -> sample without id, source and group.

    Args:
        formatting: alpaca, sharegpt, openai, text, or auto: by the columns of each row.
        columns: names of the columns, as in dataset_info.json: prompt, query, response, history,
            messages, system, tools, images, videos, chosen, rejected, kto_tag; null: not there.
        tags: words of the messages: role_tag, content_tag, user_tag, assistant_tag,
            observation_tag, function_tag, system_tag.
        ranking: rows are preferences, with the columns chosen and rejected.

    Raises:
        UserError: an unknown format, column or tag.
    """
    if formatting == "auto":
        return _Auto(columns, tags, ranking)
    if formatting not in FORMATTINGS:
        raise UserError(
            f"the formatting is {formatting!r}. One of {', '.join(FORMATTINGS)} was expected, "
            "because rows are read by it: correct it."
        )
    layout = make_layout(formatting, columns=columns, tags=tags, ranking=ranking)
    return functools.partial(_convert, layout)


def _convert(layout: Layout, row: Mapping[str, Any], source: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise bad_row(source, f"the row is {shown(row)}", "An object was", "its fields are read")
    sample = _CONVERT[layout.formatting](row, layout, source)
    if "messages" not in sample:
        return sample
    system = layout.value(row, "system")
    if system:
        _add_system(sample, system, layout, source)
    tools = read_tools(layout.value(row, "tools"), column=layout.name("tools"), source=source)
    if tools:
        sample["tools"] = tools
    sample.update(place_media(sample["messages"], row, layout, source=source))
    return sample


def _add_system(sample: dict[str, Any], system: Any, layout: Layout, source: str) -> None:
    name = layout.name("system")
    if not isinstance(system, str):
        raise bad_row(
            source,
            f"the column {name!r} is {shown(system)}",
            "Text was",
            "it is the system message",
        )
    first = sample["messages"][0]
    if first["role"] != "system":
        sample["system"] = system
    elif first["content"] != system:
        raise bad_row(
            source,
            f"the column {name!r} is {shown(system)}, and the first message is the system's, "
            f"{shown(first['content'])}",
            "One of them was",
            "a conversation has one system message",
        )


def _convert_text(row: Mapping[str, Any], layout: Layout, source: str) -> dict[str, Any]:
    text = layout.value(row, "text")
    if isinstance(text, str) and text:
        return {"text": text}
    raise bad_row(
        source,
        f"the column {layout.name('text')!r} is {'missing' if text is None else shown(text)}",
        "Text was",
        "it is what the model learns",
    )


_CONVERT = {
    "alpaca": convert_alpaca,
    "sharegpt": convert_sharegpt,
    "openai": convert_openai,
    "text": _convert_text,
}


class _Auto:
    """Chooses by the columns of each row; a set may have rows of several kinds."""

    def __init__(
        self,
        columns: dict[str, str] | None,
        tags: dict[str, str] | None,
        ranking: bool,
    ) -> None:
        self._columns = dict(columns or {})
        check_columns(self._columns, columns_of(*FORMATTINGS[1:]))
        self._ranking = ranking
        if tags:
            raise UserError(
                f"tags came ({', '.join(tags)}) without a formatting. sharegpt or openai was "
                "expected, because the words of messages belong to one: say which."
            )
        self._layouts: dict[tuple[str, str | None], Layout] = {}

    def __call__(self, row: dict[str, Any], source: str) -> dict[str, Any]:
        if not isinstance(row, Mapping):
            return _convert(self._layout("text", None), row, source)
        formatting, column = self._choose(row, source)
        if formatting == "plain":
            return dict(row)
        return _convert(self._layout(formatting, column), row, source)

    def _layout(self, formatting: str, messages: str | None) -> Layout:
        key = (formatting, messages)
        if key not in self._layouts:
            known = columns_of(formatting)
            columns = {name: own for name, own in self._columns.items() if name in known}
            if messages is not None:
                columns["messages"] = messages
            self._layouts[key] = make_layout(formatting, columns=columns, ranking=self._ranking)
        return self._layouts[key]

    def _choose(self, row: Mapping[str, Any], source: str) -> tuple[str, str | None]:
        """The format of a row, and the column of its messages where it is not the usual one."""
        there = {name for name, value in row.items() if value is not None}
        own = {name: self._columns.get(name, name) for name in _KNOWN}
        has = {name for name, column in own.items() if column in there}
        found = [name for name in ("messages", "conversations") if name in has]
        if "instruction" in has or {"query", "response"} & self._columns.keys():
            found.append("instruction")
        if "prompt" in has and {"completion", "chosen"} & has and not found:
            found.append("prompt")
        if len(found) > 1:
            raise self._unclear(row, source, f"columns of several formats, {', '.join(found)}")
        if found in (["messages"], ["conversations"]):
            return self._by_first(row, own[found[0]] or "", found[0], source)
        if found:
            return ("alpaca" if found == ["instruction"] else "openai"), None
        if {"chosen", "rejected"} <= has:
            return "openai", None
        if set(_PLAIN) <= there:
            return "plain", None
        if "text" in has:
            return "text", None
        raise self._unclear(row, source, "no column that says how it is written")

    def _by_first(
        self, row: Mapping[str, Any], column: str, usual: str, source: str
    ) -> tuple[str, str | None]:
        messages = row[column]
        first = messages[0] if isinstance(messages, list) and messages else None
        fields = set(first) if isinstance(first, Mapping) else set()
        kinds = {"openai": OPENAI_TAGS, "sharegpt": SHAREGPT_TAGS}
        fitting = [kind for kind, tags in kinds.items() if tags.role in fields]
        if len(fitting) != 1:
            what = f"messages in {column!r} that begin with {shown(first)}"
            raise self._unclear(row, source, what)
        is_usual = column == {"openai": "messages", "sharegpt": "conversations"}[fitting[0]]
        return fitting[0], None if is_usual else column

    def _unclear(self, row: Mapping[str, Any], source: str, what: str) -> Exception:
        return bad_row(
            source,
            f"the row has {what}; seen were {', '.join(sorted(map(str, row))) or 'no columns'}",
            "One of conversations (from, value), messages (role, content), instruction, prompt "
            "with completion or chosen and rejected, question with answer, or text was",
            "the format follows from them",
            f"give the formatting, one of {', '.join(FORMATTINGS[1:])}, and the columns",
        )


_KNOWN = (
    *("messages", "conversations", "instruction", "prompt", "completion"),
    *("chosen", "rejected", "text"),
)
