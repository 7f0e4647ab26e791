"""How the rows of a data set are written: its columns, and the conversations in them.

Errors here do not name the row: `converters.py` puts its source before them.
"""

import functools
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stageline.data.rows.read_json import check_value
from stageline.errors import DataError, UserError

Message = dict[str, Any]
# OpenAI's name and others': whether an answer is learnt; in a row: a list of it for all messages
WEIGHTS = ("weight", "loss", "train", "loss_mask", "trainable", "training")
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
_TEXT_NAMES = {name for columns in _TEXT_COLUMNS.values() for name in columns}
_SHARED_COLUMNS = ("system", "tools", "images", "videos", "chosen", "rejected", "kto_tag")
# tag -> its word in sharegpt's messages and in OpenAI's
_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function_call"),
    "system_tag": ("system", "system"),
}
_CALL = "function call"
_PART_TYPES = ("text", "image", "image_url", "video", "video_url")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MESSAGE_FIELDS = (
    *("role", "content", "name", "tool_calls", "function_call", "tool_call_id"),
    *_REASONING,
    *WEIGHTS,
)
_THOUGHT = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Tags:
    """The words of messages: names of their fields, and of who speaks."""

    role: str
    content: str
    roles: Mapping[str, str]  # word in the data -> role; `_CALL` is an answer that calls functions


def _make_tags(formatting: str, own: Mapping[str, str] | None = None) -> Tags:
    """The words of a format's messages, but for those that a set calls otherwise."""
    is_openai = formatting == "openai"
    words = {tag: both[is_openai] for tag, both in _TAGS.items()} | dict(own or {})
    roles = {"developer": "system", "function": "tool"} if is_openai else {}
    roles |= {
        words["user_tag"]: "user",
        words["assistant_tag"]: "assistant",
        words["observation_tag"]: "tool",
        words["function_tag"]: _CALL,
        words["system_tag"]: "system",
    }
    return Tags(words["role_tag"], words["content_tag"], roles)


OPENAI_TAGS = _make_tags("openai")
SHAREGPT_TAGS = _make_tags("sharegpt")


@dataclass(frozen=True)
class RowFormat:
    """How rows of one set are written."""

    formatting: str
    columns: Mapping[str, str | None]  # what -> the row's column; None: there is none
    tags: Tags
    ranking: bool  # rows have a chosen and a rejected answer
    named: frozenset[str]  # the columns that were given, not ours by default


def make_format(
    formatting: str,
    *,
    columns: Mapping[str, str | None] | None = None,
    tags: Mapping[str, str] | None = None,
    ranking: bool = False,
) -> RowFormat:
    """The format that names from dataset_info.json describe.

    Where one of the text columns is named, those that are not named do not exist, as in that file.

    Raises:
        UserError: an unknown column or tag.
    """
    columns = dict(columns or {})
    check_known("a name in `columns`", columns, columns_of(formatting))
    check_known("a name in `tags`", tags or (), _TAGS)
    named = frozenset(name for name, column in columns.items() if column)
    text: dict[str, str | None] = dict.fromkeys(_TEXT_COLUMNS[formatting])
    if not _TEXT_NAMES & named:
        text.update(_TEXT_COLUMNS[formatting])
    return RowFormat(
        formatting=formatting,
        columns={
            **text,
            **{name: name for name in _SHARED_COLUMNS},
            **{name: column or None for name, column in columns.items()},
        },
        tags=_make_tags(formatting, tags),
        ranking=ranking or "chosen" in named,
        named=named,
    )


def columns_of(*formattings: str) -> list[str]:
    """What columns can be named for a format; of several formats for any of them."""
    text = [name for formatting in formattings for name in _TEXT_COLUMNS[formatting]]
    return [*dict.fromkeys(text), *_SHARED_COLUMNS]


def check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuses names that no format has."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(
            f"{what} is {unknown[0]!r}. One of {', '.join(known)} was expected, because those are "
            "what rows are read by: correct it."
        )


def bad_row(what: str, expected: str, why: str, do: str = "") -> DataError:
    """The error for a row: what came, what was expected, why, what to do."""
    do = do or "correct the row, or say how the set is written (formatting, columns, tags)"
    return DataError(f"{what}. {expected} expected, because {why}: {do}.")


def shown(value: Any, most: int = 80) -> str:
    """A value for an error, shortened."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def state_of(value: Any) -> str:
    """What an error says of a value: that it is missing, or what it is."""
    return "is missing" if value is None else f"is {shown(value)}"


@dataclass(frozen=True)
class FormattedRow:
    """A row and how it is written."""

    data: Mapping[str, Any]
    format: RowFormat

    def value(self, what: str) -> Any:
        name = self.format.columns.get(what)
        return None if name is None else self.data.get(name)

    def name(self, what: str) -> str:
        return self.format.columns.get(what) or what

    @property
    def fields(self) -> str:
        return ", ".join(sorted(map(str, self.data))) or "none"

    @property
    def has_pair(self) -> bool:
        """Whether the set is a ranking, or the row has both answers of a preference."""
        both = self.value("chosen") is not None and self.value("rejected") is not None
        return self.format.ranking or both

    @property
    def has_label(self) -> bool:
        """Whether the set or the row has a column that says if the answer is desirable."""
        return self.value("kto_tag") is not None or "kto_tag" in self.format.named

    def messages(self, what: str) -> list[Message]:
        value = with_row_weights(self.data, self.value(what))
        return _read_messages(value, self.format.tags, column=self.name(what))

    def answer(self, what: str) -> list[Message]:
        """The answer in a column as messages: from text, one message, or a list of them."""
        value, column, tags = self.value(what), self.name(what), self.format.tags
        if isinstance(value, str):
            return [{"role": "assistant", "content": value}]
        if isinstance(value, Mapping):
            return [_read_message(value, _tags_of(value, tags), place=f"the column {column!r}")]
        if isinstance(value, list) and value:
            return _read_messages(value, _tags_of(value[0], tags), column=column)
        came = f"the column {column!r} {state_of(value)}"
        why = "it is the answer that is learnt or compared"
        raise bad_row(came, "Text, a message or a list of messages was", why)

    def pair(self, prompt: list[Message]) -> dict[str, Any]:
        """`messages`, `chosen` and `rejected` of a preference.

        Args:
            prompt: the messages before the answers; empty where the answers are conversations.
        """
        chosen, rejected = self.answer("chosen"), self.answer("rejected")
        if chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant":
            whole, chosen, rejected = self._without_prefix(chosen, rejected)
            if prompt and whole[-len(prompt) :] != prompt:  # it has to say the same twice
                other = shown(whole[-1]["content"] if whole else None)
                came = f"the prompt is {shown(prompt[-1]['content'])}, and both answers are "
                came += f"conversations that begin with another one, {other}"
                raise bad_row(came, "The same prompt was", "it is not known which one is meant")
            prompt = whole
        check_last(chosen, has_answer=True, column=self.name("chosen"))
        check_last(rejected, has_answer=True, column=self.name("rejected"))
        if not prompt:
            came = "there is no prompt before the chosen and the rejected answer"
            wanted = "Messages, a prompt, or two conversations with the same beginning were"
            raise bad_row(came, wanted, "both answer the same question")
        check_last(prompt, has_answer=False, column="the prompt")
        return {"messages": prompt, "chosen": chosen, "rejected": rejected}

    def _without_prefix(
        self, chosen: list[Message], rejected: list[Message]
    ) -> tuple[list[Message], list[Message], list[Message]]:
        """The common beginning of two conversations, and the rest of each: at least its end."""
        most = min(len(chosen), len(rejected)) - 1
        same = 0
        while same < most and chosen[same] == rejected[same]:
            same += 1
        if chosen[same]["role"] != "assistant" or rejected[same]["role"] != "assistant":
            came = (
                f"{self.name('chosen')!r} and {self.name('rejected')!r} differ first in message "
                f"{same}, of the {chosen[same]['role']} and the {rejected[same]['role']}"
            )
            wanted = "The same prompt in both, and then the assistant's answers, was"
            raise bad_row(came, wanted, "answers to one question are compared")
        return chosen[:same], chosen[same:], rejected[same:]

    def tools(self) -> list[dict[str, Any]]:
        """The tools of the row, from a list or its JSON; [] where there is none."""
        value, column = self.value("tools"), self.name("tools")
        if value is None or value == "" or value == []:
            return []
        tools = _parsed(value)
        tools = [tools] if isinstance(tools, dict) else tools
        if not isinstance(tools, list):
            raise _bad_tool(f"the column {column!r} is {shown(value)}")
        return [_tool(tool, column) for tool in tools]


def read_label(value: Any, *, column: str) -> bool:
    """Whether an answer is desirable, by the value of a column."""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    came = f"the column {column!r} {state_of(value)}"
    raise bad_row(came, "true or false was", "it says whether the answer is desirable")


def says_label(value: Any) -> bool:
    """Whether a value could be a label, and not something else of that name."""
    return isinstance(value, bool) or (
        isinstance(value, str) and value.lower() in ("true", "false")
    )


def check_alternation(messages: Sequence[Message], *, has_answer: bool, column: str) -> None:
    """Refuses what is no strict alternation, as fine-tuning tools do.

    The user or a tool speaks first, then the assistant, and so on; a leading system message is
    left aside.

    Args:
        has_answer: the last message is the assistant's; otherwise it is what is to be answered.
    """
    start = 1 if messages and messages[0]["role"] == "system" else 0
    for place, message in enumerate(messages[start:]):
        wanted = ("user", "tool") if place % 2 == 0 else ("assistant",)
        if message["role"] not in wanted:
            came = f"message {start + place} of {column!r} is of the {message['role']}"
            why = "user (or observation) and assistant (or function call) take turns"
            raise bad_row(came, f"One of {' or '.join(wanted)} was", why)
    check_last(messages, has_answer=has_answer, column=column)


def check_last(messages: Sequence[Message], *, has_answer: bool, column: str) -> None:
    """Refuses a conversation that ends with the wrong one; as in `check_alternation`."""
    role = messages[-1]["role"]
    if has_answer != (role == "assistant") or (not has_answer and role == "system"):
        came = f"the last of {len(messages)} messages of {column!r} is of the {role}"
        if has_answer:
            raise bad_row(came, "The assistant's was", "the model learns to write the last one")
        raise bad_row(came, "The user's or a tool's was", "the compared answers come after it")


def _read_messages(value: Any, tags: Tags, *, column: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        came = f"the column {column!r} {state_of(value)}"
        raise bad_row(came, "A list of at least one message was", "they are the conversation")
    return [
        _read_message(message, tags, place=f"message {number} of {column!r}")
        for number, message in enumerate(value)
    ]


def _read_message(message: Any, tags: Tags, *, place: str) -> Message:
    """One message; fields that are not read are listed."""
    if not isinstance(message, Mapping) or tags.role not in message:
        wanted = f"An object with {tags.role!r} and {tags.content!r} was"
        raise bad_row(f"{place} is {shown(message)}", wanted, "they say who speaks and what")
    role = tags.roles.get(message[tags.role]) if isinstance(message[tags.role], str) else None
    if role is None:
        came, wanted = shown(message[tags.role]), ", ".join(tags.roles)
        why = "the chat template writes each role in its own way"
        raise bad_row(f"{place} has the {tags.role} {came}", f"One of {wanted} was", why)
    content = message.get(tags.content)
    is_answer = role in ("assistant", _CALL)
    learnt = is_learnt(message, place, is_answer=is_answer)
    weight = {"weight": 0} if is_answer and not learnt else {}
    known = {tags.role, tags.content, *_MESSAGE_FIELDS}
    unknown = sorted(
        str(key) for key, value in message.items() if value is not None and key not in known
    )
    if unknown:
        _tell_left_out(tuple(unknown))
    if role == _CALL:
        return {**_read_calls(content, place=place), **weight}
    read: Message = {"role": role, "content": None, **weight}
    if role == "assistant":
        read.update(_answer_fields(message, place))
    read["content"] = _content(content, read, place=place)
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    return read


@functools.cache
def _tell_left_out(fields: tuple[str, ...]) -> None:
    """Lists fields of messages that are not read, once."""
    warnings.warn(
        f"messages have the fields {', '.join(fields)}, which are left out: the chat template is "
        f"filled from {', '.join(_MESSAGE_FIELDS)} only.",
        stacklevel=2,
    )


def _tags_of(message: Any, default: Tags) -> Tags:
    """The words of a message that may be of another format than the rest of its row."""
    for tags in (default, OPENAI_TAGS, SHAREGPT_TAGS):
        if isinstance(message, Mapping) and tags.role in message:
            return tags
    return default


def _answer_fields(message: Mapping[str, Any], place: str) -> Message:
    fields: Message = {}
    calls = message.get("tool_calls")
    if not calls and isinstance(message.get("function_call"), Mapping):
        calls = [message["function_call"]]  # as OpenAI wrote it before tool_calls
    if calls:
        if not isinstance(calls, list):
            raise _bad_call(f"{place} has the tool_calls {shown(calls)}")
        fields["tool_calls"] = [_call(call, place) for call in calls]
    for name in _REASONING:
        if isinstance(message.get(name), str) and message[name]:
            fields["reasoning_content"] = message[name]
            break
    return fields


def is_learnt(message: Mapping[str, Any], place: str, *, is_answer: bool) -> bool:
    """Whether the fields of a message say that it is learnt; an answer is where none does."""
    if message.get("mask") is not None:
        came = f"{place} has the mask {shown(message['mask'])}"
        why = "to some a mask of 1 means that it is learnt, to others that it is not"
        raise bad_row(came, "A weight or loss_mask of 0 or 1 was", why, "rename the field")
    given = {name: message[name] for name in WEIGHTS if message.get(name) is not None}
    for name, weight in given.items():
        if not isinstance(weight, int | float) or weight not in (0, 1):
            came = f"{place} has the {name} {shown(weight)}"
            raise bad_row(came, "0 or 1 was", "an answer is learnt or is not")
        if bool(weight) != bool(next(iter(given.values()))):
            came = f"{place} has {' and '.join(f'{key} {each}' for key, each in given.items())}"
            raise bad_row(came, "The same was", "it is learnt or is not")
        if weight and not is_answer:
            came = f"{place} has the {name} {shown(weight)} and is no answer"
            do = "set it to 0, or train on all text (`prompt_fn.train_on_prompt`)"
            raise bad_row(came, "0 was", "only answers are learnt", do)
    return is_answer and all(given.values())


def with_row_weights(row: Mapping[str, Any], messages: Any) -> Any:
    """Messages with what lists of the row say of each, under the names that messages have for it.

    Raises:
        DataError: a list is of another length, or the row has a `mask`.
    """
    lists = {name: row[name] for name in WEIGHTS if isinstance(row.get(name), list)}
    if not isinstance(messages, list) or not (lists or row.get("mask") is not None):
        return messages
    is_learnt({"mask": row.get("mask")}, "the row", is_answer=True)
    for name, weights in lists.items():
        if len(weights) != len(messages):
            came = f"{name!r} has {len(weights)} values for {len(messages)} messages"
            raise bad_row(came, "One for each message was", "it says which of them are learnt")
        messages = [
            {**message, name: weight} if isinstance(message, Mapping) else message
            for message, weight in zip(messages, weights, strict=True)
        ]
    return messages


def _content(content: Any, read: Message, *, place: str) -> Any:
    if isinstance(content, str):
        return content
    if content is None and "tool_calls" in read:
        return ""
    if not isinstance(content, list):
        came = f"the content of {place} {state_of(content)}"
        raise bad_row(came, "Text (or a list of parts) was", "it is what the message says")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _PART_TYPES or (kind == "text" and not isinstance(part.get("text"), str)):
            wanted = f'{{"type": "text", "text": ...}} or one of {", ".join(_PART_TYPES[1:])} was'
            why = "other parts have no place in the text"
            raise bad_row(f"{place} has the part {shown(part)}", wanted, why)
    return [dict(part) for part in content]


def _read_calls(text: Any, *, place: str) -> Message:
    """The message of an answer that calls functions, from the JSON that formats write for it.

    Reasoning in <think> tags before the JSON becomes `reasoning_content`.
    """
    message: Message = {"role": "assistant", "content": ""}
    thought = _THOUGHT.match(text) if isinstance(text, str) else None
    if thought:
        message["reasoning_content"] = thought[1].strip()
        text = text[thought.end() :]
    calls = _parsed(text)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls:
        raise _bad_call(f"{place} calls a function by {shown(text)}")
    message["tool_calls"] = [_call(call, place) for call in calls]
    return message


def _tool(tool: Any, column: str) -> dict[str, Any]:
    if _function_of(tool) is None:
        raise _bad_tool(f"the column {column!r} has the tool {shown(tool)}")
    return tool if "function" in tool else {"type": "function", "function": tool}


def _call(call: Any, place: str) -> dict[str, Any]:
    """A call in OpenAI's form, its arguments as an object."""
    function = _function_of(call)
    if function is None:
        raise _bad_call(f"{place} has the call {shown(call)}")
    given = function.get("arguments", function.get("parameters", {}))
    arguments = {} if given in (None, "") else _parsed(given)
    if not isinstance(arguments, dict):
        raise _bad_call(f"{place} calls {function['name']!r} with {shown(given)}")
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    made = {"name": function["name"], "arguments": arguments}
    return {**kept, "type": "function", "function": made}


def _function_of(value: Any) -> dict[str, Any] | None:
    """The function of a tool or a call; None where it has no name."""
    function = value.get("function", value) if isinstance(value, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return function if is_named else None


def _bad_tool(what: str) -> DataError:
    wanted = 'A list of {"name": ..., "parameters": ...}, or JSON of one, was'
    return bad_row(what, wanted, "the chat template tells the model of them")


def _bad_call(what: str) -> DataError:
    wanted = 'JSON such as {"name": "search", "arguments": {"words": "tea"}}, or a list of it, was'
    return bad_row(what, wanted, "the chat template writes calls from name and arguments")


def _parsed(value: Any) -> Any:
    """The value of JSON text; None where it is none that is taken. What is no text stays."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
        check_value(found)
        return found
    except (ValueError, RecursionError):
        return None
