"""Calls of tools: how a model writes them, grammars that make it do so, and reading them.

Models write calls as their chat templates showed them: `<tool_call>{...}</tool_call>` (Hermes,
Qwen), `[TOOL_CALLS] [{...}]` (Mistral; the first word is a special token and not in the text), or
one JSON object as the whole answer (Llama 3, which says `parameters`).
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stageline.data.rows.read_json import check_value
from stageline.data.text.chat_template import ChatTemplate
from stageline.data.text.processor import get_tokenizer
from stageline.data.text.tool_forms import CALL_MARKS
from stageline.errors import UserError
from stageline.inference.decoding.grammars import JSON_OBJECT, Grammar, Matchers, json_grammar
from stageline.serving.api_models import (
    ChatRequest,
    JsonSchemaFormat,
    NamedTool,
    SamplingFields,
    Tool,
)
from stageline.serving.errors import bad_request

_NAME, _ARGUMENT = "name_of_a_tool", "name_of_an_argument"
_CALL = rf'\{{\s*"name":\s*"{_NAME}",\s*"FIELD":\s*\{{\s*"{_ARGUMENT}":\s*1\s*\}}'
_PATTERNS = {
    "hermes": rf"<tool_call>\s*{_CALL}\s*\}}\s*</tool_call>".replace("FIELD", "arguments"),
    "mistral": rf"\[TOOL_CALLS\]\s*\[\s*{_CALL}".replace("FIELD", "arguments"),
    "llama": rf"{_CALL}\s*\}}".replace("FIELD", "parameters"),
}
_TRIAL: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",  # nine letters, as Mistral's must have
                "type": "function",
                "function": {"name": _NAME, "arguments": {_ARGUMENT: 1}},
            }
        ],
    },
]
_TRIAL_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Nothing.",
        "parameters": {"type": "object", "properties": {"other": {"type": "integer"}}},
    },
}


_SCHEMA = "response_format.json_schema.schema"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_OPEN, _CLOSE = CALL_MARKS
_LIST = "[TOOL_CALLS]"
_PYTHON = "<|python_tag|>"
_STARTS = (_LIST, _PYTHON, '{"', "{ ", "{\n", '[{"', "[ {", "[{ ", "[{\n")
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called; `schema` of its arguments, the text of its `json_grammar`."""

    name: str
    schema: str


@dataclass(frozen=True)
class ToolFormat:
    """The format of one model.

    Attributes:
        begin, end: of calls, as Lark's syntax has them: tokens, or else texts.
        others: ids of further tokens that text may have and that grammars leave out of it, <think>.
    """

    name: Literal["hermes", "mistral", "llama"]
    begin: str = ""
    end: str = ""
    others: tuple[int, ...] = ()

    @property
    def is_marked(self) -> bool:
        """Whether calls and text can be told apart anywhere in an answer."""
        return self.name == "hermes"

    def only_calls(self, tools: Sequence[CallableTool], *, is_single: bool) -> Grammar:
        """One call or several, and nothing else."""
        return self._grammar("start: calls", tools, is_single)

    def calls_or_json(
        self, tools: Sequence[CallableTool], schema: str, *, is_single: bool
    ) -> Grammar:
        """Calls, or JSON of a schema instead; of a format that is marked."""
        return self._grammar(f"start: calls | %json {schema}", tools, is_single)

    def calls_or_text(self, tools: Sequence[CallableTool], *, is_single: bool) -> Grammar:
        """Text, with calls at its end or not; of a format that is marked."""
        others = " | ".join(f"<[{token_id}]>" for token_id in self.others)
        text = f"text: (TEXT ({others}))* TEXT" if others else "text: TEXT"
        start = "start: text | text calls"
        if not self.begin.startswith("<["):  # one lexeme: no token begins where the mark does
            start = f"start: text | marked body{_more(is_single)}\nmarked[lazy]: {_UP_TO_MARK}"
        return self._grammar(f"{start}\n{text}\nTEXT: {_WITHOUT_MARK}", tools, is_single)

    def _grammar(self, start: str, tools: Sequence[CallableTool], is_single: bool) -> Grammar:
        field = "parameters" if self.name == "llama" else "arguments"
        names = [f"object_{place}" for place in range(len(tools))]
        rules = [start, *self._calls(is_single), f"object: {' | '.join(names)}"]
        for name, tool in zip(names, tools, strict=True):
            before = json.dumps(f'{{"name": "{tool.name}", "{field}": ')
            rules.append(f'{name}: {before} %json {tool.schema} "}}"')
        return Grammar("lark", "\n".join(rules))

    def _calls(self, is_single: bool) -> list[str]:
        if self.name == "llama":  # its template writes one call a message
            return ["calls: object"]
        if self.name == "mistral":
            more = "" if is_single else ' (", " object)*'
            return [f'calls: {self.begin} " "? "[" object{more} "]"']
        return [
            f"calls: call{_more(is_single)}",
            f"call: {self.begin} body",
            rf'body: "\n" object "\n" {self.end}',
        ]


_UP_TO_MARK = r"/(.|\n)*<tool_call>/"
_WITHOUT_MARK = r"/(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/"


def _more(is_single: bool) -> str:
    return "" if is_single else r' ("\n" call)*'


def find_format(processor: Any) -> ToolFormat | None:
    """The format of a model's tool calls; None: another one than those above.

    A template that shows no calls gets the most usual one, Hermes'.
    """
    template = ChatTemplate.of(processor)
    try:
        text = template(_TRIAL, tools=[_TRIAL_TOOL], options={})
    except Exception:  # a template may raise what it likes
        return None
    if _ARGUMENT not in text:
        return _format_of("hermes", get_tokenizer(processor))
    for name, pattern in _PATTERNS.items():
        if re.search(pattern, text):
            return _format_of(name, get_tokenizer(processor))
    return None


def _format_of(name: Any, tokenizer: Any) -> ToolFormat | None:
    if name == "llama":
        return ToolFormat(name)
    added = {str(t): (i, t.special) for i, t in tokenizer.added_tokens_decoder.items()}
    if name == "mistral":  # special or not, calls are found without it
        return ToolFormat(name, _mark("[TOOL_CALLS]", added))
    if any(added[mark][1] for mark in CALL_MARKS if mark in added):
        return None  # left out of the text of answers
    others = tuple(
        i for text, (i, special) in added.items() if not special and text not in CALL_MARKS
    )
    begin, end = (_mark(text, added) for text in CALL_MARKS)
    return ToolFormat(name, begin, end, others)


def _mark(text: str, added: Mapping[str, tuple[int, bool]]) -> str:
    """A mark as the one token that a tokenizer has for it, else as text."""
    return f"<[{added[text][0]}]>" if text in added else json.dumps(text)


def shown_tools(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of a request as the model is to see them: what is for the server left out."""
    return [
        {
            **tool,
            "function": {name: v for name, v in tool["function"].items() if name != "strict"},
        }
        for tool in given.get("tools", [])
    ]


def form_of(
    asked: ChatRequest, *, find_format: Callable[[], ToolFormat | None], matchers: Matchers
) -> tuple[Grammar | None, bool]:
    """The form that an answer must have; may take a while.

    Args:
        find_format: how the model writes calls.

    Returns:
        Its grammar (None: it may be any text), and whether calls have a mark: then what is JSON
        without one is no call.

    Raises:
        ApiError: it can't be had.
    """
    content = _content(asked, matchers)
    tools = asked.tools or [] if asked.tool_choice != "none" else []
    chosen = _chosen(asked, tools)
    is_strict = any(tool.function.strict for _, tool in chosen)
    if not tools or not (_is_forced(asked) or is_strict or content is not None):
        return content, False
    tool_format = _tool_format(asked, find_format())
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
    return grammar, tool_format.is_marked


def _content(asked: ChatRequest, matchers: Matchers) -> Grammar | None:
    form = asked.response_format
    if form is None or form.type == "text":
        return guided_form(asked, matchers)
    guided_form(asked, matchers, "response_format")
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


_GUIDED: dict[str, Callable[[Any], Grammar]] = {
    "json": lambda given: json_grammar(json.loads(given) if isinstance(given, str) else given),
    "regex": lambda text: Grammar("regex", text),
    "choice": lambda texts: Grammar("lark", "start: " + " | ".join(map(json.dumps, texts))),
}


def guided_form(asked: SamplingFields, matchers: Matchers, *others: str) -> Grammar | None:
    """The form of an answer as vLLM's fields say it; may take a while.

    Args:
        others: fields of the request that say a form, too.

    Raises:
        ApiError: it can't be kept to, or there are several.
    """
    inner = asked.structured_outputs
    forms = [(f"guided_{kind}", kind, getattr(asked, f"guided_{kind}")) for kind in _GUIDED]
    for kind, value in (inner.model_dump(by_alias=True) if inner else {}).items():
        forms.append((f"structured_outputs.{kind}", kind, value))
    forms = [one for one in forms if one[2] is not None]
    names = [*(name for name, _, _ in forms), *others]
    if not forms and inner is None:
        return None
    if not forms or len(names) > 1:
        raise bad_request(
            f"{' and '.join(names) or 'No form'} came; one form of the answer was expected.",
            param=forms[0][0] if forms else "structured_outputs",
        )
    param, kind, value = forms[0]
    try:
        grammar = _GUIDED[kind](value) if kind in _GUIDED else JSON_OBJECT
        matchers.check(grammar)
    except (UserError, ValueError, RecursionError) as error:
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


def _tool_format(asked: ChatRequest, found: ToolFormat | None) -> ToolFormat:
    """The format of the model's calls, if it serves what is asked for."""
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


@dataclass(frozen=True)
class FoundCall:
    """A call of a tool; `arguments` is JSON text, `id` has nine letters, as Mistral's must."""

    id: str
    name: str
    arguments: str


class ToolReader:
    """The text of an answer in which there may be calls, also while it is still being written.

    A call is told when it is whole. What only looks like one stays text.

    Args:
        names: of the tools that may be called; others' calls stay text. None: all is text.
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
        if not self.names:
            return [text] if text else []
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
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        check_value(arguments)  # half a surrogate pair fits into no answer
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    letters = "".join(secrets.choice(_LETTERS) for _ in range(9))
    return FoundCall(letters, value["name"], text)


def _overlap(text: str, mark: str) -> int:
    """How many letters at the end of a text may be the beginning of a mark."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if mark.startswith(text[-size:])), 0)
