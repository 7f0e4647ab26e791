"""Messages of any format -> messages of the sample's form, each checked."""

from collections.abc import Mapping, Sequence
from typing import Any

from stageline.data.converters.layout import (
    CALL,
    OPENAI_TAGS,
    SHAREGPT_TAGS,
    Tags,
    bad_row,
    shown,
)
from stageline.data.converters.tools import check_calls, read_calls

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
