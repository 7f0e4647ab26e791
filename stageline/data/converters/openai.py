"""Rows with messages as OpenAI's interface has them, and TRL's rows of prompt and completions."""

from collections.abc import Mapping
from typing import Any

from stageline.data.converters.answers import (
    has_pair,
    read_answer,
    read_label,
    read_pair,
    says_label,
)
from stageline.data.converters.layout import Layout, bad_row
from stageline.data.converters.turns import Message, check_last, read_messages


def convert_openai(row: Mapping[str, Any], layout: Layout, source: str) -> dict[str, Any]:
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


def _prompt(row: Mapping[str, Any], layout: Layout, source: str) -> tuple[list[Message], str]:
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


def _label(row: Mapping[str, Any], layout: Layout) -> tuple[Any, str]:
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
