"""Conversations as lists of turns made of pieces, from template samples and `messages` samples.

Some templates want arguments of calls as text, Mistral's wants ids of nine letters, and many know
no tools: those get them in the system message, as Qwen2.5's template and Hermes write them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from stageline.data.rows.conversations import (
    PLAIN_TAGS,
    bad_row,
    read_json,
    read_message,
    shown,
    with_row_weights,
)
from stageline.data.text.rendered import Piece, Rendered
from stageline.data.text.template import fill_parts, parse_template, slot_value
from stageline.errors import DataError, UserError

Tool = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")
CALL_MARKS = ("<tool_call>", "</tool_call>")
_ID = re.compile("[A-Za-z0-9]{9}")
_TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
AS_TEXT = "it knows no tools, so they are written into the system message, and calls as text"


@dataclass(frozen=True)
class Turn:
    """One message."""

    role: str  # system, user, assistant ...
    pieces: tuple[Piece, ...]  # text from the data, text of a template, places for images
    is_target: bool = False  # it is in the loss
    name: str | None = None  # the message's own field
    reasoning: str = ""  # thoughts of an assistant; the template decides where they go
    tool_calls: tuple[Tool, ...] = ()  # an assistant's calls, in OpenAI's form
    tool_call_id: str | None = None  # the call that a tool answers


@dataclass(frozen=True)
class Conversation(Rendered):
    """Turns and tools for a remote model, which has a chat template of its own."""

    turns: tuple[Turn, ...] = ()
    tools: tuple[Tool, ...] = ()

    @classmethod
    def of(
        cls, turns: Sequence[Turn], *, for_generation: bool, tools: Sequence[Tool] = ()
    ) -> "Conversation":
        """Return the conversation of some turns, with their pieces."""
        pieces = tuple(piece for turn in turns for piece in turn.pieces)
        given: dict[str, Any] = {"is_chat": True, "for_generation": for_generation}
        return cls(pieces, turns=tuple(turns), tools=tuple(tools), **given)


def turns_of(
    sample: Mapping[str, Any], prompt: str, *, system: str | None, for_generation: bool
) -> list[Turn]:
    """Return the turns of a sample: its `messages`, or the template as question and answer."""
    own_system = sample.get("system")
    turns = [] if sample.get("messages") is not None else _from_template(sample, prompt)
    with _row_named(sample):
        turns = turns or _from_messages(sample)
        if not isinstance(own_system, str | None):
            raise bad_row(f"`system` is {shown(own_system)}", "text, the system message")
        text = system if own_system is None else own_system
        if text and turns[0].role not in SYSTEM_ROLES:
            turns.insert(0, Turn("system", (Piece(text, is_user=text is own_system),)))
        elif own_system and own_system != "".join(piece.text for piece in turns[0].pieces):
            also = f"`system` is {shown(own_system)}, and the first message is another system's"
            raise bad_row(also, "one of them")
    if for_generation and turns[-1].role == "assistant":
        turns.pop()
    return turns


def only_last_answer(turns: Sequence[Turn]) -> list[Turn]:
    """Take all but the last answer in the loss out of it; they share short room as answers."""
    last = max((number for number, turn in enumerate(turns) if turn.is_target), default=-1)
    return [
        turn if not turn.is_target or number == last else _not_learnt(turn)
        for number, turn in enumerate(turns)
    ]


def with_examples(
    turns: Sequence[Turn], examples: Sequence[Mapping[str, Any]], prompt: str
) -> list[Turn]:
    """Put solved samples before the turns, behind the system message and out of the loss."""
    solved: list[Turn] = []
    for example in examples:
        own = turns_of({**example, "num_images": 0}, prompt, system=None, for_generation=False)
        solved += [_not_learnt(turn) for turn in own if turn.role not in SYSTEM_ROLES]
    num_first = int(bool(turns) and turns[0].role in SYSTEM_ROLES)
    return [*turns[:num_first], *solved, *turns[num_first:]]


def _not_learnt(turn: Turn) -> Turn:
    return replace(turn, pieces=tuple(not_learnt(turn.pieces)), is_target=False)


def not_learnt(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces of an answer that is shown and not in the loss."""
    return [
        replace(piece, is_target=False, is_answer=True) if piece.is_target else piece
        for piece in pieces
    ]


def _from_template(sample: Mapping[str, Any], prompt: str) -> list[Turn]:
    parts = parse_template(prompt)
    place = next(index for index, part in enumerate(parts) if part.is_target)
    behind = "".join(part.text or f"[{part.slot}]" for part in parts[place + 1 :]).strip()
    if behind or place == 0:
        what = f"{behind!r} after the answer" if behind else "nothing before the answer"
        raise UserError(
            f"the template {prompt!r} has {what}, and with `prompt_fn` chat an answer is a message "
            "that follows a prompt. Change it, use `prompt_fn` fill, or give rows with messages."
        )
    # without the template's line breaks next to images and at the end: chat templates have own
    question: list[Piece] = []
    for piece in fill_parts(parts, sample, for_generation=True):
        if question and question[-1].is_image and not piece.is_user:
            piece = replace(piece, text=piece.text.lstrip("\n"))
        question.append(piece)
    if question and not question[-1].is_user:
        question[-1] = replace(question[-1], text=question[-1].text.rstrip())
    question = [piece for piece in question if piece.text or piece.is_image]
    answer = slot_value(sample, parts[place].slot)
    return [
        Turn("user", tuple(question)),
        Turn("assistant", (Piece(answer, is_user=True, is_target=True),), is_target=True),
    ]


def _from_messages(sample: Mapping[str, Any]) -> list[Turn]:
    messages = with_row_weights(sample, sample["messages"])
    if not isinstance(messages, list) or not messages:
        raise bad_row(f"`messages` is {shown(messages)}", "a list of messages")
    turns = [_turn(f"message {number}", message) for number, message in enumerate(messages)]
    num_places = sum(piece.is_image for turn in turns for piece in turn.pieces)
    if num_places == 0 and sample.get("num_images"):
        first = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
        if first is None:
            raise bad_row("no message is of the user", "one that has the images")
        places = (Piece("", is_image=True),) * sample["num_images"]
        turns[first] = replace(turns[first], pieces=places + turns[first].pieces)
    return turns


def _turn(place: str, message: Any) -> Turn:
    if isinstance(message, dict) and message.keys() == {"role", "content"}:  # nearly all are plain
        role, content = message["role"], message["content"]
        if role in ("user", "assistant", "system") and isinstance(content, str):
            is_answer = role == "assistant"
            return Turn(role, (Piece(content, True, is_answer),), is_answer)
    read = read_message(message, PLAIN_TAGS, place=place)
    is_target = read["role"] == "assistant" and read.get("weight", 1) != 0
    content = read["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    pieces = [
        Piece(part["text"], is_user=True, is_target=is_target)
        if part["type"] == "text"
        else Piece("", is_image=True)
        for part in parts
    ]
    return Turn(
        read["role"],
        tuple(pieces),
        is_target=is_target,
        name=read.get("name"),
        reasoning=read.get("reasoning_content", ""),
        tool_calls=tuple(read.get("tool_calls", ())),
        tool_call_id=read.get("tool_call_id"),
    )


def tools_of(sample: Mapping[str, Any]) -> list[Tool]:
    """Return the tool descriptions of a sample: a list of objects, or that list as JSON text."""
    with _row_named(sample):
        wanted = "a list of JSON-schema objects"
        tools = read_json(sample.get("tools") or [], "`tools` is", wanted)
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise bad_row(f"`tools` is {shown(tools)}", wanted)
    return tools


@contextmanager
def _row_named(sample: Mapping[str, Any]) -> Iterator[None]:
    """Put the row before errors, which do not name it."""
    try:
        yield
    except DataError as error:
        name = sample.get("source") or f"sample {sample.get('id', '?')}"
        raise DataError(f"{name}: {error}") from None


def forms_of(
    turns: Sequence[Turn], tools: Sequence[Tool], *, knows_tools: bool
) -> Iterator[tuple[list[Turn], Sequence[Tool], str]]:
    """Yield turns and tools as they are, then as other templates want them, with a warning."""
    has_calls = any(turn.tool_calls for turn in turns)
    has_any = has_calls or any(turn.role == "tool" for turn in turns)
    ways = [list(turns)]
    if knows_tools and has_any and (named := with_ids(turns)) != ways[0]:
        ways.append(named)
    if has_calls and (knows_tools or not tools):
        ways += [[_with_arguments_as_text(turn) for turn in way] for way in list(ways)]
    if knows_tools or not tools:
        for way in ways:
            yield way, tools, ""
    if not knows_tools and (tools or has_any):
        told = _TOOLS_TEXT.format("\n".join(map(as_json, tools))) if tools else ""
        written = list(_as_text(turns))
        for role in ("system", "user"):  # some templates know no system message either
            yield _with_text(written, told, role), (), AS_TEXT


def _with_arguments_as_text(turn: Turn) -> Turn:
    calls = []
    for call in turn.tool_calls:
        function = {**call["function"], "arguments": as_json(call["function"]["arguments"])}
        calls.append({**call, "function": function})
    return replace(turn, tool_calls=tuple(calls))


def with_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Give ids of nine letters to calls and results without; the same row gets the same ones.

    A result gets the id of the call that it names, else of the first one that has no result.
    """
    made, num_calls = [], 0
    known: dict[str, str] = {}
    waiting: list[str] = []
    for turn in turns:
        if turn.tool_calls:
            calls, waiting = [], []
            for call in turn.tool_calls:
                num_calls += 1
                old = call.get("id", "")
                text = f"{num_calls} {as_json(call['function'])}"
                new = old if _ID.fullmatch(old) else hashlib.sha256(text.encode()).hexdigest()[:9]
                known[old] = new
                waiting.append(new)
                calls.append({**call, "id": new})
            turn = replace(turn, tool_calls=tuple(calls))
        elif turn.role == "tool":
            named = known.get(turn.tool_call_id or " ")
            new = named if named in waiting else next(iter(waiting), turn.tool_call_id)
            waiting = [one for one in waiting if one != new]
            turn = replace(turn, tool_call_id=new)
        made.append(turn)
    return made


def _as_text(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Write calls into their answer's text; results, with what follows, become the user's turn."""
    pieces: list[Piece] = []  # becomes the user's turn
    for place, turn in enumerate(turns):
        if turn.role in ("tool", "user"):
            own = list(turn.pieces)
            if turn.role == "tool":
                own = [_text("<tool_response>\n"), *own, _text("\n</tool_response>")]
            pieces += [_text("\n"), *own] if pieces else own
            if place + 1 == len(turns) or turns[place + 1].role not in ("tool", "user"):
                yield Turn("user", tuple(pieces))
                pieces = []
            continue
        if turn.tool_calls:
            lines = [
                f"\n{as_json(call['function'])}\n".join(CALL_MARKS) for call in turn.tool_calls
            ]
            lead = "\n" if any(piece.text for piece in turn.pieces) else ""
            is_shown = any(piece.is_answer for piece in turn.pieces)
            calls = Piece(lead + "\n".join(lines), True, turn.is_target, is_answer=is_shown)
            turn = replace(turn, pieces=(*turn.pieces, calls), tool_calls=())
        yield turn


def _with_text(turns: Sequence[Turn], text: str, role: str) -> list[Turn]:
    """Put a text behind the system message, or before the first one of the user."""
    if not text:
        return list(turns)
    if role == "user":
        first = next((place for place, turn in enumerate(turns) if turn.role == role), 0)
        own = (_text(text + "\n\n"), *turns[first].pieces)
        return [*turns[:first], replace(turns[first], pieces=own), *turns[first + 1 :]]
    if turns[0].role not in SYSTEM_ROLES:
        return [Turn("system", (_text(text),)), *turns]
    own = (*turns[0].pieces, _text("\n\n" + text))
    return [replace(turns[0], pieces=own), *turns[1:]]


def _text(text: str) -> Piece:
    return Piece(text, is_user=True)


def as_json(value: object) -> str:
    """Return a value as JSON with letters of all scripts as they are."""
    return json.dumps(value, ensure_ascii=False)
