"""What is compared or judged in a row: two answers to a prompt, or one with a label."""

from collections.abc import Mapping, Sequence
from typing import Any

from stageline.data.converters.layout import Layout, Tags, bad_row, shown
from stageline.data.converters.turns import (
    Message,
    check_last,
    read_message,
    read_messages,
    tags_of,
)


def has_pair(row: Mapping[str, Any], layout: Layout) -> bool:
    """Whether the set is a ranking, or the row has both answers of a preference."""
    both = all(layout.value(row, name) is not None for name in ("chosen", "rejected"))
    return layout.ranking or both


def read_pair(
    prompt: list[Message], row: Mapping[str, Any], layout: Layout, *, source: str
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
    chosen: list[Message], rejected: list[Message], layout: Layout, source: str
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
