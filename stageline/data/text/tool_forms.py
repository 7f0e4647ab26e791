"""What a conversation with tools becomes for a chat template that does not take it as it is.

Some templates want arguments as text, Mistral's wants ids of nine letters, and many know no tools:
those get them in the system message, as Qwen2.5's template and Hermes write them.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from stageline.data.text.messages import SYSTEM_ROLES, Tool, Turn
from stageline.data.text.rendered import Piece

CALL_MARKS = ("<tool_call>", "</tool_call>")
_ID = re.compile("[A-Za-z0-9]{9}")
_TOOLS = """# Tools

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
Form = tuple[list[Turn], Sequence[Tool], str]


def forms_of(turns: Sequence[Turn], tools: Sequence[Tool], *, knows_tools: bool) -> Iterator[Form]:
    """Turns and tools as they are, then as others want them, with what the user should hear."""
    has_any = any(turn.tool_calls or turn.role == "tool" for turn in turns)
    if not (tools or has_any):
        yield list(turns), tools, ""
        return
    has_calls = any(turn.tool_calls for turn in turns)
    ways = [list(turns)]
    if knows_tools and has_any and (named := with_ids(turns)) != ways[0]:
        ways.append(named)
    if knows_tools or not tools:
        ways += [
            [replace(turn, tool_calls=tuple(map(_call_as_text, turn.tool_calls))) for turn in way]
            for way in ways
            if has_calls
        ]
        for way in ways:
            yield way, tools, ""
    if not knows_tools and (tools or has_any):
        told = _TOOLS.format("\n".join(map(_dumps, tools))) if tools else ""
        written = list(_as_text(turns))
        for role in ("system", "user"):  # some templates know no system message either
            yield _with_text(written, told, role), (), AS_TEXT


def with_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Ids of nine letters for calls and results that have none; the same row has the same ones.

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
                text = f"{num_calls} {_dumps(call['function'])}"
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


def _call_as_text(call: Tool) -> Tool:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = _dumps(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _as_text(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Calls within their answer's text; results, together with what follows, as the user's turn."""
    pieces: list[Piece] = []  # of the user's turn
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
            lines = [f"\n{_dumps(call['function'])}\n".join(CALL_MARKS) for call in turn.tool_calls]
            lead = "\n" if any(piece.text for piece in turn.pieces) else ""
            is_shown = any(piece.is_answer for piece in turn.pieces)
            calls = Piece(lead + "\n".join(lines), True, turn.is_target, is_answer=is_shown)
            turn = replace(turn, pieces=(*turn.pieces, calls), tool_calls=())
        yield turn


def _with_text(turns: Sequence[Turn], text: str, role: str) -> list[Turn]:
    """The turns with a text behind the system message, or before the first one of the user."""
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


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
