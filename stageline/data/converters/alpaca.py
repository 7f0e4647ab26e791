"""Rows with instruction, input and output, an earlier conversation beside them."""

from collections.abc import Mapping
from typing import Any

from stageline.data.converters.answers import has_pair, read_label, read_pair
from stageline.data.converters.layout import Layout, bad_row, shown
from stageline.data.converters.turns import Message


def convert_alpaca(row: Mapping[str, Any], layout: Layout, source: str) -> dict[str, Any]:
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


def _history(row: Mapping[str, Any], layout: Layout, source: str) -> list[Message]:
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
    row: Mapping[str, Any], layout: Layout, what: str, source: str, *, is_needed: bool = False
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
