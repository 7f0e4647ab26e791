"""Tools and tool calls of a sample, in OpenAI's form: checked, and with arguments as objects.

Knows no template: how a call is written is the chat template's affair.
"""

import json
from collections.abc import Mapping
from typing import Any

from stageline.errors import DataError

Tool = dict[str, Any]


def tools_of(sample: Mapping[str, Any]) -> list[Tool]:
    """The tool descriptions of a sample: a list of objects, or that list as JSON text.

    Raises:
        DataError: it is neither.
    """
    tools = sample.get("tools")
    if isinstance(tools, str):
        tools = _parsed(tools, tools)
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
    return tuple(_call(sample, place, call) for call in calls)


def _call(sample: Mapping[str, Any], place: str, call: Any) -> Tool:
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
        read = _parsed(arguments, None) if arguments.strip() else {}
        arguments = read if isinstance(read, dict) else arguments
    made: Tool = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    if isinstance(call.get("id"), str) and call["id"]:
        made["id"] = call["id"]
    return made


def _parsed(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def _bad(sample: Mapping[str, Any], what: str, expected: str) -> DataError:
    name = sample.get("source") or f"sample {sample.get('id', '?')}"
    return DataError(
        f"{name}: {what[:400]}. Expected is {expected}, because that is what chat templates read: "
        "correct the row, or convert it with the dataset part."
    )
