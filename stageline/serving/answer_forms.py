"""What form an answer must have: JSON, or calls of tools; from a chat request to a grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stageline.errors import UserError
from stageline.inference.decoding.grammar import JSON_OBJECT, Grammar, json_grammar
from stageline.inference.decoding.matchers import Matchers
from stageline.serving.chat_models import ChatRequest, JsonSchemaFormat, NamedTool, Tool
from stageline.serving.errors import bad_request
from stageline.serving.prompts import PromptMaker
from stageline.serving.tool_formats import CallableTool, ToolFormat

_SCHEMA = "response_format.json_schema.schema"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class AnswerForm:
    """The form of an answer.

    Attributes:
        grammar: None: it may be any text.
        is_marked: what is JSON without a mark is no call of a tool.
    """

    grammar: Grammar | None = None
    is_marked: bool = False


def shown_tools(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of a request as the model is to see them: what is for the server left out."""
    return [
        {
            **tool,
            "function": {name: v for name, v in tool["function"].items() if name != "strict"},
        }
        for tool in given.get("tools", [])
    ]


def form_of(asked: ChatRequest, *, prompts: PromptMaker, matchers: Matchers) -> AnswerForm:
    """The form that a request asks for; may take a while.

    Raises:
        ApiError: it can't be had.
    """
    content = _content(asked, matchers)
    tools = asked.tools or [] if asked.tool_choice != "none" else []
    chosen = _chosen(asked, tools)
    is_strict = any(tool.function.strict for _, tool in chosen)
    if not tools or not (_is_forced(asked) or is_strict or content is not None):
        return AnswerForm(content)
    tool_format = _tool_format(asked, prompts)
    callable_tools = [_callable(place, tool, asked, matchers) for place, tool in chosen]
    is_single = asked.parallel_tool_calls is False or isinstance(asked.tool_choice, NamedTool)
    try:
        if _is_forced(asked):
            grammar = tool_format.only_calls(callable_tools, is_single=is_single)
        elif content is not None:
            grammar = tool_format.calls_or_json(callable_tools, content.text, is_single=is_single)
        else:
            grammar = tool_format.calls_or_text(callable_tools, is_single=is_single)
        matchers.check(grammar)
    except UserError as error:
        raise bad_request(f"The tools: {error}", param="tools") from None
    return AnswerForm(grammar, is_marked=tool_format.is_marked)


def _content(asked: ChatRequest, matchers: Matchers) -> Grammar | None:
    form = asked.response_format
    if form is None or form.type == "text":
        return None
    grammar, param = JSON_OBJECT, "response_format"
    try:
        if isinstance(form, JsonSchemaFormat) and form.json_schema.schema_ is not None:
            param = _SCHEMA
            is_strict = bool(form.json_schema.strict)
            grammar = json_grammar(form.json_schema.schema_, is_strict=is_strict)
        matchers.check(grammar)
    except UserError as error:
        raise bad_request(f"{param}: {error}", param=param) from None
    return grammar


def _is_forced(asked: ChatRequest) -> bool:
    return asked.tool_choice == "required" or isinstance(asked.tool_choice, NamedTool)


def _chosen(asked: ChatRequest, tools: Sequence[Tool]) -> list[tuple[int, Tool]]:
    """The tools that may be called, with their places."""
    choice = asked.tool_choice
    name = choice.function.name if isinstance(choice, NamedTool) else None
    chosen = [(i, tool) for i, tool in enumerate(tools) if name in (None, tool.function.name)]
    if _is_forced(asked) and not chosen:
        what = "a tool" if name is None else f"the tool {name!r}"
        raise bad_request(
            f"tool_choice asks for {what}, and tools has none such. Name it among the tools.",
            param="tool_choice",
        )
    return chosen


def _tool_format(asked: ChatRequest, prompts: PromptMaker) -> ToolFormat:
    """The format of the model's calls, if it serves what is asked for."""
    found = prompts.tool_format
    if found is not None and (found.is_marked or _is_forced(asked)):
        return found
    if found is None:
        why = "a format of its own, which no grammar is made for here"
        cure = "Leave tool_choice at auto, strict and response_format out."
    else:
        why = "plain JSON, which can't be told from other text"
        cure = "Set tool_choice to required, or leave strict and response_format out."
    raise bad_request(
        f"The model's chat template writes tool calls in {why}. {cure}",
        param="tool_choice" if _is_forced(asked) else "tools",
        code="unsupported_parameter",
    )


def _callable(place: int, tool: Tool, asked: ChatRequest, matchers: Matchers) -> CallableTool:
    """A tool with the schema that its arguments will keep to."""
    function = tool.function
    param = f"tools.{place}.function.parameters"
    schema = _NO_PARAMETERS if function.parameters is None else function.parameters
    if not (function.strict or _is_forced(asked)):
        schema = {}  # nobody asked for it
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise bad_request(
            f"{param} has the type {json.dumps(kind)[:100]}; object was expected, because "
            "arguments have names.",
            param=param,
        )
    try:
        grammar = json_grammar({**schema, "type": "object"}, is_strict=bool(function.strict))
        matchers.check(grammar)
    except UserError as error:
        raise bad_request(f"{param}: {error}", param=param) from None
    return CallableTool(function.name, grammar.text)
