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
    """The chat template of a processor; use `ChatTemplate.of`, which keeps one for each."""

    _known: "weakref.WeakKeyDictionary[Any, tuple[Any, ChatTemplate]]"
    _known = weakref.WeakKeyDictionary()

    def __init__(self, processor: Any) -> None:
        self.tokenizer = get_tokenizer(processor)
        kind = type(self.tokenizer).__name__
        self.name: str = getattr(self.tokenizer, "name_or_path", "") or kind
        self.template = template_of(processor)
        self.image_token = get_image_token(processor)
        self.reserved = TextEncoder.of(processor).reserved
        self.end_pattern = any_of(self.reserved)  # matches a special token
        edges = {text[0] for text in self.reserved} | {text[-1] for text in self.reserved}
        self._risky = any_of(edges) if edges else re.compile("(?!)")
        added = self.tokenizer.added_tokens_decoder.values()
        texts = {str(token) for token in added if not token.special} | set(_TAGS)
        tags = any_of(text for text in texts if text.strip() and text not in self.reserved)
        self._tag_pattern = re.compile(rf"(\s*{tags.pattern}\s*)")
        self.layouts: dict[str, Any] = {}  # where texts and answers are, by structure (chat.py)
        self.turn_ends: tuple[str, ...] | None = None  # chat.py sets them when it needs them
        self.num_renders = 0
        written = self.template if isinstance(self.template, str) else ""  # else several by name
        self.has_markers = bool(_MARKERS.search(written))  # {% generation %} around answers
        self.knows_tools = not written or "tools" in written
        if not self.template:
            raise UserError(
                f"`prompt_fn` chat needs a chat template, and the tokenizer {self.name!r} has "
                "none. Name one, `prompt_fn.template` "
                f"{' or '.join(fitting_templates(self.tokenizer))}, put a chat_template.jinja "
                "into the processor's folder, or use `prompt_fn` fill."
            )

    @classmethod
    def of(cls, processor: Any) -> "ChatTemplate":
        """Return that of this processor; a new one when template or tokens have changed."""
        state = (template_of(processor), len(get_tokenizer(processor)))
        known = cls._known.get(processor)
        if known is None or known[0] != state:
            known = (state, cls(processor))
            cls._known[processor] = known
        return known[1]

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        options: dict[str, Any],
        for_generation: bool = False,
    ) -> str:
        """Return the text of a conversation, as transformers makes it."""
        self.num_renders += 1
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            chat_template=self.template if isinstance(self.template, str) else None,
            tokenize=False,
            add_generation_prompt=for_generation,
            **options,
        )

    def marked_spans(
        self, messages: Sequence[Message], *, tools: Sequence[Tool], options: dict[str, Any]
    ) -> list[tuple[int, int]]:
        """Return the spans that the template marks as the assistant's text, in characters."""
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
        """The names that the template may read and does not set, without jinja's own."""
        if not isinstance(self.template, str):
            return frozenset()
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            environment = _compile_jinja_template(self.template).environment
            found = meta.find_undeclared_variables(environment.parse(self.template))
        except TemplateError:
            return frozenset()
        return frozenset(found) - environment.globals.keys()

    def cut_at_tags(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield (part, whether it is a tag such as <think>, which templates look for)."""
        parts = self._tag_pattern.split(text) if "<" in text else [text]
        for index, part in enumerate(parts):
            if part or len(parts) == 1:
                yield part, index % 2 == 1

    def is_risky(self, text: str) -> bool:
        """Whether a text may become a special token, with its neighbours or by a normalizer."""
        return not text.isascii() or self._risky.search(text) is not None


def template_of(processor: Any) -> Any:
    """Return the chat template of a processor; None: it has none."""
    return getattr(processor, "chat_template", None) or get_tokenizer(processor).chat_template


@functools.cache
def _templates() -> dict[str, str]:
    """Return the named chat templates; the first line of each lists the tokens that it needs."""
    files = Path(__file__).with_name("templates").glob("*.jinja")
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(files)}


def _lacking(tokenizer: Any, template: str) -> list[str]:
    """Return the tokens that a named template needs and a tokenizer has not."""
    needed = template.partition("needs:")[2].partition("-#}")[0].split()
    known = tokenizer.get_vocab() if needed else {}
    return [token for token in needed if token not in known]


def fitting_templates(tokenizer: Any) -> list[str]:
    """Return the names of the templates whose tokens a tokenizer has."""
    return [name for name, text in _templates().items() if not _lacking(tokenizer, text)]


def use_template(processor: Any, *, template: str | None = None, **others: Any) -> None:
    """Give a processor the chat template of that name; saved with it, it stays."""
    if template is None:
        return
    tokenizer = get_tokenizer(processor)
    text = _templates().get(template)
    if text is None:
        raise UserError(
            f"`prompt_fn.template` {template} is not known. Choose one of "
            f"{', '.join(_templates())}, or put another as chat_template.jinja into the folder."
        )
    if template_of(processor) == text:
        return
    lacks = _lacking(tokenizer, text)
    if lacks:
        raise UserError(
            f"for `prompt_fn.template` {template} the tokenizer has no {' '.join(lacks)}. "
            f"Choose one that fits ({', '.join(fitting_templates(tokenizer))}), or add them to the "
            "tokenizer as special tokens (its add_special_tokens) and give `vocab.resize`."
        )
    tokenizer.chat_template = processor.chat_template = text


def strings_in(value: Any) -> Iterator[str]:
    """Yield all texts in a value of JSON, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings_in([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)
