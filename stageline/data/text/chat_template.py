"""Runs the chat template of one processor, also on messages whose texts are hidden from it.

Private sentinels stand in place of their texts, so that a template shows where they go. Hidden are
all contents, reasoning, names and texts of tool calls, and whatever else could become a special
token. Empty texts stay: templates ask whether there is one.
"""

import functools
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError, meta
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,
    render_jinja_template,
)

from stageline.data.text.encode import TextEncoder
from stageline.data.text.messages import Tool, Turn
from stageline.data.text.processor import get_image_token, get_tokenizer
from stageline.data.text.rendered import Piece
from stageline.data.text.tokenizers import any_of
from stageline.errors import DataError, UserError

LEFT_OUT = "it leaves out or changes"  # so begins a reason

Message = dict[str, Any]
Form = Literal["text", "list"]
Part = Literal["content", "reasoning", "call", "other"]
Cut = Callable[[str], Iterable[tuple[str, bool]]]
OPEN, CLOSE = "\ue000", "\ue001"
TOOLS = -1  # in place of the number of a turn
# templates look for them, whether or not the tokenizer has them as tokens
_TAGS = ("<think>", "</think>")
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MOST_LAYOUTS = 256


class ChatTemplate:
    """The chat template of a processor; use `ChatTemplate.of`, which keeps one for each.

    Attributes:
        layouts: what was found out of conversations of one structure, the last ones used.
        turn_ends: the tokens that end its answers; None until somebody asks (chat.py).
        num_renders: how often the template ran.

    Raises:
        UserError: there is none.
    """

    _known: "weakref.WeakKeyDictionary[Any, tuple[Any, ChatTemplate]]"
    _known = weakref.WeakKeyDictionary()

    def __init__(self, processor: Any) -> None:
        self.tokenizer = get_tokenizer(processor)
        self.template = template_of(processor)
        self.image_token = get_image_token(processor)
        self.reserved = TextEncoder.of(processor).reserved
        self.layouts: OrderedDict[str, Any] = OrderedDict()
        self.turn_ends: tuple[str, ...] | None = None
        self.num_renders = 0
        if not self.template:
            raise UserError(
                f"`prompt_fn` chat needs a chat template, and the tokenizer {self.name!r} has "
                "none. It says how the model writes turns: name one, `prompt_fn.template` "
                f"{' or '.join(fitting_templates(self.tokenizer))}, put a chat_template.jinja "
                "into the processor's folder, or use `prompt_fn` fill with a plain template."
            )

    @classmethod
    def of(cls, processor: Any) -> "ChatTemplate":
        """That of this processor; a new one when the template changed or tokens were added."""
        state = (template_of(processor), len(get_tokenizer(processor)))
        known = cls._known.get(processor)
        if known is None or known[0] != state:
            known = (state, cls(processor))
            cls._known[processor] = known
        return known[1]

    @property
    def name(self) -> str:
        """Where the tokenizer came from."""
        return getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        options: dict[str, Any],
        for_generation: bool = False,
    ) -> str:
        """The text of a conversation, as the library makes it."""
        self.num_renders += 1
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            chat_template=self.template if isinstance(self.template, str) else None,
            tokenize=False,
            add_generation_prompt=for_generation,
            **options,
        )

    @property
    def has_markers(self) -> bool:
        """It marks what the assistant writes with {% generation %}."""
        return isinstance(self.template, str) and bool(_MARKERS.search(self.template))

    @property
    def knows_tools(self) -> bool:
        """It reads the variable `tools`."""
        return not isinstance(self.template, str) or "tools" in self.template

    def marked_spans(
        self, messages: Sequence[Message], *, tools: Sequence[Tool], options: dict[str, Any]
    ) -> list[tuple[int, int]]:
        """Where the template marks what the assistant writes, in characters."""
        # annotated as text, it returns texts and spans
        rendered: Any = render_jinja_template(
            conversations=[list(messages)],
            tools=list(tools) or None,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **options},
        )
        return list(rendered[1][0])

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names that it may read and does not set, but those that jinja itself knows."""
        if not isinstance(self.template, str):
            return frozenset()
        try:
            environment = _compile_jinja_template(self.template).environment
            found = meta.find_undeclared_variables(environment.parse(self.template))
        except TemplateError:
            return frozenset()
        return frozenset(found) - environment.globals.keys()

    @functools.cached_property
    def end_pattern(self) -> re.Pattern[str]:
        """Matches a special token."""
        return any_of(self.reserved)

    @functools.cached_property
    def _tag_pattern(self) -> re.Pattern[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        texts = {str(token) for token in added if not token.special} | set(_TAGS)
        tags = [text for text in texts if text.strip() and text not in self.reserved]
        return re.compile(rf"(\s*{any_of(tags).pattern}\s*)")

    def has_tags(self, text: str) -> bool:
        """It holds text such as <think>, which templates look for."""
        return "<" in text and self._tag_pattern.search(text) is not None

    def cut_at_tags(self, text: str) -> Iterator[tuple[str, bool]]:
        """(part, whether it may be hidden from the template): tags stay visible."""
        for index, part in enumerate(self._tag_pattern.split(text)):
            if part:
                yield part, index % 2 == 0

    @functools.cached_property
    def _risky(self) -> re.Pattern[str]:
        borders = {text[0] for text in self.reserved} | {text[-1] for text in self.reserved}
        return re.compile("[" + "".join(map(re.escape, sorted(borders))) + "]")

    def is_risky(self, text: str) -> bool:
        """It could be, or become with its neighbours, a special token."""
        # what is not ASCII might be made so by a tokenizer that normalizes
        return not text.isascii() or self._risky.search(text) is not None

    def keep_layout(self, key: str, layout: Any) -> None:
        """Keeps what was found out; the one not used for longest makes room."""
        self.layouts[key] = layout
        self.layouts.move_to_end(key)
        while len(self.layouts) > _MOST_LAYOUTS:
            self.layouts.popitem(last=False)


def not_followed(name: str, reasons: Sequence[str], *, source: str) -> UserError:
    """What a conversation gets that a template refuses, or writes in no way that is understood.

    Args:
        source: the row, by its file and line; empty: nobody wrote it into a file.
    """
    # what begins so may only say that the template takes contents in the other form
    others = [reason for reason in reasons if not reason.startswith(LEFT_OUT)] or reasons
    refused = next((one for one in others if one.startswith("TemplateError: ")), None)
    if refused and source:  # by its raise_exception
        return DataError(
            f"{source}: the chat template of {name} refuses the conversation: "
            f"{refused.partition(': ')[2]}. Messages as the template wants them were expected, "
            "because it writes each role in its own way: correct the row, or use another template."
        )
    return UserError(
        f"the chat template of {name} cannot be followed{source and f' in {source}'}: "
        f"{'; '.join(dict.fromkeys(others))}. A "
        "template that puts each content, whole or trimmed, into its text was expected, and "
        "answers that begin where its prompt for generation ends, because otherwise it isn't "
        "known which tokens are the answer: use another chat template (a chat_template.jinja in "
        "the folder of `processor_path`), other `prompt_fn.template_options` (enable_thinking "
        "...), rows without what it does not write, or a plain template (`prompt_fn` fill)."
    )


def template_of(processor: Any) -> Any:
    """Its chat template; None: it has none."""
    return getattr(processor, "chat_template", None) or get_tokenizer(processor).chat_template


@functools.cache
def _templates() -> dict[str, str]:
    """The chat templates that have a name here; the first line of each says what it needs."""
    files = Path(__file__).with_name("templates").glob("*.jinja")
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(files)}


def _lacking(tokenizer: Any, template: str) -> list[str]:
    """The tokens that a template of ours needs and a tokenizer has not."""
    needed = template.partition("needs:")[2].partition("-#}")[0].split()
    known = tokenizer.get_vocab() if needed else {}
    return [token for token in needed if token not in known]


def fitting_templates(tokenizer: Any) -> list[str]:
    """The names of the templates whose tokens a tokenizer has."""
    return [name for name, text in _templates().items() if not _lacking(tokenizer, text)]


def use_template(processor: Any, *, template: str | None = None, **others: Any) -> None:
    """Gives a processor the chat template of that name; saved with it, it stays.

    Raises:
        UserError: there is none of that name, or the tokenizer has not the tokens that it needs.
    """
    if template is None:
        return
    tokenizer = get_tokenizer(processor)
    text = _templates().get(template)
    if text is not None and template_of(processor) == text:
        return
    if text is None:
        raise UserError(
            f"`prompt_fn.template` {template} came. One of {', '.join(_templates())} was expected, "
            "because those are written here: choose one, or put another as chat_template.jinja "
            "into the processor's folder."
        )
    lacks = _lacking(tokenizer, text)
    if lacks:
        raise UserError(
            f"`prompt_fn.template` {template} came, and the tokenizer has no {' '.join(lacks)}. "
            "Tokens of their own were expected, because the template marks turns with them: choose "
            f"one that fits ({', '.join(fitting_templates(tokenizer))}), or add them to the "
            "tokenizer as special tokens (its add_special_tokens) and give `vocab.resize`."
        )
    tokenizer.chat_template = processor.chat_template = text


@dataclass(frozen=True)
class TextSlot:
    """A hidden text: of which turn, and which part of it."""

    turn: int
    part: Part
    text: str
    is_image: bool = False
    is_answer: bool = False


def whole(text: str) -> Iterator[tuple[str, bool]]:
    """A text hidden as one."""
    yield text, True


def messages_of(turns: Sequence[Turn], *, form: Form) -> list[Message]:
    """The messages as they are, with contents as text or as lists of parts."""
    return [_message(turn, _content(turn.pieces, form)) for turn in turns]


class Masking:
    """The messages and tools of one conversation with hidden texts.

    Attributes:
        messages, tools: what the template gets.
        slots: by the number of the sentinel.
        nonce: what no text of the conversation begins a sentinel with.
    """

    def __init__(
        self,
        template: ChatTemplate,
        turns: Sequence[Turn],
        tools: Sequence[Tool],
        *,
        form: Form,
        cut: Cut,
    ) -> None:
        self._template = template
        self.form = form
        self._cut = cut
        self.slots: list[TextSlot] = []
        self.nonce = "s"
        texts = [text for turn in turns for text in _texts(turn)] + list(strings_in(list(tools)))
        while any(OPEN + self.nonce in text for text in texts if OPEN in text):
            self.nonce += "s"
        self.messages = [self._masked(number, turn) for number, turn in enumerate(turns)]
        self.tools = [self._tree(TOOLS, "other", tool, is_open=True) for tool in tools]

    def _hide(self, turn: int, part: Part, text: str, **kind: bool) -> str:
        self.slots.append(TextSlot(turn, part, text, **kind))
        return f"{OPEN}{self.nonce}{len(self.slots) - 1}{CLOSE}"

    def _masked(self, number: int, turn: Turn) -> Message:
        message = _message(turn, _content(list(self._pieces(number, turn)), self.form))
        for name in ("name", "tool_call_id"):
            if name in message and self._template.is_risky(message[name]):
                message[name] = self._hide(number, "other", message[name])
        if turn.reasoning.strip():
            message["reasoning_content"] = self._hide(number, "reasoning", turn.reasoning)
        if turn.tool_calls:
            message["tool_calls"] = [self._call(number, call) for call in turn.tool_calls]
        return message

    def _pieces(self, number: int, turn: Turn) -> Iterator[Piece]:
        """The turn's pieces with sentinels in place of text from the data."""
        is_all = turn.is_target and not turn.tool_calls and not turn.reasoning
        for piece in turn.pieces:
            if piece.is_image and self.form == "text":
                yield Piece(self._hide(number, "content", "", is_image=True), is_image=True)
            elif piece.is_image or not piece.is_user:
                yield piece
            elif not piece.text.strip() and not (is_all and len(turn.pieces) == 1):
                yield piece
            else:
                for text, may_hide in self._cut(piece.text):
                    kind = {"is_answer": piece.is_answer}
                    yield Piece(self._hide(number, "content", text, **kind) if may_hide else text)

    def _call(self, number: int, call: Tool) -> Tool:
        function = call["function"]
        masked = {**call, "function": {**function}}
        masked["function"]["name"] = self._hide(number, "call", function["name"])
        masked["function"]["arguments"] = self._tree(number, "call", function["arguments"])
        if "id" in call and self._template.is_risky(call["id"]):
            masked["id"] = self._hide(number, "call", call["id"])
        return masked

    def _tree(self, number: int, part: Part, value: Any, *, is_open: bool = False) -> Any:
        """A value of JSON with hidden texts.

        Args:
            is_open: texts that cannot become a special token stay: templates read types in tools.
        """
        if isinstance(value, str):
            hides = self._template.is_risky(value) if is_open else bool(value.strip())
            return self._hide(number, part, value) if hides else value
        if isinstance(value, dict):
            return {
                self._tree(number, part, key, is_open=True): self._tree(
                    number, part, item, is_open=is_open
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._tree(number, part, item, is_open=is_open) for item in value]
        return value


def _message(turn: Turn, content: Any) -> Message:
    message: Message = {"role": turn.role, "content": content}
    optional = {
        "name": turn.name,
        "reasoning_content": turn.reasoning,
        "tool_calls": list(turn.tool_calls),
        "tool_call_id": turn.tool_call_id,
    }
    return {**message, **{name: value for name, value in optional.items() if value}}


def _content(pieces: Sequence[Piece], form: Form) -> Any:
    if form == "text":
        return "".join(piece.text for piece in pieces)
    content: list[dict[str, str]] = []
    for piece in pieces:
        if piece.is_image:
            content.append({"type": "image"})
        elif content and content[-1]["type"] == "text":
            content[-1]["text"] += piece.text
        else:
            content.append({"type": "text", "text": piece.text})
    return content


def _texts(turn: Turn) -> Iterator[str]:
    yield from (piece.text for piece in turn.pieces)
    yield turn.reasoning
    yield from strings_in(list(turn.tool_calls))


def strings_in(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)
