"""Where a format has what: names of columns, and the names that messages give fields and roles."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stageline.errors import DataError, UserError

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
class RowFormat:
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
) -> RowFormat:
    """The layout that names from dataset_info.json describe.

    Where one of the text columns is named, those that are not named do not exist, as in that file.

    Raises:
        UserError: an unknown format, column or tag.
    """
    _check_known("`dataset.formatting`", [formatting], FORMATTINGS[1:])
    columns, tags = dict(columns or {}), dict(tags or {})
    check_columns(columns, columns_of(formatting))
    _check_known("a name in `tags`", tags, list(_TAGS))
    text: dict[str, str | None] = dict.fromkeys(_TEXT_COLUMNS[formatting])
    if not _TEXT_NAMES & {name for name, column in columns.items() if column}:
        text.update(_TEXT_COLUMNS[formatting])
    defaults = _OPENAI_TAGS if formatting == "openai" else _TAGS
    aliases = _OPENAI_ALIASES if formatting == "openai" else None
    given = {name: column or None for name, column in columns.items()}
    return RowFormat(
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


# -- tools and calls of functions in OpenAI's form, from JSON text or objects ---------------------

_THOUGHT = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)


def read_tools(value: Any, *, column: str, source: str) -> list[dict[str, Any]]:
    """The tools of a row: a list, or its JSON; [] where there is none.

    Raises:
        DataError: names the row and what came.
    """
    if value is None or value == "" or value == []:
        return []
    tools = _parsed(value)
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list):
        raise _bad_tool(source, f"the column {column!r} is {shown(value)}")
    return [_tool(tool, column, source) for tool in tools]


def _tool(tool: Any, column: str, source: str) -> dict[str, Any]:
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise _bad_tool(source, f"the column {column!r} has the tool {shown(tool)}")
    return tool if "function" in tool else {"type": "function", "function": tool}


def _bad_tool(source: str, what: str) -> Exception:
    return bad_row(
        source,
        what,
        'A list of {"name": ..., "parameters": ...}, or JSON of one, was',
        "the chat template tells the model of them",
    )


def read_calls(text: Any, *, place: str, source: str) -> dict[str, Any]:
    """The message of an answer that calls functions, from the JSON that formats write for it.

    Reasoning in <think> tags before the JSON becomes `reasoning_content`.

    Raises:
        DataError: names the message.
    """
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if isinstance(text, str):
        thought = _THOUGHT.match(text)
        if thought:
            message["reasoning_content"] = thought[1].strip()
            text = text[thought.end() :]
    calls = _parsed(text)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls:
        raise _bad_call(source, f"{place} calls a function by {shown(text)}")
    message["tool_calls"] = check_calls(calls, place=place, source=source)
    return message


def check_calls(calls: Any, *, place: str, source: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, their arguments as objects.

    Raises:
        DataError: names the message.
    """
    if not isinstance(calls, list):
        raise _bad_call(source, f"{place} has the tool_calls {shown(calls)}")
    return [_call(call, place, source) for call in calls]


def _call(call: Any, place: str, source: str) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise _bad_call(source, f"{place} has the call {shown(call)}")
    given = inner.get("arguments", inner.get("parameters", {}))
    arguments = {} if given in (None, "") else _parsed(given)
    if not isinstance(arguments, dict):
        raise _bad_call(source, f"{place} calls {inner['name']!r} with {shown(given)}")
    function = {"name": inner["name"], "arguments": arguments}
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**kept, "type": "function", "function": function}


def _bad_call(source: str, what: str) -> Exception:
    return bad_row(
        source,
        what,
        'JSON such as {"name": "search", "arguments": {"words": "tea"}}, or a list of it, was',
        "the chat template writes calls from name and arguments",
    )


def _parsed(value: Any) -> Any:
    """The value of JSON text; None where it is none. What is no text stays."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


# -- messages of any format -> messages of the sample's form, each checked ------------------------

Message = dict[str, Any]
_PART_TYPES = ("text", "image", "image_url", "video", "video_url")
_REASONING = ("reasoning_content", "reasoning", "thinking")


def read_messages(value: Any, tags: Tags, *, column: str, source: str) -> list[Message]:
    """A list of messages.

    Raises:
        DataError: names the first message that is none.
    """
    if not isinstance(value, list) or not value:
        raise bad_row(
            source,
            f"the column {column!r} {_what(value)}",
            "A list of at least one message was",
            "a conversation is made of them",
        )
    return [
        read_message(message, tags, place=f"message {number} of {column!r}", source=source)
        for number, message in enumerate(value)
    ]


def read_message(message: Any, tags: Tags, *, place: str, source: str) -> Message:
    """One message; fields that say nothing about the text are left out."""
    if not isinstance(message, Mapping) or tags.role not in message:
        raise bad_row(
            source,
            f"{place} is {shown(message)}",
            f"An object with {tags.role!r} and {tags.content!r} was",
            "they say who speaks and what",
        )
    role = tags.roles.get(message[tags.role]) if isinstance(message[tags.role], str) else None
    if role is None:
        raise bad_row(
            source,
            f"{place} has the {tags.role} {shown(message[tags.role])}",
            f"One of {', '.join(tags.roles)} was",
            "the chat template writes each role in its own way",
        )
    content = message.get(tags.content)
    if role == CALL:
        return {**read_calls(content, place=place, source=source), **_weight(message)}
    read: Message = {"role": role, "content": None}
    if role == "assistant":
        read.update(_answer_fields(message, place, source))
    read["content"] = _content(content, read, place=place, source=source)
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    return read


def tags_of(message: Any, default: Tags) -> Tags:
    """The words of a message that may be of another format than the rest of its row."""
    for tags in (default, OPENAI_TAGS, SHAREGPT_TAGS):
        if isinstance(message, Mapping) and tags.role in message:
            return tags
    return default


def _answer_fields(message: Mapping[str, Any], place: str, source: str) -> Message:
    fields = _weight(message)
    calls = message.get("tool_calls")
    if not calls and isinstance(message.get("function_call"), Mapping):
        calls = [message["function_call"]]  # as OpenAI wrote it before tool_calls
    if calls:
        fields["tool_calls"] = check_calls(calls, place=place, source=source)
    for name in _REASONING:
        if isinstance(message.get(name), str) and message[name]:
            fields["reasoning_content"] = message[name]
            break
    return fields


def _weight(message: Mapping[str, Any]) -> Message:
    """Weight 0 for an answer that is not learnt, by OpenAI's name or others'."""
    for name in ("weight", "loss", "train"):
        if isinstance(message.get(name), bool | int | float):
            return {} if message[name] else {"weight": 0}
    return {}


def _content(content: Any, read: Message, *, place: str, source: str) -> Any:
    if isinstance(content, str):
        return content
    if content is None and "tool_calls" in read:
        return ""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in _PART_TYPES or (
                kind == "text" and not isinstance(part.get("text"), str)
            ):
                raise bad_row(
                    source,
                    f"{place} has the part {shown(part)}",
                    f'{{"type": "text", "text": ...}} or one of {", ".join(_PART_TYPES[1:])} was',
                    "other parts have no place in the text",
                )
        return [dict(part) for part in content]
    raise bad_row(
        source,
        f"the content of {place} {_what(content)}",
        "Text (or a list of parts) was",
        "it is what the message says",
    )


def _what(value: Any) -> str:
    return "is missing" if value is None else f"is {shown(value)}"


def check_alternation(
    messages: Sequence[Message], *, has_answer: bool, column: str, source: str
) -> None:
    """Refuses what is no strict alternation, as fine-tuning tools do.

    The user or a tool speaks first, then the assistant, and so on; a leading system message is
    left aside.

    Args:
        has_answer: the last message is the assistant's; otherwise it is what is to be answered.

    Raises:
        DataError: names the first message out of turn.
    """
    start = 1 if messages and messages[0]["role"] == "system" else 0
    for place, message in enumerate(messages[start:]):
        wanted = ("user", "tool") if place % 2 == 0 else ("assistant",)
        if message["role"] not in wanted:
            raise bad_row(
                source,
                f"message {start + place} of {column!r} is of the {message['role']}",
                f"One of {' or '.join(wanted)} was",
                "user (or observation) and assistant (or function call) take turns",
            )
    check_last(messages, has_answer=has_answer, column=column, source=source)


def check_last(messages: Sequence[Message], *, has_answer: bool, column: str, source: str) -> None:
    """Refuses a conversation that ends with the wrong one.

    Raises:
        DataError: names the last message.
    """
    role = messages[-1]["role"]
    if has_answer != (role == "assistant") or (not has_answer and role == "system"):
        raise bad_row(
            source,
            f"the last of {len(messages)} messages of {column!r} is of the {role}",
            "The assistant's was" if has_answer else "The user's or a tool's was",
            "the model learns to write the last one"
            if has_answer
            else "the answers that are compared come after it",
        )


# -- what is compared or judged in a row: two answers to a prompt, or one with a label ------------


def has_pair(row: Mapping[str, Any], layout: RowFormat) -> bool:
    """Whether the set is a ranking, or the row has both answers of a preference."""
    both = all(layout.value(row, name) is not None for name in ("chosen", "rejected"))
    return layout.ranking or both


def read_pair(
    prompt: list[Message], row: Mapping[str, Any], layout: RowFormat, *, source: str
) -> dict[str, Any]:
    """`messages`, `chosen` and `rejected` of a preference row.

    Args:
        prompt: the messages before the answers; empty where the answers are whole conversations.

    Raises:
        DataError: an answer is missing or is none, or the prompt does not end with a question.
    """
    chosen, rejected = (
        read_answer(layout.value(row, name), layout.tags, column=layout.name(name), source=source)
        for name in ("chosen", "rejected")
    )
    if chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant":
        whole, chosen, rejected = _without_prefix(chosen, rejected, layout, source)
        _check_same_prompt(prompt, whole, source)
        prompt = whole
    names = [layout.name("chosen"), layout.name("rejected")]
    for answer, name in zip((chosen, rejected), names, strict=True):
        check_last(answer, has_answer=True, column=name, source=source)
    if not prompt:
        raise bad_row(
            source,
            "there is no prompt before the chosen and the rejected answer",
            "Messages, a prompt, or two conversations with the same beginning were",
            "both answer the same question",
        )
    check_last(prompt, has_answer=False, column="the prompt", source=source)
    return {"messages": prompt, "chosen": chosen, "rejected": rejected}


def read_answer(value: Any, tags: Tags, *, column: str, source: str) -> list[Message]:
    """An answer as messages: from text, one message, or a list of them.

    Raises:
        DataError: it is neither.
    """
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, Mapping):
        place = f"the column {column!r}"
        return [read_message(value, tags_of(value, tags), place=place, source=source)]
    if isinstance(value, list) and value:
        return read_messages(value, tags_of(value[0], tags), column=column, source=source)
    raise bad_row(
        source,
        f"the column {column!r} is {'missing' if value is None else shown(value)}",
        "Text, a message or a list of messages was",
        "it is the answer that is learnt or compared",
    )


def _without_prefix(
    chosen: list[Message], rejected: list[Message], layout: RowFormat, source: str
) -> tuple[list[Message], list[Message], list[Message]]:
    """The common beginning of two conversations, and what is left of each: at least its end."""
    most = min(len(chosen), len(rejected)) - 1
    same = 0
    while same < most and chosen[same] == rejected[same]:
        same += 1
    if chosen[same]["role"] != "assistant" or rejected[same]["role"] != "assistant":
        raise bad_row(
            source,
            f"{layout.name('chosen')!r} and {layout.name('rejected')!r} differ first in message "
            f"{same}, of the {chosen[same]['role']} and the {rejected[same]['role']}",
            "The same prompt in both, and then the assistant's answers, was",
            "what is compared are answers to one question",
        )
    return chosen[:same], chosen[same:], rejected[same:]


def _check_same_prompt(prompt: Sequence[Message], whole: Sequence[Message], source: str) -> None:
    """A prompt beside whole conversations has to be their end: it says the same twice."""
    if prompt and list(whole[-len(prompt) :]) != list(prompt):
        raise bad_row(
            source,
            f"the prompt is {shown(prompt[-1]['content'])}, and both answers are conversations "
            f"that begin with another one, {shown(whole[-1]['content'] if whole else None)}",
            "The same prompt was",
            "it is not known which one is meant",
        )


def read_label(value: Any, *, column: str, source: str) -> bool:
    """Whether an answer is desirable.

    Raises:
        DataError: the value says neither.
    """
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise bad_row(
        source,
        f"the column {column!r} is {'missing' if value is None else shown(value)}",
        "true or false was",
        "it says whether the answer is desirable",
    )


def says_label(value: Any) -> bool:
    """Whether a value could be a label, and not something else of that name."""
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in _WORDS)


_WORDS = ("true", "false")
