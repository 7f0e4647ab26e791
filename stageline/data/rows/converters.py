"""Makes samples of rows that are written in the format of a data set, or finds out which it is."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stageline.data.rows.conversations import (
    FORMATTINGS,
    OPENAI_TAGS,
    SHAREGPT_TAGS,
    FormattedRow,
    Message,
    RowFormat,
    bad_row,
    check_alternation,
    check_known,
    check_last,
    columns_of,
    make_format,
    read_label,
    says_label,
    shown,
    state_of,
)
from stageline.errors import DataError, UserError

Converter = Callable[[dict[str, Any], str], dict[str, Any]]
_PLACEHOLDER = re.compile(r"(<image>|<video>)")
_KIND = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}


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
    check_known("the formatting", [formatting], FORMATTINGS)
    if formatting == "auto":
        return functools.partial(_convert, _FormatFinder(columns, tags, ranking))
    own = make_format(formatting, columns=columns, tags=tags, ranking=ranking)
    return functools.partial(_convert, lambda row: own)


def _convert(
    find: Callable[[Mapping[str, Any]], RowFormat | None], row: dict[str, Any], source: str
) -> dict[str, Any]:
    try:
        if not isinstance(row, Mapping):
            raise bad_row(f"the row is {shown(row)}", "An object was", "its fields are read")
        found = find(row)
        return dict(row) if found is None else _converted(FormattedRow(row, found))
    except DataError as error:
        raise DataError(f"{source}: {error}") from None


def _converted(row: FormattedRow) -> dict[str, Any]:
    sample = _CONVERT[row.format.formatting](row)
    if "messages" not in sample:
        return sample
    if row.value("system"):
        _add_system(sample, row)
    tools = row.tools()
    if tools:
        sample["tools"] = tools
    return {**sample, **place_media(sample["messages"], row)}


def _add_system(sample: dict[str, Any], row: FormattedRow) -> None:
    system, column = row.value("system"), f"the column {row.name('system')!r}"
    if not isinstance(system, str):
        raise bad_row(f"{column} is {shown(system)}", "Text was", "it is the system message")
    first = sample["messages"][0]
    if first["role"] != "system":
        sample["system"] = system
    elif first["content"] != system:
        came = f"{column} is {shown(system)}, and the first message is the system's, "
        came += shown(first["content"])
        raise bad_row(came, "One of them was", "a conversation has one system message")


def _convert_sharegpt(row: FormattedRow) -> dict[str, Any]:
    """A conversation whose speakers take turns."""
    messages = row.messages("messages")
    # without `ranking` a conversation that ends with an answer is one to learn
    is_pair = row.format.ranking or (row.has_pair and messages[-1]["role"] in ("user", "tool"))
    check_alternation(messages, has_answer=not is_pair, column=row.name("messages"))
    return row.pair(messages) if is_pair else _with_label(messages, row)


def _convert_alpaca(row: FormattedRow) -> dict[str, Any]:
    """Instruction, input and output; where the set has only the column of the prompt, its text."""
    if row.format.columns.get("response") is None and "prompt" in row.format.named:
        if not row.has_pair:
            return {"text": _text(row, "prompt", is_needed=True)}
    question = "\n".join(part for name in ("prompt", "query") if (part := _text(row, name)))
    if not question:
        names = " and ".join(repr(row.name(name)) for name in ("prompt", "query"))
        came = f"the columns {names} are empty or missing; the row has {row.fields}"
        raise bad_row(came, "Text in one of them was", "it is the question")
    messages = [*_history(row), {"role": "user", "content": question}]
    if row.format.ranking or (row.has_pair and row.value("response") is None):
        return row.pair(messages)
    answer = _text(row, "response", is_needed=True)
    return _with_label([*messages, {"role": "assistant", "content": answer}], row)


def _with_label(messages: list[Message], row: FormattedRow) -> dict[str, Any]:
    if not row.has_label:
        return {"messages": messages}
    label = read_label(row.value("kto_tag"), column=row.name("kto_tag"))
    return {"messages": messages, "label": label}


def _history(row: FormattedRow) -> list[Message]:
    pairs = row.value("history") or []
    messages: list[Message] = []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            came = f"the column {row.name('history')!r} has {shown(pair)}"
            why = "they are the turns before the question"
            raise bad_row(came, "A list of [question, answer] was", why)
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    return messages


def _text(row: FormattedRow, what: str, *, is_needed: bool = False) -> str:
    value = row.value(what)
    if isinstance(value, str) or (value is None and not is_needed):
        return value or ""
    is_pair = what == "response" and bool({"chosen", "rejected"} & set(row.data))
    came = f"the column {row.name(what)!r} {state_of(value)}; the row has {row.fields}"
    do = "say that the set is a ranking (ranking: true)" if is_pair else ""
    raise bad_row(came, "Text was", "the prompt and the answer are made of it", do)


def _convert_text(row: FormattedRow) -> dict[str, Any]:
    text = row.value("text")
    if isinstance(text, str) and text:
        return {"text": text}
    what = f"the column {row.name('text')!r} {state_of(text)}"
    raise bad_row(what, "Text was", "it is what the model learns")


def _convert_openai(row: FormattedRow) -> dict[str, Any]:
    """Messages as OpenAI's interface has them, or TRL's rows of prompt and completion."""
    messages, column = _prompt(row)
    if row.has_pair:
        return row.pair(messages)
    if row.value("response") is not None or column != "messages":
        check_last(messages, has_answer=False, column=row.name(column))
        messages = messages + row.answer("response")
    check_last(messages, has_answer=True, column=row.name(column))
    # a column `label` may be anything in a row with messages; beside a completion it is a label
    if not row.has_label and "label" in row.data:
        if row.value("response") is not None or says_label(row.data["label"]):
            label = read_label(row.data["label"], column="label")
            return {"messages": messages, "label": label}
    return _with_label(messages, row)


def _prompt(row: FormattedRow) -> tuple[list[Message], str]:
    """The messages before the answers, or all; and which column they are from."""
    there = [name for name in ("messages", "prompt") if row.value(name) is not None]
    if len(there) == 2:
        came = f"it has both {row.name('messages')!r} and {row.name('prompt')!r}"
        do = 'say which one does not count, such as columns: {"messages": null}'
        why = "it is not known which one begins the conversation"
        raise bad_row(came, "One of them was", why, do)
    if not there:
        if row.has_pair:
            return [], "prompt"
        came = f"it has neither {row.name('messages')!r} nor {row.name('prompt')!r}, but "
        raise bad_row(came + row.fields, "One of them was", "a conversation begins with it")
    value = row.value(there[0])
    if there[0] == "prompt" and isinstance(value, str):
        return [{"role": "user", "content": value}], "prompt"
    return row.messages(there[0]), there[0]


_CONVERT = {
    "alpaca": _convert_alpaca,
    "sharegpt": _convert_sharegpt,
    "openai": _convert_openai,
    "text": _convert_text,
}


class _FormatFinder:
    """Chooses by the columns of each row; a set may have rows of several kinds."""

    def __init__(
        self, columns: dict[str, str] | None, tags: dict[str, str] | None, ranking: bool
    ) -> None:
        self._columns = dict(columns or {})
        check_known("a name in `columns`", self._columns, columns_of(*FORMATTINGS[1:]))
        self._ranking = ranking
        if tags:
            raise UserError(
                f"tags came ({', '.join(tags)}) without a formatting. sharegpt or openai was "
                "expected, because the words of messages belong to one: say which."
            )
        self._format = functools.cache(self._make_format)

    def __call__(self, row: Mapping[str, Any]) -> RowFormat | None:
        """The format of a row; None for one whose fields a template takes as they are."""
        there = {name for name, value in row.items() if value is not None}
        has = {name for name in _DISTINCTIVE if self._columns.get(name, name) in there}
        found: list[str] = [name for name in ("messages", "conversations") if name in has]
        if "instruction" in has or {"query", "response"} & self._columns.keys():
            found.append("instruction")
        if "prompt" in has and {"completion", "chosen"} & has and not found:
            found.append("prompt")
        if len(found) > 1:
            raise _unclear(row, f"columns of several formats, {', '.join(found)}")
        if found in (["messages"], ["conversations"]):
            return self._by_first(row, self._columns.get(found[0], found[0]))
        if found:
            return self._format("alpaca" if found == ["instruction"] else "openai")
        if {"chosen", "rejected"} <= has:
            return self._format("openai")
        if {"question", "answer"} <= there:
            return None
        if "text" in has:
            return self._format("text")
        raise _unclear(row, "no column that says how it is written")

    def _by_first(self, row: Mapping[str, Any], column: str) -> RowFormat:
        """The format of a conversation, by the fields of its first message."""
        messages = row[column]
        first = messages[0] if isinstance(messages, list) and messages else None
        fields = set(first) if isinstance(first, Mapping) else set()
        kinds = {"openai": OPENAI_TAGS, "sharegpt": SHAREGPT_TAGS}
        fitting = [kind for kind, tags in kinds.items() if tags.role in fields]
        if len(fitting) != 1:
            raise _unclear(row, f"messages in {column!r} that begin with {shown(first)}")
        is_usual = column == {"openai": "messages", "sharegpt": "conversations"}[fitting[0]]
        return self._format(fitting[0], None if is_usual else column)

    def _make_format(self, formatting: str, messages: str | None = None) -> RowFormat:
        """A format; `messages` is their column, where it is not the usual one."""
        known = columns_of(formatting)
        columns = {name: own for name, own in self._columns.items() if name in known}
        if messages is not None:
            columns["messages"] = messages
        return make_format(formatting, columns=columns, ranking=self._ranking)


_DISTINCTIVE = (
    *("messages", "conversations", "instruction", "prompt", "completion"),
    *("chosen", "rejected", "text"),
)


def _unclear(row: Mapping[str, Any], what: str) -> DataError:
    came = f"the row has {what}; seen were {', '.join(sorted(map(str, row))) or 'no columns'}"
    wanted = (
        "One of conversations (from, value), messages (role, content), instruction, prompt "
        "with completion or chosen and rejected, question with answer, or text was"
    )
    do = f"give the formatting, one of {', '.join(FORMATTINGS[1:])}, and the columns"
    return bad_row(came, wanted, "the format follows from them", do)


def place_media(messages: list[Message], row: FormattedRow) -> dict[str, list[Any]]:
    """Turns <image> and <video> in texts into parts, and says which files belong there.

    Only where the row has the column are they places; elsewhere, and in answers, they are text.
    Names without a place stand before the first message of the user.

    Returns:
        `images` and `videos`, as far as there are any, in the order of their places.
    """
    names = {kind: _names(row, kind) for kind in ("image", "video")}
    given = {kind for kind, value in names.items() if value is not None}
    has_parts = any(isinstance(message["content"], list) for message in messages)
    if not given and not has_parts:
        return {}
    if not has_parts:  # a row with parts has no placeholders
        for message in messages:
            if message["role"] != "assistant":
                _split(message, given)
    media = {}
    for kind in ("video", "image"):  # put before the text one after the other: images are first
        found = _fill(messages, kind, names[kind])
        if found:
            media[f"{kind}s"] = found
    return media


def _names(row: FormattedRow, kind: str) -> list[Any] | None:
    value = row.value(f"{kind}s")
    if value is None and f"{kind}s" not in row.format.named:
        value = row.data.get(kind)
    if value is None:
        return None
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(_is_name(name, kind) for name in value):
        came = f"the {kind}s are {shown(value)}"
        raise bad_row(came, "A file name or a list of them was", "they are read from files")
    return value


def _is_name(value: Any, kind: str) -> bool:
    """A file; of a video also the files of its frames."""
    if kind == "video" and isinstance(value, list):
        return bool(value) and all(isinstance(frame, str) for frame in value)
    return isinstance(value, str)


def _split(message: Message, given: set[str]) -> None:
    """Cuts a text at its placeholders, in place."""
    wanted = {f"<{kind}>" for kind in given}
    parts: list[dict[str, str]] = []
    for text in _PLACEHOLDER.split(message["content"]):
        if text in wanted:
            parts.append({"type": text[1:-1]})
        elif text and parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text
        elif text:
            parts.append({"type": "text", "text": text})
    if any(part["type"] != "text" for part in parts):
        message["content"] = parts


def _fill(messages: Sequence[Message], kind: str, names: list[Any] | None) -> list[Any]:
    """The names in the order of their places; parts lose theirs."""
    places = [
        part
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if _KIND.get(part["type"]) == kind
    ]
    own = [file_of_part(part) for part in places]
    for part in places:
        part.clear()
        part["type"] = kind
    rest = list(names or ())
    if not places and rest:
        _put_first(messages, [{"type": kind} for _ in rest])
        return rest
    num_open = sum(name is None for name in own)
    if num_open != len(rest):
        came = f"it has {num_open} places for {kind}s and {len(rest)} names"
        why = f"each {kind} belongs to a place in the text (<{kind}>, or a part)"
        raise bad_row(came, "As many were", why)
    return [rest.pop(0) if name is None else name for name in own]


def file_of_part(part: Mapping[str, Any]) -> Any:
    """The file that a part of a message names; None where it names none."""
    for key in ("image", "video", "path", "url", "image_url", "video_url"):
        value = part.get(key)
        value = value.get("url") if isinstance(value, Mapping) else value
        if isinstance(value, str | list) and value:
            return value
    return None


def _put_first(messages: Sequence[Message], parts: list[dict[str, str]]) -> None:
    message = next((message for message in messages if message["role"] == "user"), None)
    if message is None:
        raise bad_row("no message is of the user", "One was", "the row's images belong to it")
    content = message["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    message["content"] = [*parts, *text]
