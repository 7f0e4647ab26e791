"""Read the messages of data sets: their words, calls, tools, and whether they are in the loss.

Errors here do not name the row: `converters.py` puts its source before them.
"""

import functools
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stageline.data.rows.read_rows import check_value
from stageline.errors import DataError

Message = dict[str, Any]
# Names, OpenAI's first, of the field that puts an answer in the loss; in a row it is a list with a
# value for each message.
WEIGHTS = ("weight", "loss", "train", "loss_mask", "trainable", "training")
# tag -> its word in sharegpt's messages and in OpenAI's
TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function_call"),
    "system_tag": ("system", "system"),
}
_CALL = "function call"
IMAGE_TYPES = ("image", "image_url")
_MEDIA = (*IMAGE_TYPES, "video", "video_url")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_OWN_FIELDS = ("role", "content", "name", "tool_calls", "function_call", "tool_call_id")
_MESSAGE_FIELDS = (*_OWN_FIELDS, *_REASONING, *WEIGHTS)
_THOUGHT = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)
_A_TOOL = 'a list of {"name": ..., "parameters": ...}'
_A_CALL = 'JSON such as {"name": "search", "arguments": {"words": "tea"}}'


def bad_row(what: str, expected: str, do: str = "") -> DataError:
    """Return the error for a row, which does not name it: what is wrong, and what to write."""
    do = do or "say how the set is written (formatting, columns, tags)"
    return DataError(f"{what[:400]}. Write {expected}, or {do}.")


def shown(value: Any) -> str:
    """Return a value for an error, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def state_of(value: Any) -> str:
    """Return whether a value is missing, or what it is, for an error."""
    return "is missing" if value is None else f"is {shown(value)}"


@dataclass(frozen=True)
class Tags:
    """The words of messages: names of their fields, and of their roles."""

    role: str
    content: str
    roles: Mapping[str, str]  # word in the data -> role; `_CALL` is an answer that calls functions


def make_tags(formatting: str, own: Mapping[str, str] | None = None) -> Tags:
    """Return the words of a format's messages, but for those that a set replaces."""
    is_openai = formatting == "openai"
    words = {tag: both[is_openai] for tag, both in TAGS.items()} | dict(own or {})
    roles = {"developer": "system", "function": "tool"} if is_openai else {}
    kinds = {"user": "user", "assistant": "assistant", "observation": "tool", "function": _CALL}
    kinds["system"] = "system"
    roles |= {words[f"{kind}_tag"]: role for kind, role in kinds.items()}
    return Tags(words["role_tag"], words["content_tag"], roles)


OPENAI_TAGS = make_tags("openai")
SHAREGPT_TAGS = make_tags("sharegpt")
PLAIN_TAGS = Tags("role", "content", {})  # messages that go into a template have any role


def read_messages(value: Any, tags: Tags, *, column: str) -> list[Message]:
    """Return the messages of a column, in OpenAI's form."""
    if not isinstance(value, list) or not value:
        raise bad_row(f"the column {column!r} {state_of(value)}", "a list of messages")
    return [
        read_message(message, tags, place=f"message {number} of {column!r}")
        for number, message in enumerate(value)
    ]


def read_answer(value: Any, tags: Tags, *, column: str) -> list[Message]:
    """Return the answer in a column as messages: from text, one message, or a list of them."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, Mapping):
        raise bad_row(f"the column {column!r} {state_of(value)}", "text, or a list of messages")
    # its words may be of another format than those of the rest of the row
    kinds = (tags, OPENAI_TAGS, SHAREGPT_TAGS)
    tags = next((kind for kind in kinds if kind.role in first), tags)
    if first is value:
        return [read_message(value, tags, place=f"the column {column!r}")]
    return read_messages(value, tags, column=column)


def read_message(message: Any, tags: Tags, *, place: str) -> Message:
    """Return a message in OpenAI's form; with `PLAIN_TAGS`, one that is in this form already."""
    if not isinstance(message, Mapping) or tags.role not in message:
        wanted = f"an object with {tags.role} and {tags.content}"
        raise bad_row(f"{place} is {shown(message)}", wanted)
    own, is_plain = message[tags.role], tags is PLAIN_TAGS
    role = tags.roles.get(own) if isinstance(own, str) else None
    if is_plain and isinstance(own, str) and own.replace("_", "").isalnum():
        role = own  # a word, which holds no special token
    if role is None:
        what = f"{place} has the {tags.role} {shown(own)}"
        raise bad_row(what, f"one of {', '.join(tags.roles) or 'user, assistant and others'}")
    is_answer = role in ("assistant", _CALL)
    read: Message = {"role": "assistant" if is_answer else role, "content": None}
    if not is_learnt(message, place, is_answer=is_answer) and is_answer:
        read["weight"] = 0
    known = {tags.role, tags.content, *_MESSAGE_FIELDS}
    filled = {str(key): value for key, value in message.items() if value is not None}
    if fields := sorted(filled.keys() - known):
        if is_plain:
            raise bad_row(f"{place} has the fields {', '.join(fields)}", "those of a chat message")
        _warn_left_out(tuple(fields))
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(filled.get(name, ""), str):
            raise bad_row(f"{place} has the {name} {shown(filled[name])}", "text")
    content = message.get(tags.content)
    if role == _CALL:
        # JSON, perhaps behind a thought
        thought = _THOUGHT.match(content) if isinstance(content, str) else None
        text = content if thought is None else thought.string[thought.end() :]
        calls = read_json(text, f"{place} calls a function by", _A_CALL)
        calls = [calls] if isinstance(calls, dict) else calls
        if not isinstance(calls, list) or not calls:
            raise bad_row(f"{place} calls a function by {shown(content)}", _A_CALL)
        read |= {"content": "", "tool_calls": [read_call(call, place) for call in calls]}
        return {**read, "reasoning_content": thought[1].strip()} if thought else read
    calls = filled.get("tool_calls")
    if not calls and isinstance(filled.get("function_call"), Mapping):
        calls = [filled["function_call"]]  # OpenAI's form before tool_calls
    thoughts = [filled.get(name) for name in _REASONING]
    thoughts = [thought for thought in thoughts if isinstance(thought, str) and thought]
    if (calls or thoughts) and not is_answer:
        what = f"{place} of {role} has {'tool_calls' if calls else 'reasoning_content'}"
        raise bad_row(what, "it only with an assistant's message")
    if calls and not isinstance(calls, list):
        raise bad_row(f"{place} has the tool_calls {shown(calls)}", f"a list of {_A_CALL}")
    if calls:
        read["tool_calls"] = [read_call(call, place) for call in calls]
    if thoughts:
        read["reasoning_content"] = thoughts[0]
    content = "" if content is None and (calls or thoughts) else content
    if isinstance(content, list):
        media = IMAGE_TYPES if is_plain else _MEDIA
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in media and not (kind == "text" and isinstance(part.get("text"), str)):
                wanted = f'{{"type": "text", "text": ...}} or one of {", ".join(media)}'
                raise bad_row(f"{place} has the part {shown(part)}", wanted)
        content = list(map(dict, content))
    elif not isinstance(content, str):
        raise bad_row(f"the content of {place} {state_of(content)}", "text, or a list of parts")
    names = [name for name in ("name", "tool_call_id") if name in filled]
    return {**read, "content": content, **{name: filled[name] for name in names}}


@functools.cache
def _warn_left_out(fields: tuple[str, ...]) -> None:
    """List fields of messages that are not read, once."""
    warnings.warn(
        f"messages have the fields {', '.join(fields)}, which are left out: the chat template is "
        f"filled from {', '.join(_MESSAGE_FIELDS)} only.",
        stacklevel=2,
    )


def is_learnt(message: Mapping[str, Any], place: str, *, is_answer: bool) -> bool:
    """Tell whether a message is in the loss: an answer is unless a field says otherwise."""
    if message.get("mask") is not None:
        what = f"{place} has the mask {shown(message['mask'])}, which has no fixed meaning"
        raise bad_row(what, "a weight or loss_mask of 0 or 1", "take the field out")
    given = {name: message[name] for name in WEIGHTS if message.get(name) is not None}
    for name, weight in given.items():
        what = f"{place} has the {name} {shown(weight)}"
        if not isinstance(weight, int | float) or weight not in (0, 1):
            raise bad_row(what, "0 or 1")
        if bool(weight) != bool(next(iter(given.values()))):
            what = f"{place} has {' and '.join(f'{key} {each}' for key, each in given.items())}"
            raise bad_row(what, "the same")
        if weight and not is_answer:
            do = "train on all text (`prompt_fn.train_on_prompt`)"
            raise bad_row(f"{what} and is no answer", "0", do)
    return is_answer and all(given.values())


def with_row_weights(row: Mapping[str, Any], messages: Any) -> Any:
    """Return messages with the weights that lists of the row have for each of them."""
    lists = {name: row[name] for name in WEIGHTS if isinstance(row.get(name), list)}
    if not isinstance(messages, list) or not (lists or row.get("mask") is not None):
        return messages
    is_learnt({"mask": row.get("mask")}, "the row", is_answer=True)
    for name, weights in lists.items():
        if len(weights) != len(messages):
            what = f"{name!r} has {len(weights)} values for {len(messages)} messages"
            raise bad_row(what, "one for each message")
        messages = [
            {**message, name: weight} if isinstance(message, Mapping) else message
            for message, weight in zip(messages, weights, strict=True)
        ]
    return messages


def read_tools(value: Any, *, column: str) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form, from a list or its JSON; [] where there is none."""
    tools = read_json(value or [], f"the column {column!r} is", _A_TOOL)
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list):
        raise bad_row(f"the column {column!r} is {shown(value)}", _A_TOOL)
    for tool in tools:
        if _function_of(tool) is None:
            raise bad_row(f"the column {column!r} has the tool {shown(tool)}", _A_TOOL)
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]


def read_call(call: Any, place: str) -> dict[str, Any]:
    """Return a call in OpenAI's form, its arguments as an object.

    Chat templates write the object themselves; given text, most would write JSON in JSON.
    """
    function = _function_of(call)
    if function is None:
        raise bad_row(f"{place} has the tool call {shown(call)}", _A_CALL)
    given = function.get("arguments", function.get("parameters")) or {}
    what = f"{place} calls {function['name']!r} with"
    arguments = read_json(given, what, _A_CALL)
    if not isinstance(arguments, dict):
        raise bad_row(f"{what} {shown(given)}", _A_CALL)
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    made = {"name": function["name"], "arguments": arguments}
    return {**kept, "type": "function", "function": made}


def _function_of(value: Any) -> dict[str, Any] | None:
    """Return the function of a tool or a call; None where it has no name."""
    function = value.get("function", value) if isinstance(value, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return function if is_named else None


def read_json(value: Any, what: str, wanted: str) -> Any:
    """Return the value of JSON text; what is not text stays."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
        check_value(read)
    except (ValueError, RecursionError) as error:
        raise bad_row(f"{what} {shown(value)}, which is not JSON ({error})", wanted) from None
    return read


def names_text(names: Iterable[Any]) -> str:
    """Return the names of a row's columns for an error."""
    return ", ".join(sorted(map(str, names))) or "none"
