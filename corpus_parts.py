"""Document components (row -> text of a document) and splitter components (ends of sentences).

A row is a line of a text file, or what a line of JSON or a row of Parquet holds. A splitter gives
ends in characters, in front of white space; the last one is the text's length.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from register import document_register, splitter_register
from stageline.corpus import sentences
from stageline.corpus.input import BadDocument, json_object
from stageline.errors import UserError

SLOT = re.compile(r"\[\[([A-Z][A-Z0-9_]*)\]\]|\[([A-Z][A-Z0-9_]*)\]")

splitter_register["english"] = sentences.english
splitter_register["chinese"] = sentences.chinese
splitter_register["auto"] = sentences.auto
splitter_register["icu"] = sentences.icu


@splitter_register("none", splits_sentences=False)
def none(text: str) -> numpy.ndarray:
    """No sentences: a long document is cut between any two tokens."""
    return numpy.array([len(text)] if text else [], dtype=numpy.int64)


def _columns_of(
    *, fields: list[str] | None = None, template: str | None = None, **own: Any
) -> list[str]:
    """Return the required fields of a row; refuse options that fail on every row.

    Raises:
        UserError: both came, or a template without a field.
    """
    if template is None:
        return sorted({name.partition(".")[0] for name in fields or ["text"]})
    if fields is not None:
        raise UserError("--document.fields and --document.template were both given. Leave one out.")
    return sorted({name for name, is_slot in _parse(template) if is_slot})


@document_register("text", columns_of=_columns_of)
def text(
    row: str | Mapping[str, Any],
    *,
    fields: list[str] | None = None,
    template: str | None = None,
    separator: str = "\\n",
) -> str:
    r"""A line of text, or joined fields of JSON and Parquet, or a template filled with them.

    With fields or a template a line of a text file that begins with { is read as JSON.

    Args:
        fields: names, a dot leads into a field that holds fields; default: text.
        template: text with [FIELD] in place of each field, in capital letters: "[TITLE]: [BODY]";
            [[FIELD]] is the text [FIELD].
        separator: between two fields; \n is a line break, there and in a template, \t a tab.
    """
    if isinstance(row, str):
        if fields is None and template is None:
            return row
        row = json_object(row) if row.lstrip().startswith("{") else {"text": row}
    if template is not None:
        parts = _parse(template)
        return "".join([_value(row, part) if is_slot else part for part, is_slot in parts])
    return _unescaped(separator).join([_value(row, name) for name in fields or ("text",)])


def _unescaped(text: str) -> str:
    """Return a text with typed escapes replaced by line breaks and tabs."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


@functools.cache
def _parse(template: str) -> Sequence[tuple[str, bool]]:
    """Yield texts and names of fields in turn, with whether each is a name."""
    parts: list[tuple[str, bool]] = []
    template, end = _unescaped(template), 0
    for match in SLOT.finditer(template):
        parts.append((template[end : match.start()], False))
        parts.append((f"[{match[1]}]", False) if match[1] else (match[2].lower(), True))
        end = match.end()
    parts.append((template[end:], False))
    if not any(is_slot for _, is_slot in parts):
        raise UserError(
            f"--document.template {template!r} names no field. Write one in brackets and capital "
            "letters, [TEXT]."
        )
    return [part for part in parts if part[0]]


def _value(row: Mapping[str, Any], name: str) -> str:
    """Return the text of a field.

    Raises:
        BadDocument: it is missing, or no text.
    """
    value = row.get(name)
    if value is None and "." in name:
        value = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if value is None:
        there = ", ".join(map(str, row)) or "none"
        raise BadDocument("missing field", f"no field {name!r}; the row has the fields {there}")
    kind = type(value).__name__
    raise BadDocument("not text", f"the field {name!r} is a {kind}; text was expected")
