"""Makes the converter of a set, or finds out by the columns of each row which one it needs."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stageline.data.rows.conversations import (
    FORMATTINGS,
    OPENAI_TAGS,
    SHAREGPT_TAGS,
    Message,
    RowFormat,
    bad_row,
    check_alternation,
    check_columns,
    check_last,
    columns_of,
    has_pair,
    make_layout,
    read_answer,
    read_label,
    read_messages,
    read_pair,
    read_tools,
    says_label,
    shown,
)
from stageline.errors import UserError

# -- rows with a conversation whose speakers have names of the set's own, strictly taking turns ---


def convert_sharegpt(row: Mapping[str, Any], layout: RowFormat, source: str) -> dict[str, Any]:
    """The messages of a row, checked as the tool that the format comes from checks them.

    Raises:
        DataError: names the message that is out of turn, has an unknown speaker, or no text.
    """
    column = layout.name("messages")
    value = layout.value(row, "messages")
    messages = read_messages(value, layout.tags, column=column, source=source)
    # without `ranking` a conversation that ends with an answer is one to learn
    is_pair = layout.ranking or (has_pair(row, layout) and messages[-1]["role"] in ("user", "tool"))
    check_alternation(messages, has_answer=not is_pair, column=column, source=source)
    if is_pair:
        return read_pair(messages, row, layout, source=source)
    sample: dict[str, Any] = {"messages": messages}
    label = layout.value(row, "kto_tag")
    if label is not None or "kto_tag" in layout.named:
        sample["label"] = read_label(label, column=layout.name("kto_tag"), source=source)
    return sample


# -- rows with messages as OpenAI's interface has them, and TRL's rows of prompt and completions --


def convert_openai(row: Mapping[str, Any], layout: RowFormat, source: str) -> dict[str, Any]:
    """The messages of a row.

    Raises:
        DataError: a message is none, or the conversation has no answer to learn.
    """
    prompt, column = _prompt(row, layout, source)
    if has_pair(row, layout):
        return read_pair(prompt, row, layout, source=source)
    label, name = _label(row, layout)
    completion = layout.value(row, "response")
    if completion is not None or column != "messages":
        check_last(prompt, has_answer=False, column=layout.name(column), source=source)
        answer_name = layout.name("response")
        prompt = prompt + read_answer(completion, layout.tags, column=answer_name, source=source)
    check_last(prompt, has_answer=True, column=layout.name(column), source=source)
    sample: dict[str, Any] = {"messages": prompt}
    if name:
        sample["label"] = read_label(label, column=name, source=source)
    return sample


def _prompt(row: Mapping[str, Any], layout: RowFormat, source: str) -> tuple[list[Message], str]:
    """The messages before the answers, or all; and which column they are from."""
    there = [name for name in ("messages", "prompt") if layout.value(row, name) is not None]
    if len(there) == 2:
        raise bad_row(
            source,
            f"it has both {layout.name('messages')!r} and {layout.name('prompt')!r}",
            "One of them was",
            "it is not known which one begins the conversation",
            'say which one does not count, such as columns: {"messages": null}',
        )
    if not there:
        if has_pair(row, layout):
            return [], "prompt"
        raise bad_row(
            source,
            f"it has neither {layout.name('messages')!r} nor {layout.name('prompt')!r}, but "
            f"{', '.join(sorted(map(str, row))) or 'nothing'}",
            "One of them was",
            "a conversation begins with it",
        )
    value, column = layout.value(row, there[0]), layout.name(there[0])
    if there[0] == "prompt" and isinstance(value, str):
        return [{"role": "user", "content": value}], "prompt"
    return read_messages(value, layout.tags, column=column, source=source), there[0]


def _label(row: Mapping[str, Any], layout: RowFormat) -> tuple[Any, str]:
    """The label and its column; no column where the row is none with a label.

    A column `label` may be anything in a row with messages; it is one beside a completion.
    """
    value = layout.value(row, "kto_tag")
    if value is not None or "kto_tag" in layout.named:
        return value, layout.name("kto_tag")
    has_completion = layout.value(row, "response") is not None
    if "label" in row and (has_completion or says_label(row["label"])):
        return row["label"], "label"
    return None, ""


# -- rows with instruction, input and output, an earlier conversation beside them -----------------


def convert_alpaca(row: Mapping[str, Any], layout: RowFormat, source: str) -> dict[str, Any]:
    """The messages of a row; where the set has only the column of the prompt, its text.

    Raises:
        DataError: a column is missing, or holds something else than text.
    """
    if layout.columns.get("response") is None and "prompt" in layout.named:
        if not has_pair(row, layout):
            return {"text": _text(row, layout, "prompt", source, is_needed=True)}
    parts = [_text(row, layout, name, source) for name in ("prompt", "query")]
    question = "\n".join(part for part in parts if part)
    if not question:
        names = " and ".join(repr(layout.name(name)) for name in ("prompt", "query"))
        raise bad_row(
            source,
            f"the columns {names} are empty or missing; the row has {_columns(row)}",
            "Text in one of them was",
            "it is the question",
        )
    messages = [*_history(row, layout, source), {"role": "user", "content": question}]
    if layout.ranking or (has_pair(row, layout) and layout.value(row, "response") is None):
        return read_pair(messages, row, layout, source=source)
    answer = _text(row, layout, "response", source, is_needed=True)
    messages.append({"role": "assistant", "content": answer})
    sample: dict[str, Any] = {"messages": messages}
    label = layout.value(row, "kto_tag")
    if label is not None or "kto_tag" in layout.named:
        sample["label"] = read_label(label, column=layout.name("kto_tag"), source=source)
    return sample


def _history(row: Mapping[str, Any], layout: RowFormat, source: str) -> list[Message]:
    pairs = layout.value(row, "history")
    if pairs is None or pairs == []:
        return []
    messages: list[Message] = []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise bad_row(
                source,
                f"the column {layout.name('history')!r} has {shown(pair)}",
                "A list of [question, answer] was",
                "they are the turns before the question",
            )
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    return messages


def _text(
    row: Mapping[str, Any], layout: RowFormat, what: str, source: str, *, is_needed: bool = False
) -> str:
    value = layout.value(row, what)
    if isinstance(value, str) or (value is None and not is_needed):
        return value or ""
    state = "is missing" if value is None else f"is {shown(value)}"
    pair = {"chosen", "rejected"} & set(row)
    hint = "say that the set is a ranking (ranking: true)" if what == "response" and pair else ""
    raise bad_row(
        source,
        f"the column {layout.name(what)!r} {state}; the row has {_columns(row)}",
        "Text was",
        "the prompt and the answer are made of it",
        hint,
    )


def _columns(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))) or "none"


# -- places of pictures and films in the messages of a row, and their names in the same order -----

_PLACEHOLDER = re.compile(r"(<image>|<video>)")
_KIND = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}


def place_media(
    messages: list[Message], row: Mapping[str, Any], layout: RowFormat, *, source: str
) -> dict[str, list[Any]]:
    """Turns <image> and <video> in texts into parts, and says which files belong there.

    Only where the row has the column are they places; elsewhere, and in answers, they are text.
    Names without a place stand before the first message of the user.

    Returns:
        `images` and `videos`, as far as there are any.

    Raises:
        DataError: there are not as many places as names.
    """
    names = {kind: _names(row, layout, kind, source) for kind in ("image", "video")}
    given = {kind for kind, value in names.items() if value is not None}
    has_parts = any(isinstance(message["content"], list) for message in messages)
    if not given and not has_parts:
        return {}
    for message in messages:
        _split(message, given, has_parts)
    media = {}
    for kind in ("video", "image"):  # put before the text one after the other: images are first
        found = _fill(messages, kind, names[kind], source)
        if found:
            media[f"{kind}s"] = found
    return media


def _names(row: Mapping[str, Any], layout: RowFormat, kind: str, source: str) -> list[Any] | None:
    value = layout.value(row, f"{kind}s")
    if value is None and f"{kind}s" not in layout.named:
        value = row.get(kind)
    if value is None:
        return None
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(_is_name(name, kind) for name in value):
        raise bad_row(
            source,
            f"the {kind}s are {shown(value)}",
            "A file name or a list of them was",
            "they are read from files",
        )
    return value


def _is_name(value: Any, kind: str) -> bool:
    """A file; of a film also the files of its frames."""
    if kind == "video" and isinstance(value, list):
        return bool(value) and all(isinstance(frame, str) for frame in value)
    return isinstance(value, str)


def _split(message: Message, given: set[str], has_parts: bool) -> None:
    """Cuts the text at placeholders, in place; a row with parts has no placeholders."""
    content = message["content"]
    if has_parts or message["role"] == "assistant" or not isinstance(content, str):
        return
    wanted = {f"<{kind}>" for kind in given}
    parts: list[dict[str, str]] = []
    for text in _PLACEHOLDER.split(content):
        if text in wanted:
            parts.append({"type": text[1:-1]})
        elif text and parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text
        elif text:
            parts.append({"type": "text", "text": text})
    if any(part["type"] != "text" for part in parts):
        message["content"] = parts


def _fill(
    messages: Sequence[Message], kind: str, names: list[Any] | None, source: str
) -> list[Any]:
    """The names in the order of their places; parts lose theirs."""
    places = [
        (message["content"], index)
        for message in messages
        if isinstance(message["content"], list)
        for index, part in enumerate(message["content"])
        if _KIND.get(part["type"]) == kind
    ]
    own = [_own_name(parts[index]) for parts, index in places]
    for parts, index in places:
        parts[index] = {"type": kind}
    rest = list(names or ())
    if not places and rest:
        _put_first(messages, [{"type": kind} for _ in rest], source)
        return rest
    num_open = sum(name is None for name in own)
    if num_open != len(rest):
        raise bad_row(
            source,
            f"it has {num_open} places for {kind}s and {len(rest)} names",
            "As many were",
            f"each {kind} belongs to a place in the text (<{kind}>, or a part)",
            "correct the row",
        )
    return [rest.pop(0) if name is None else name for name in own]


def _own_name(part: Mapping[str, Any]) -> Any:
    for key in ("image", "video", "path", "url", "image_url", "video_url"):
        value = part.get(key)
        value = value.get("url") if isinstance(value, Mapping) else value
        if isinstance(value, str | list) and value:
            return value
    return None


def _put_first(messages: Sequence[Message], parts: list[dict[str, str]], source: str) -> None:
    message = next((message for message in messages if message["role"] == "user"), None)
    if message is None:
        raise bad_row(
            source, "no message is of the user", "One was", "the pictures of the row belong to it"
        )
    content = message["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    message["content"] = [*parts, *text]


# -------------------------------------------------------------------------------------------------

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


def _convert(layout: RowFormat, row: Mapping[str, Any], source: str) -> dict[str, Any]:
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


def _add_system(sample: dict[str, Any], system: Any, layout: RowFormat, source: str) -> None:
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


def _convert_text(row: Mapping[str, Any], layout: RowFormat, source: str) -> dict[str, Any]:
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
        self._layouts: dict[tuple[str, str | None], RowFormat] = {}

    def __call__(self, row: dict[str, Any], source: str) -> dict[str, Any]:
        if not isinstance(row, Mapping):
            return _convert(self._layout("text", None), row, source)
        formatting, column = self._choose(row, source)
        if formatting == "plain":
            return dict(row)
        return _convert(self._layout(formatting, column), row, source)

    def _layout(self, formatting: str, messages: str | None) -> RowFormat:
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
        found: list[str] = [name for name in ("messages", "conversations") if name in has]
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
