"""How a model writes tool calls, found out from its chat template; grammars that make it do so.

The calls are those that `tool_reading` reads.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stageline.data.text.chat_template import ChatTemplate
from stageline.data.text.processor import get_tokenizer
from stageline.inference.decoding.grammars import Grammar

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


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called.

    Attributes:
        schema: of its arguments, as `json_text` makes it.
    """

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
    marks = ("<tool_call>", "</tool_call>")
    if any(added[mark][1] for mark in marks if mark in added):
        return None  # left out of the text of answers
    others = tuple(i for text, (i, special) in added.items() if not special and text not in marks)
    begin, end = (_mark(text, added) for text in marks)
    return ToolFormat(name, begin, end, others)


def _mark(text: str, added: Mapping[str, tuple[int, bool]]) -> str:
    """A mark as the one token that a tokenizer has for it, else as text."""
    return f"<[{added[text][0]}]>" if text in added else json.dumps(text)
