"""The chat template of one processor, and the templates that have a name here.

What a template writes is followed in chat.py.
"""

import functools
import re
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta

from stageline.data.text.encode import TextEncoder
from stageline.data.text.messages import Tool
from stageline.data.text.processor import get_image_token, get_tokenizer
from stageline.data.text.tokenizers import any_of
from stageline.errors import UserError

Message = dict[str, Any]
# templates look for them, whether or not the tokenizer has them as tokens
_TAGS = ("<think>", "</think>")
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The chat template of a processor; use `ChatTemplate.of`, which keeps one for each.

    Attributes:
        layouts: where texts and answers stand in conversations of one structure (chat.py).
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
        self.layouts: dict[str, Any] = {}
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
        from transformers.utils.chat_template_utils import render_jinja_template

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
        from transformers.utils.chat_template_utils import _compile_jinja_template

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
        """(part, whether it is a tag)."""
        for index, part in enumerate(self._tag_pattern.split(text)):
            if part:
                yield part, index % 2 == 1

    @functools.cached_property
    def _risky(self) -> re.Pattern[str]:
        borders = {text[0] for text in self.reserved} | {text[-1] for text in self.reserved}
        return re.compile("[" + "".join(map(re.escape, sorted(borders))) + "]")

    def is_risky(self, text: str) -> bool:
        """It could be, or become with its neighbours, a special token."""
        # what is not ASCII might be made so by a tokenizer that normalizes
        return not text.isascii() or self._risky.search(text) is not None


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
            f"`prompt_fn.template` {template} came. One of {', '.join(_templates())} was expected: "
            "choose one, or put another as chat_template.jinja into the processor's folder."
        )
    lacks = _lacking(tokenizer, text)
    if lacks:
        raise UserError(
            f"`prompt_fn.template` {template} came, and the tokenizer has no {' '.join(lacks)}. "
            f"Choose one that fits ({', '.join(fitting_templates(tokenizer))}), or add them to the "
            "tokenizer as special tokens (its add_special_tokens) and give `vocab.resize`."
        )
    tokenizer.chat_template = processor.chat_template = text


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
