"""Rows with a conversation whose speakers have names of the set's own, strictly taking turns."""

from collections.abc import Mapping
from typing import Any

from stageline.data.converters.answers import has_pair, read_label, read_pair
from stageline.data.converters.layout import Layout
from stageline.data.converters.turns import check_alternation, read_messages


def convert_sharegpt(row: Mapping[str, Any], layout: Layout, source: str) -> dict[str, Any]:
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
