"""The answers to a chat, whole or as a stream of chunks."""

import json
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stageline.errors import UserError
from stageline.inference.decoding.grammars import JSON_OBJECT, Grammar, Matchers, json_grammar
from stageline.inference.decoding.request import AnswerPiece, Finished, TokenLogprob
from stageline.serving.errors import bad_request
from stageline.serving.prompts import PromptMaker
from stageline.serving.request_models import ChatRequest, JsonSchemaFormat, NamedTool, Tool
from stageline.serving.service import Out, Service, UsageCount, copies, forget_large, good_events
from stageline.serving.settings import chat_sampling
from stageline.serving.token_texts import TokenTexts
from stageline.serving.tool_formats import CallableTool, ToolFormat

# -- what form an answer must have: JSON, or calls of tools; from a chat request to a grammar -----

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


# -- finds tool calls in the text of an answer, also while it is still being written --------------
# Models write calls as their chat templates showed them: `<tool_call>{...}</tool_call>` (Hermes,
# Qwen), `[TOOL_CALLS] [{...}]` (Mistral; the first word is a special token and not in the text), or
# one JSON object as the whole answer (Llama 3, which says `parameters`). A call is told when it is
# whole. What only looks like one stays text.

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


# -------------------------------------------------------------------------------------------------

Reader = ToolReader | PlainReader


async def answer_chat(service: Service, asked: ChatRequest, out: Out) -> None:
    """Answers a chat.

    Raises:
        ApiError: it can't be answered.
    """
    sampling = chat_sampling(asked, service.settings, num_ids=service.prompts.num_ids)
    given = asked.model_dump(exclude_none=True)
    tools = shown_tools(given) if asked.tool_choice != "none" else []
    with service.desk.place(asked.n or 1) as place:
        prompt = await service.in_thread(
            service.prompts.of_messages, given["messages"], tools=tools
        )
        form = await service.in_thread(
            form_of, asked, prompts=service.prompts, matchers=service.engine.matchers
        )
        sampling = replace(sampling, grammar=form.grammar)
        has_new_name = asked.max_completion_tokens is not None
        sampling = service.fitted(
            prompt,
            sampling,
            asked.max_completion_tokens if has_new_name else asked.max_tokens,
            default=service.settings.default_max_tokens,
            field="max_completion_tokens" if has_new_name else "max_tokens",
        )
        requests = copies(prompt, sampling, asked.n or 1)
        readers = [_reader(asked, tools, form) for _ in requests]
        del given, tools, prompt
        forget_large(asked, out)
        events = good_events(place, requests)
        if asked.stream:
            await _stream(service, asked, events, readers, out)
        else:
            await _whole(service, events, readers, out)


def _reader(asked: ChatRequest, tools: list[dict[str, Any]], form: AnswerForm) -> Reader:
    if not tools:
        return PlainReader()
    names = [tool["function"]["name"] for tool in tools]
    is_single = asked.parallel_tool_calls is False
    return ToolReader(names, is_single=is_single, is_marked=form.is_marked)


async def _whole(service: Service, events: Any, readers: list[Reader], out: Out) -> None:
    usage = UsageCount()
    choices: dict[int, dict[str, Any]] = {}
    async for number, event in events:
        if isinstance(event, Finished):
            usage.add(0, event)
            choices[number] = _choice(number, event, readers[number], service.texts)
    await out.whole(
        {
            **service.head("chat.completion", "chatcmpl"),
            "choices": [choices[number] for number in sorted(choices)],
            "usage": usage.as_object(),
        }
    )


def _choice(number: int, event: Finished, reader: Reader, texts: TokenTexts) -> dict[str, Any]:
    told = [*reader.add(event.text), *reader.finish()]
    calls = [_call(item) for item in told if isinstance(item, FoundCall)]
    text = "".join(item for item in told if isinstance(item, str))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = calls
    return {
        "index": number,
        "message": message,
        "logprobs": _logprobs(event.logprobs, texts),
        "finish_reason": _reason(event, reader),
    }


async def _stream(
    service: Service, asked: ChatRequest, events: Any, readers: list[Reader], out: Out
) -> None:
    has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
    head = service.head("chat.completion.chunk", "chatcmpl")
    if has_usage:
        head["usage"] = None
    streams = [_Choice(number, reader, service.texts) for number, reader in enumerate(readers)]
    usage = UsageCount()
    async for number, event in events:
        for choice in streams[number].chunks(event):
            await out.event({**head, "choices": [choice]})
        if isinstance(event, Finished):
            usage.add(0, event)
    if has_usage:
        await out.event({**head, "choices": [], "usage": usage.as_object()})
    await out.end_stream()


class _Choice:
    """The chunks of one answer."""

    def __init__(self, number: int, reader: Reader, texts: TokenTexts) -> None:
        self.number = number
        self.reader = reader
        self.texts = texts
        self.num_calls = 0
        self.is_begun = False
        self.logprobs: list[TokenLogprob] = []  # of tokens whose text is not told yet

    def chunks(self, event: AnswerPiece | Finished) -> list[dict[str, Any]]:
        """What an event makes."""
        made = []
        if not self.is_begun:
            self.is_begun = True
            made.append(self._chunk({"role": "assistant", "content": "", "refusal": None}))
        if isinstance(event, AnswerPiece):
            self.logprobs += event.logprobs
            return made + [self._delta(item) for item in self.reader.add(event.text)]
        made += [self._delta(item) for item in self.reader.finish()]
        if self.logprobs:
            made.append(self._delta(""))
        return [*made, self._chunk({}, _reason(event, self.reader))]

    def _delta(self, item: str | FoundCall) -> dict[str, Any]:
        logprobs, self.logprobs = self.logprobs, []
        if isinstance(item, str):
            return self._chunk({"content": item}, logprobs=logprobs)
        call = {"index": self.num_calls, **_call(item)}
        self.num_calls += 1
        return self._chunk({"tool_calls": [call]}, logprobs=logprobs)

    def _chunk(
        self,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        return {
            "index": self.number,
            "delta": delta,
            "logprobs": _logprobs(logprobs or [], self.texts),
            "finish_reason": reason,
        }


def _call(call: FoundCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reason(event: Finished, reader: Reader) -> str:
    return "tool_calls" if reader.num_calls and event.reason == "stop" else event.reason


def _logprobs(logprobs: Any, texts: TokenTexts) -> dict[str, Any] | None:
    return {"content": texts.chat(logprobs), "refusal": None} if logprobs else None
