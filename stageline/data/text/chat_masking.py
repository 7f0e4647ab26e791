"""Messages with private sentinels in place of their texts, so that a template shows where they go.

Hidden are all contents, reasoning, names and texts of tool calls, and whatever else could become
a special token. Empty texts stay: templates ask whether there is one.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stageline.data.text.chat_template import ChatTemplate, Message
from stageline.data.text.messages import Tool, Turn
from stageline.data.text.rendered import Piece

Form = Literal["text", "list"]
Part = Literal["content", "reasoning", "call", "other"]
Cut = Callable[[str], Iterable[tuple[str, bool]]]
OPEN, CLOSE = "\ue000", "\ue001"
TOOLS = -1  # in place of the number of a turn


@dataclass(frozen=True)
class TextSlot:
    """A hidden text: of which turn, and which part of it."""

    turn: int
    part: Part
    text: str
    is_image: bool = False
    is_answer: bool = False


def whole(text: str) -> Iterator[tuple[str, bool]]:
    """A text hidden as one."""
    yield text, True


def messages_of(turns: Sequence[Turn], *, form: Form) -> list[Message]:
    """The messages as they are, with contents as text or as lists of parts."""
    return [_message(turn, _content(turn.pieces, form)) for turn in turns]


def with_arguments_as_text(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with the arguments of tool calls as JSON text, which a few templates want."""
    return [
        replace(turn, tool_calls=tuple(map(_as_text, turn.tool_calls))) if turn.tool_calls else turn
        for turn in turns
    ]


def _as_text(call: Tool) -> Tool:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


class Masking:
    """The messages and tools of one conversation with hidden texts.

    Attributes:
        messages, tools: what the template gets.
        slots: by the number of the sentinel.
        nonce: what no text of the conversation begins a sentinel with.
    """

    def __init__(
        self,
        template: ChatTemplate,
        turns: Sequence[Turn],
        tools: Sequence[Tool],
        *,
        form: Form,
        cut: Cut,
    ) -> None:
        self._template = template
        self.form = form
        self._cut = cut
        self.slots: list[TextSlot] = []
        self.nonce = "s"
        texts = [text for turn in turns for text in _texts(turn)] + list(_strings(list(tools)))
        while any(OPEN + self.nonce in text for text in texts if OPEN in text):
            self.nonce += "s"
        self.messages = [self._masked(number, turn) for number, turn in enumerate(turns)]
        self.tools = [self._tree(TOOLS, "other", tool, is_open=True) for tool in tools]

    def _hide(self, turn: int, part: Part, text: str, **kind: bool) -> str:
        self.slots.append(TextSlot(turn, part, text, **kind))
        return f"{OPEN}{self.nonce}{len(self.slots) - 1}{CLOSE}"

    def _masked(self, number: int, turn: Turn) -> Message:
        message = _message(turn, _content(list(self._pieces(number, turn)), self.form))
        for name in ("name", "tool_call_id"):
            if name in message and self._template.is_risky(message[name]):
                message[name] = self._hide(number, "other", message[name])
        if turn.reasoning.strip():
            message["reasoning_content"] = self._hide(number, "reasoning", turn.reasoning)
        if turn.tool_calls:
            message["tool_calls"] = [self._call(number, call) for call in turn.tool_calls]
        return message

    def _pieces(self, number: int, turn: Turn) -> Iterator[Piece]:
        """The turn's pieces with sentinels in place of text from the data."""
        is_all = turn.is_target and not turn.tool_calls and not turn.reasoning
        for piece in turn.pieces:
            if piece.is_image and self.form == "text":
                yield Piece(self._hide(number, "content", "", is_image=True), is_image=True)
            elif piece.is_image or not piece.is_user:
                yield piece
            elif not piece.text.strip() and not (is_all and len(turn.pieces) == 1):
                yield piece
            else:
                for text, may_hide in self._cut(piece.text):
                    kind = {"is_answer": piece.is_answer}
                    yield Piece(self._hide(number, "content", text, **kind) if may_hide else text)

    def _call(self, number: int, call: Tool) -> Tool:
        function = call["function"]
        masked = {**call, "function": {**function}}
        masked["function"]["name"] = self._hide(number, "call", function["name"])
        masked["function"]["arguments"] = self._tree(number, "call", function["arguments"])
        if "id" in call and self._template.is_risky(call["id"]):
            masked["id"] = self._hide(number, "call", call["id"])
        return masked

    def _tree(self, number: int, part: Part, value: Any, *, is_open: bool = False) -> Any:
        """A value of JSON with hidden texts.

        Args:
            is_open: texts that cannot become a special token stay: templates read types in tools.
        """
        if isinstance(value, str):
            hides = self._template.is_risky(value) if is_open else bool(value.strip())
            return self._hide(number, part, value) if hides else value
        if isinstance(value, dict):
            return {
                self._tree(number, part, key, is_open=True): self._tree(
                    number, part, item, is_open=is_open
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._tree(number, part, item, is_open=is_open) for item in value]
        return value


def _message(turn: Turn, content: Any) -> Message:
    message: Message = {"role": turn.role, "content": content}
    optional = {
        "name": turn.name,
        "reasoning_content": turn.reasoning,
        "tool_calls": list(turn.tool_calls),
        "tool_call_id": turn.tool_call_id,
    }
    return {**message, **{name: value for name, value in optional.items() if value}}


def _content(pieces: Sequence[Piece], form: Form) -> Any:
    if form == "text":
        return "".join(piece.text for piece in pieces)
    content: list[dict[str, str]] = []
    for piece in pieces:
        if piece.is_image:
            content.append({"type": "image"})
        elif content and content[-1]["type"] == "text":
            content[-1]["text"] += piece.text
        else:
            content.append({"type": "text", "text": piece.text})
    return content


def _texts(turn: Turn) -> Iterator[str]:
    yield from (piece.text for piece in turn.pieces)
    yield turn.reasoning
    yield from _strings(list(turn.tool_calls))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
