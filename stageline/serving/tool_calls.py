"""Calls of tools: their formats, grammars that enforce them, and reading them.

Models write calls as their chat templates showed them: `<tool_call>{...}</tool_call>` (Hermes,
Qwen), `[TOOL_CALLS] [{...}]` (Mistral; the first word is a special token and not in the text), or
one JSON object as the whole answer (Llama 3, which says `parameters`).
"""

import functools
import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stageline.data.rows.read_rows import check_value
from stageline.data.text.chat_template import ChatTemplate
from stageline.data.text.messages import CALL_MARKS
from stageline.data.text.processor import get_tokenizer
from stageline.errors import UserError
from stageline.inference.decoding.grammars import JSON_OBJECT, Grammar, Matchers, json_grammar
from stageline.serving.api_models import ChatRequest, NamedTool, SamplingFields
from stageline.serving.errors import bad_request

_NAME, _ARGUMENT = "name_of_a_tool", "name_of_an_argument"
_CALL = rf'\{{\s*"name":\s*"{_NAME}",\s*"FIELD":\s*\{{\s*"{_ARGUMENT}":\s*1\s*\}}'
_PATTERNS = {
    "hermes": rf"<tool_call>\s*{_CALL}\s*\}}\s*</tool_call>".replace("FIELD", "arguments"),
    "mistral": rf"\[TOOL_CALLS\]\s*\[\s*{_CALL}".replace("FIELD", "arguments"),
    "llama": rf"{_CALL}\s*\}}".replace("FIELD", "parameters"),
}
_TRIAL_FUNCTION = {"name": _NAME, "arguments": {_ARGUMENT: 1}}
# nine letters in the id, as Mistral's must have
_TRIAL_CALL = {"id": "call00000", "type": "function", "function": _TRIAL_FUNCTION}
_TRIAL: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "", "tool_calls": [_TRIAL_CALL]},
]
_TRIAL_SCHEMA = {"type": "object", "properties": {"other": {"type": "integer"}}}
_TRIAL_TOOL = {"name": _NAME, "description": "Nothing.", "parameters": _TRIAL_SCHEMA}

_OPEN, _CLOSE = CALL_MARKS
_LIST, _PYTHON = "[TOOL_CALLS]", "<|python_tag|>"
_STARTS = (_LIST, _PYTHON, '{"', "{ ", "{\n", '[{"', "[ {", "[{ ", "[{\n")
_LETTERS = string.ascii_letters + string.digits
_UP_TO_MARK = r"/(.|\n)*<tool_call>/"
_WITHOUT_MARK = r"/(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/"


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

    def grammar(
        self,
        tools: Sequence[tuple[str, str]],
        *,
        is_forced: bool,
        is_single: bool,
        schema: str | None = None,
    ) -> Grammar:
        """Return the grammar of one call or several.

        Args:
            tools: name of each and schema of its arguments, the text of its `json_grammar`.
            is_forced: nothing else may come; if not, the format is Hermes'.
            schema: JSON that may come instead; None: any text may come, or text and calls.
        """
        more = "" if is_single else r' ("\n" call)*'
        calls = [
            f"calls: call{more}",
            f"call: {self.begin} body",
            rf'body: "\n" object "\n" {self.end}',
        ]
        if self.name == "llama":  # its template writes one call a message
            calls = ["calls: object"]
        elif self.name == "mistral":
            more = "" if is_single else ' (", " object)*'
            calls = [f'calls: {self.begin} " "? "[" object{more} "]"']
        if is_forced:
            start = ["start: calls"]
        elif schema is not None:
            start = [f"start: calls | %json {schema}"]
        else:
            start = ["start: text | text calls"]
            if not self.begin.startswith("<["):  # one lexeme: no token begins where the mark does
                start = [f"start: text | marked body{more}", f"marked[lazy]: {_UP_TO_MARK}"]
            others = " | ".join(f"<[{token_id}]>" for token_id in self.others)
            start.append(f"text: (TEXT ({others}))* TEXT" if others else "text: TEXT")
            start.append(f"TEXT: {_WITHOUT_MARK}")
        names = [f"object_{place}" for place in range(len(tools))]
        rules = [*start, *calls, f"object: {' | '.join(names)}"]
        field = "parameters" if self.name == "llama" else "arguments"
        for rule, (name, arguments) in zip(names, tools, strict=True):
            before = json.dumps(f'{{"name": "{name}", "{field}": ')
            rules.append(f'{rule}: {before} %json {arguments} "}}"')
        return Grammar("lark", "\n".join(rules))


def find_format(processor: Any) -> ToolFormat | None:
    """Return the format of a model's tool calls; None: another one than those above.

    A template that shows no calls gets the most usual one, Hermes'.
    """
    tool = {"type": "function", "function": _TRIAL_TOOL}
    try:
        text = ChatTemplate.of(processor)(_TRIAL, tools=[tool], options={})
    except Exception:  # a template may raise what it likes
        return None
    name: Any = next((name for name, one in _PATTERNS.items() if re.search(one, text)), None)
    if name is None and _ARGUMENT in text:
        return None
    if name == "llama":
        return ToolFormat(name)
    decoder = get_tokenizer(processor).added_tokens_decoder
    added = {str(token): (number, token.special) for number, token in decoder.items()}

    def mark(text: str) -> str:
        """Return a mark as the one token that a tokenizer has for it, else as text."""
        return f"<[{added[text][0]}]>" if text in added else json.dumps(text)

    if name == "mistral":  # special or not, calls are found without it
        return ToolFormat(name, mark(_LIST))
    if any(added[text][1] for text in CALL_MARKS if text in added):
        return None  # left out of the text of answers
    others = [i for text, (i, special) in added.items() if not special and text not in CALL_MARKS]
    return ToolFormat("hermes", mark(_OPEN), mark(_CLOSE), tuple(others))


def shown_tools(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of a request as the model sees them, without what is for the server."""
    tools = given.get("tools", [])
    shown = [{k: v for k, v in tool["function"].items() if k != "strict"} for tool in tools]
    return [{**tool, "function": one} for tool, one in zip(tools, shown, strict=True)]


def form_of(
    asked: ChatRequest, *, find_format: Callable[[], ToolFormat | None], matchers: Matchers
) -> tuple[Grammar | None, bool]:
    """Return the form that an answer must have; may take a while.

    Args:
        find_format: returns the format in which the model writes calls.

    Returns:
        Its grammar (None: it may be any text), and whether calls have a mark: then JSON without
        one is not a call.
    """
    content, choice = guided_form(asked, matchers), asked.tool_choice
    tools = asked.tools or [] if choice != "none" else []
    name = choice.function.name if isinstance(choice, NamedTool) else None
    is_forced = choice == "required" or name is not None
    chosen = [(i, tool) for i, tool in enumerate(tools) if name in (None, tool.function.name)]
    if is_forced and not chosen:
        what = "a tool" if name is None else f"the tool {name!r}"
        message = f"tool_choice asks for {what}, and tools has none such. Add it to tools."
        raise bad_request(message, "tool_choice")
    is_strict = any(tool.function.strict for tool in tools)
    if not tools or not (is_forced or is_strict or content is not None):
        return content, False
    found = find_format()
    # calls and text can be told apart anywhere in an answer
    is_marked = found is not None and found.name == "hermes"
    if found is None or not (is_marked or is_forced):
        why = "plain JSON, which can't be told from other text"
        cure = "Set tool_choice to required, or leave strict and response_format out."
        if found is None:
            why = "a format of its own, which no grammar is made for here"
            cure = "Leave tool_choice at auto, strict and response_format out."
        raise bad_request(
            f"The model's chat template writes tool calls in {why}. {cure}",
            "tool_choice" if is_forced else "tools",
            "unsupported_parameter",
        )
    callables = []
    for place, tool in chosen:
        param = f"tools.{place}.function.parameters"
        schema, is_strict = tool.function.parameters, bool(tool.function.strict)
        if not (is_strict or is_forced):
            schema = {}  # it is not enforced
        elif schema is None:
            schema = {"properties": {}, "additionalProperties": False}
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            message = f"{param} has the type {json.dumps(kind)[:100]}; only object is taken."
            raise bad_request(message, param)
        make = functools.partial(json_grammar, {**schema, "type": "object"}, is_strict=is_strict)
        callables.append((tool.function.name, _checked(make, matchers, param).text))
    make = functools.partial(
        found.grammar,
        callables,
        is_forced=is_forced,
        is_single=asked.parallel_tool_calls is False or name is not None,
        schema=None if content is None else content.text,
    )
    return _checked(make, matchers, "tools"), is_marked


def _checked(make: Callable[[], Grammar], matchers: Matchers, param: str) -> Grammar:
    """Return a grammar that answers can be kept to, or raise an ApiError."""
    try:
        grammar = make()
        matchers.check(grammar)
        return grammar
    except (UserError, ValueError, RecursionError) as error:
        raise bad_request(f"{param}: {error}", param) from None


_GUIDED: dict[str, Callable[[Any], Grammar]] = {
    "json": lambda given: json_grammar(json.loads(given) if isinstance(given, str) else given),
    "regex": lambda text: Grammar("regex", text),
    "choice": lambda texts: Grammar("lark", "start: " + " | ".join(map(json.dumps, texts))),
    "json_object": lambda _: JSON_OBJECT,
}


def guided_form(asked: SamplingFields, matchers: Matchers) -> Grammar | None:
    """Return the form of an answer's text by OpenAI's or vLLM's fields, or raise an ApiError."""
    # name of the field, how its grammar is made
    forms: list[tuple[str, Callable[[], Grammar]]] = []
    inner = asked.structured_outputs
    fields = {f"guided_{kind}": (kind, getattr(asked, f"guided_{kind}", None)) for kind in _GUIDED}
    for kind, value in (inner.model_dump(by_alias=True) if inner else {}).items():
        fields[f"structured_outputs.{kind}"] = (kind, value)
    for field, (kind, value) in fields.items():
        if value is not None:
            forms.append((field, functools.partial(_GUIDED[kind], value)))
    form = asked.response_format if isinstance(asked, ChatRequest) else None
    if form is not None and form.type == "json_object":
        forms.append(("response_format", lambda: JSON_OBJECT))
    elif form is not None and form.type == "json_schema":
        given = form.json_schema
        schema = {"type": "object"} if given.schema_ is None else given.schema_
        make = functools.partial(json_grammar, schema, is_strict=bool(given.strict))
        forms.append(("response_format.json_schema.schema", make))
    if not forms and inner is None:
        return None
    if len(forms) != 1:
        names = " and ".join(field for field, _ in forms)
        message = f"{names or 'No form'} came. Give one form of the answer."
        raise bad_request(message, forms[0][0] if forms else "structured_outputs")
    return _checked(forms[0][1], matchers, forms[0][0])


@dataclass(frozen=True)
class FoundCall:
    """A call of a tool; `arguments` is JSON text, `id` has nine letters, as Mistral's must."""

    id: str
    name: str
    arguments: str


class ToolReader:
    """Reader of an answer that may contain calls, also while it is still being generated.

    A call is returned when it is whole. Text that only looks like one stays text.

    Args:
        names: of the tools that may be called; others' calls stay text. None: all is text.
        is_single: return only the first call.
        is_marked: calls stand only in <tool_call>; an answer that is JSON is text.

    Attributes:
        num_calls: number of calls returned.
    """

    def __init__(
        self, names: Iterable[str], *, is_single: bool = False, is_marked: bool = False
    ) -> None:
        self.names = frozenset(names)
        self.is_single = is_single
        self.is_marked = is_marked
        self.num_calls = 0
        self._held = ""
        self._is_begun = False  # text was returned, so the whole answer is not a call
        self._is_whole = False  # the answer began as JSON: it is returned at the end

    def add(self, text: str) -> list[str | FoundCall]:
        """Return what can be told after some more text."""
        if not self.names:
            return [text] if text else []
        self._held += text
        told: list[str | FoundCall] = []
        while not self._waits_for_more():
            place = self._held.find(_OPEN)
            if place < 0:
                return told + self._text(len(self._held) - _overlap(self._held, _OPEN))
            told += self._text(place, before_call=True)
            end = self._held.find(_CLOSE) + len(_CLOSE)
            if end < len(_CLOSE):
                return told
            calls = self._calls(self._held[len(_OPEN) : end - len(_CLOSE)])
            self._is_begun |= calls is None
            told += [self._held[:end]] if calls is None else calls
            self._held = self._held[end:]
        return told

    def finish(self) -> list[str | FoundCall]:
        """Return what is left at the end."""
        held, self._held = self._held, ""
        calls = self._calls(held.removeprefix(_OPEN))
        if calls is not None:
            return list(calls)
        return [held] if held and not (self.num_calls and not held.strip()) else []

    def _waits_for_more(self) -> bool:
        """Return whether the whole answer may be JSON of calls; note it when it begins so."""
        if self._is_begun or self.num_calls or self.is_marked:
            return self._is_whole
        text = self._held.lstrip()
        self._is_whole = self._is_whole or text.startswith(_STARTS)
        return self._is_whole or any(start.startswith(text) for start in (*_STARTS, _OPEN))

    def _text(self, end: int, *, before_call: bool = False) -> list[str | FoundCall]:
        """Return text up to there, without white space around calls, which is the template's."""
        text = self._held[:end]
        if not text.strip() and (self.num_calls or not self._is_begun):
            self._held = self._held[end if before_call else 0 :]
            return []
        self._held = self._held[end:]
        self._is_begun |= bool(text)
        return [text] if text else []

    def _calls(self, text: str) -> list[FoundCall] | None:
        """Return the calls of a text that are told; None: it is something else."""
        text = text.strip().removeprefix(_LIST).removeprefix(_PYTHON).strip()
        found = [_call_of(value, self.names) for value in _values(text)]
        calls = [call for call in found if call]
        if not calls or len(calls) < len(found):
            return None
        kept = calls[: max(0, 1 - self.num_calls)] if self.is_single else calls
        self.num_calls += len(kept)
        return kept


def _values(text: str) -> list[Any]:
    """Return JSON values that have `;` or nothing between them; of a list its members."""
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
    """Return how many letters at the end of a text may be the beginning of a mark."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if mark.startswith(text[-size:])), 0)
