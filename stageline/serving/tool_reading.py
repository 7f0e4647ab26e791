"""Finds tool calls in the text of an answer, also while it is still being written.

Models write calls as their chat templates showed them: `<tool_call>{...}</tool_call>` (Hermes,
Qwen), `[TOOL_CALLS] [{...}]` (Mistral; the first word is a special token and not in the text), or
one JSON object as the whole answer (Llama 3, which says `parameters`). A call is told when it is
whole. What only looks like one stays text.
"""

import json
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LIST = "[TOOL_CALLS]"
_PYTHON = "<|python_tag|>"
_STARTS = (_LIST, _PYTHON, '{"', "{ ", "{\n", '[{"', "[ {", "[{ ", "[{\n")
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class FoundCall:
    """A call of a tool; `arguments` is JSON text, `id` has nine letters, as Mistral's must."""

    id: str
    name: str
    arguments: str


class PlainReader:
    """Text that is text."""

    num_calls = 0

    def add(self, text: str) -> list[str | FoundCall]:
        """What can be told after some more text."""
        return [text] if text else []

    def finish(self) -> list[str | FoundCall]:
        """What is left at the end."""
        return []


class ToolReader:
    """Text in which there may be calls.

    Args:
        names: of the tools that may be called; others' calls stay text.
        is_single: tell the first call only.
        is_marked: calls stand in <tool_call> alone; an answer that is JSON is text.

    Attributes:
        num_calls: so many were told.
    """

    def __init__(
        self, names: Iterable[str], *, is_single: bool = False, is_marked: bool = False
    ) -> None:
        self.names = frozenset(names)
        self.is_single = is_single
        self.is_marked = is_marked
        self.num_calls = 0
        self._held = ""
        self._is_begun = False  # text was told, so the whole answer is no call
        self._is_whole = False  # the answer began as JSON: it is told at the end

    def add(self, text: str) -> list[str | FoundCall]:
        """What can be told after some more text."""
        self._held += text
        told: list[str | FoundCall] = []
        while not self._is_whole and not (self._is_first and self._waits_for_more()):
            place = self._held.find(_OPEN)
            if place < 0:
                return told + self._text(len(self._held) - _overlap(self._held, _OPEN))
            told += self._text(place, before_call=True)
            end = self._held.find(_CLOSE) + len(_CLOSE)
            if end < len(_CLOSE):
                return told
            inside = self._held[len(_OPEN) : end - len(_CLOSE)]
            told += self._call(inside, self._held[:end])
            self._held = self._held[end:]
        return told

    def finish(self) -> list[str | FoundCall]:
        """What is left at the end."""
        held, self._held = self._held, ""
        calls = self._calls_of(held.removeprefix(_OPEN)) if held.strip() else []
        if calls:
            return self._kept(calls)
        return [held] if held and not (self.num_calls and not held.strip()) else []

    @property
    def _is_first(self) -> bool:
        return not self._is_begun and not self.num_calls and not self.is_marked

    def _waits_for_more(self) -> bool:
        """Whether the whole answer may be JSON of calls; notes it when it begins so."""
        text = self._held.lstrip()
        self._is_whole = text.startswith(_STARTS)
        return self._is_whole or any(start.startswith(text) for start in (*_STARTS, _OPEN))

    def _text(self, end: int, *, before_call: bool = False) -> list[str | FoundCall]:
        """Text up to there; white space around calls is the template's, and dropped."""
        text = self._held[:end]
        if not text.strip() and (self.num_calls or not self._is_begun):
            self._held = self._held[end if before_call else 0 :]
            return []
        self._held = self._held[end:]
        self._is_begun = self._is_begun or bool(text)
        return [text] if text else []

    def _call(self, inside: str, all_of_it: str) -> list[str | FoundCall]:
        calls = self._calls_of(inside)
        if calls:
            return self._kept(calls)
        self._is_begun = True
        return [all_of_it]

    def _kept(self, calls: list[FoundCall]) -> list[str | FoundCall]:
        most = max(0, 1 - self.num_calls) if self.is_single else len(calls)
        kept = calls[:most]
        self.num_calls += len(kept)
        return list(kept)

    def _calls_of(self, text: str) -> list[FoundCall]:
        """The calls that a text is; none if it is anything else."""
        text = text.strip().removeprefix(_LIST).removeprefix(_PYTHON).strip()
        found = [_call_of(value, self.names) for value in _values(text)]
        return [call for call in found if call] if all(found) else []


def _values(text: str) -> list[Any]:
    """JSON values one after the other, with `;` or nothing between; a list's members."""
    decoder, place = json.JSONDecoder(), 0
    values: list[Any] = []
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return [None]
        values += value if isinstance(value, list) else [value]
        while place < len(text) and (text[place] in ";," or text[place].isspace()):
            place += 1
    return values


def _call_of(value: Any, names: frozenset[str]) -> FoundCall | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    letters = "".join(secrets.choice(_LETTERS) for _ in range(9))
    return FoundCall(letters, value["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, mark: str) -> int:
    """How many letters at the end of a text may be the beginning of a mark."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if mark.startswith(text[-size:])), 0)
