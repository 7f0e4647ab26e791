"""Conversations as lists of turns made of pieces, from template samples and `messages` samples.

Knows no chat template; chat.py renders turns with the model's own.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from stageline.data.rows.conversations import WEIGHTS, is_learnt, with_row_weights
from stageline.data.rows.read_rows import check_value
from stageline.data.text.rendered import Piece, Rendered
from stageline.data.text.template import fill_parts, parse_template, slot_value
from stageline.errors import DataError, UserError

Tool = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")
_KNOWN_FIELDS = {
    *("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"),
    *("mask", *WEIGHTS),
}
_PLAIN = {"role", "content"}
_IMAGE_TYPES = ("image", "image_url")


@dataclass(frozen=True)
class Turn:
    """One message.

    Attributes:
        role: system, user, assistant ...
        pieces: its content; text from the data, text of a template, places for images.
        is_target: what is learnt.
        name: the message's own field `name`, if it has one.
        reasoning: what an assistant thought before; the template says where it goes.
        tool_calls: of an assistant, in OpenAI's form.
        tool_call_id: of the call that a tool answers.
    """

    role: str
    pieces: tuple[Piece, ...]
    is_target: bool = False
    name: str | None = None
    reasoning: str = ""
    tool_calls: tuple[Tool, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True)
class Conversation(Rendered):
    """Turns that no template has written: for a model elsewhere, which has a template of its own.

    Attributes:
        turns: in order; `pieces` are theirs, one after the other.
        tools: descriptions of the tools that may be called.
    """

    turns: tuple[Turn, ...] = ()
    tools: tuple[Tool, ...] = ()

    @classmethod
    def of(
        cls, turns: Sequence[Turn], *, for_generation: bool, tools: Sequence[Tool] = ()
    ) -> "Conversation":
        """The conversation of some turns."""
        pieces = tuple(piece for turn in turns for piece in turn.pieces)
        return cls(
            pieces,
            is_chat=True,
            for_generation=for_generation,
            turns=tuple(turns),
            tools=tuple(tools),
        )


def turns_of(
    sample: Mapping[str, Any], prompt: str, *, system: str | None, for_generation: bool
) -> list[Turn]:
    """The turns of a sample: its `messages`, or the template as question and answer.

    Args:
        system: a system message for samples that bring none.
        for_generation: leave out the last answer.
    """
    has_messages = sample.get("messages") is not None
    turns = _from_messages(sample) if has_messages else _from_template(sample, prompt)
    own_system = sample.get("system")
    if not isinstance(own_system, str | None):
        raise _bad(sample, f"`system` is {own_system!r}", "text, the system message")
    text = system if own_system is None else own_system
    if text and turns[0].role not in SYSTEM_ROLES:
        turns.insert(0, Turn("system", (Piece(text, is_user=text is own_system),)))
    elif own_system and own_system != "".join(piece.text for piece in turns[0].pieces):
        came = f"`system` is {own_system!r}, and the first message is another system message"
        raise _bad(sample, came, "one of them")
    if for_generation and turns[-1].role == "assistant":
        turns.pop()
    return turns


def only_last_answer(turns: Sequence[Turn]) -> list[Turn]:
    """The turns, of which the last answer that is learnt stays the only one.

    The others are answers still: where room is short it is shared with them.
    """
    last = max((number for number, turn in enumerate(turns) if turn.is_target), default=-1)
    return [
        turn if not turn.is_target or number == last else _not_learnt(turn)
        for number, turn in enumerate(turns)
    ]


def with_examples(
    turns: Sequence[Turn], examples: Sequence[Mapping[str, Any]], prompt: str
) -> list[Turn]:
    """The turns with solved samples before them, behind the system message; nothing is learnt."""
    shown: list[Turn] = []
    for example in examples:
        own = turns_of({**example, "num_images": 0}, prompt, system=None, for_generation=False)
        shown += [_not_learnt(turn) for turn in own if turn.role not in SYSTEM_ROLES]
    num_first = int(bool(turns) and turns[0].role in SYSTEM_ROLES)
    return [*turns[:num_first], *shown, *turns[num_first:]]


def _not_learnt(turn: Turn) -> Turn:
    return replace(turn, pieces=tuple(not_learnt(turn.pieces)), is_target=False)


def not_learnt(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces of an answer that is shown and not learnt."""
    return [
        replace(piece, is_target=False, is_answer=True) if piece.is_target else piece
        for piece in pieces
    ]


def _from_template(sample: Mapping[str, Any], prompt: str) -> list[Turn]:
    parts = parse_template(prompt)
    place = next(index for index, part in enumerate(parts) if part.is_target)
    behind = "".join(part.text or f"[{part.slot}]" for part in parts[place + 1 :]).strip()
    if behind:
        raise UserError(
            f"the template {prompt!r} has {behind!r} after the answer, which with `prompt_fn` chat "
            "is a message of its own. Take that text out, or use `prompt_fn` fill."
        )
    if place == 0:
        raise UserError(
            f"the template {prompt!r} begins with what is learnt, and with `prompt_fn` chat an "
            "answer is a turn. Use `prompt_fn` fill for plain text, or give rows with messages."
        )
    question = _trimmed(list(fill_parts(parts, sample, for_generation=True)))
    answer = slot_value(sample, parts[place].slot)
    return [
        Turn("user", tuple(question)),
        Turn("assistant", (Piece(answer, is_user=True, is_target=True),), is_target=True),
    ]


def _trimmed(pieces: list[Piece]) -> list[Piece]:
    """Without the template's line breaks beside images and at the end: chat templates have own."""
    trimmed: list[Piece] = []
    for piece in pieces:
        if trimmed and trimmed[-1].is_image and not piece.is_user:
            piece = replace(piece, text=piece.text.lstrip("\n"))
        trimmed.append(piece)
    if trimmed and not trimmed[-1].is_user and not trimmed[-1].is_image:
        trimmed[-1] = replace(trimmed[-1], text=trimmed[-1].text.rstrip())
    return [piece for piece in trimmed if piece.text or piece.is_image]


def _from_messages(sample: Mapping[str, Any]) -> list[Turn]:
    with _source_before(sample):
        messages = with_row_weights(sample, sample["messages"])
    if not isinstance(messages, list) or not messages:
        raise _bad(sample, f"`messages` is {messages!r}", "a list of messages")
    turns = [_turn(sample, number, message) for number, message in enumerate(messages)]
    num_places = sum(piece.is_image for turn in turns for piece in turn.pieces)
    if num_places == 0 and sample.get("num_images"):
        first = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
        if first is None:
            raise _bad(sample, "no message is of the user", "one that has the images")
        places = (Piece("", is_image=True),) * sample["num_images"]
        turns[first] = replace(turns[first], pieces=places + turns[first].pieces)
    return turns


def _turn(sample: Mapping[str, Any], number: int, message: Any) -> Turn:
    place = f"message {number}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _bad(sample, f"{place} is {message!r}", "an object with role and content")
    role = message["role"]
    if not role.replace("_", "").isalnum():
        raise _bad(sample, f"{place} has the role {role!r}", "a word such as user")
    is_answer = role == "assistant"
    if message.keys() == _PLAIN and isinstance(message["content"], str):  # nothing to check further
        return Turn(role, (Piece(message["content"], True, is_answer),), is_answer)
    unknown = sorted(
        key for key, value in message.items() if value is not None and key not in _KNOWN_FIELDS
    )
    if unknown:
        raise _bad(
            sample, f"{place} has the fields {', '.join(unknown)}", "those of a chat message"
        )
    for field in ("name", "tool_call_id"):
        if message.get(field) is not None and not isinstance(message[field], str):
            raise _bad(sample, f"{place} has the {field} {message[field]!r}", "text")
    with _source_before(sample):
        is_target = is_learnt(message, place, is_answer=is_answer)
    calls = calls_of(sample, place, message)
    reasoning = message.get("reasoning_content") or ""
    if not isinstance(reasoning, str) or (reasoning and role != "assistant"):
        what = f"{place} of {role} has the reasoning_content {reasoning!r}"
        raise _bad(sample, what, "text, with an assistant")
    content = message.get("content")
    if content is None and (calls or reasoning):
        content = ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise _bad(sample, f"{place} has the content {content!r}", "text, or a list")
    return Turn(
        role,
        tuple(_piece(sample, place, part, is_target) for part in parts),
        is_target=is_target,
        name=message.get("name"),
        reasoning=reasoning,
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id"),
    )


def _piece(sample: Mapping[str, Any], place: str, part: Any, is_target: bool) -> Piece:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _IMAGE_TYPES:
        return Piece("", is_image=True)
    if kind == "text" and isinstance(part.get("text"), str):
        return Piece(part["text"], is_user=True, is_target=is_target)
    raise _bad(
        sample, f"{place} has the part {part!r}", '{"type": "text", "text": ...} or an image'
    )


def tools_of(sample: Mapping[str, Any]) -> list[Tool]:
    """The tool descriptions of a sample: a list of objects, or that list as JSON text.

    Raises:
        DataError: it is neither.
    """
    tools = sample.get("tools")
    if isinstance(tools, str):
        tools = _parsed(sample, tools, tools)
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _bad(sample, f"`tools` is {tools!r}", "a list of JSON-schema objects")
    return tools


def calls_of(sample: Mapping[str, Any], place: str, message: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The tool calls of a message; arguments that are the JSON text of an object become one.

    Chat templates write the object themselves; given text, most would write JSON in JSON.

    Raises:
        DataError: a call has no function with a name and arguments.
    """
    calls = message.get("tool_calls")
    if not calls:
        return ()
    if message["role"] != "assistant":
        raise _bad(sample, f"{place} of {message['role']} has tool_calls", "them with assistant")
    if not isinstance(calls, list):
        raise _bad(sample, f"{place} has the tool_calls {calls!r}", "a list")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", {}) if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str | None):
            raise _bad(
                sample,
                f"{place} has the tool call {call!r}",
                '{"type": "function", "function": {"name": ..., "arguments": {...}}}',
            )
        if isinstance(arguments, str):
            read = _parsed(sample, arguments, None) if arguments.strip() else {}
            arguments = read if isinstance(read, dict) else arguments
        made: Tool = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
        if isinstance(call.get("id"), str) and call["id"]:
            made["id"] = call["id"]
        found.append(made)
    return tuple(found)


def _parsed(sample: Mapping[str, Any], text: str, otherwise: Any) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
    try:
        check_value(found)
    except ValueError as error:
        raise _bad(sample, f"JSON in a text with {error}", "a text without it") from error
    return found


@contextmanager
def _source_before(sample: Mapping[str, Any]) -> Iterator[None]:
    """Puts the row before errors that do not name it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{_name_of(sample)}: {error}") from None


def _name_of(sample: Mapping[str, Any]) -> str:
    return sample.get("source") or f"sample {sample.get('id', '?')}"


def _bad(sample: Mapping[str, Any], what: str, expected: str) -> DataError:
    return DataError(
        f"{_name_of(sample)}: {what[:400]}. Expected is {expected}. Correct the row, or convert it "
        "with the dataset part: a chat template reads role, content, reasoning_content, "
        "tool_calls, tool_call_id and name, and the tools."
    )
