"""Tools and calls of functions in OpenAI's form, from JSON text or objects."""

import json
import re
from typing import Any

from stageline.data.converters.layout import bad_row, shown

_THOUGHT = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)


def read_tools(value: Any, *, column: str, source: str) -> list[dict[str, Any]]:
    """The tools of a row: a list, or its JSON; [] where there is none.

    Raises:
        DataError: names the row and what came.
    """
    if value is None or value == "" or value == []:
        return []
    tools = _parsed(value)
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list):
        raise _bad_tool(source, f"the column {column!r} is {shown(value)}")
    return [_tool(tool, column, source) for tool in tools]


def _tool(tool: Any, column: str, source: str) -> dict[str, Any]:
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise _bad_tool(source, f"the column {column!r} has the tool {shown(tool)}")
    return tool if "function" in tool else {"type": "function", "function": tool}


def _bad_tool(source: str, what: str) -> Exception:
    return bad_row(
        source,
        what,
        'A list of {"name": ..., "parameters": ...}, or JSON of one, was',
        "the chat template tells the model of them",
    )


def read_calls(text: Any, *, place: str, source: str) -> dict[str, Any]:
    """The message of an answer that calls functions, from the JSON that formats write for it.

    Reasoning in <think> tags before the JSON becomes `reasoning_content`.

    Raises:
        DataError: names the message.
    """
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if isinstance(text, str):
        thought = _THOUGHT.match(text)
        if thought:
            message["reasoning_content"] = thought[1].strip()
            text = text[thought.end() :]
    calls = _parsed(text)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls:
        raise _bad_call(source, f"{place} calls a function by {shown(text)}")
    message["tool_calls"] = check_calls(calls, place=place, source=source)
    return message


def check_calls(calls: Any, *, place: str, source: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, their arguments as objects.

    Raises:
        DataError: names the message.
    """
    if not isinstance(calls, list):
        raise _bad_call(source, f"{place} has the tool_calls {shown(calls)}")
    return [_call(call, place, source) for call in calls]


def _call(call: Any, place: str, source: str) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise _bad_call(source, f"{place} has the call {shown(call)}")
    given = inner.get("arguments", inner.get("parameters", {}))
    arguments = {} if given in (None, "") else _parsed(given)
    if not isinstance(arguments, dict):
        raise _bad_call(source, f"{place} calls {inner['name']!r} with {shown(given)}")
    function = {"name": inner["name"], "arguments": arguments}
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**kept, "type": "function", "function": function}


def _bad_call(source: str, what: str) -> Exception:
    return bad_row(
        source,
        what,
        'JSON such as {"name": "search", "arguments": {"words": "tea"}}, or a list of it, was',
        "the chat template writes calls from name and arguments",
    )


def _parsed(value: Any) -> Any:
    """The value of JSON text; None where it is none. What is no text stays."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
