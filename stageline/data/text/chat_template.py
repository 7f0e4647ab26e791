"""Runs the chat template of one processor, and knows which texts it must not see in the open."""

import functools
import re
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from stageline.data.text.encode import TextEncoder
from stageline.data.text.messages import Tool
from stageline.data.text.processor import get_image_token, get_tokenizer
from stageline.data.text.template_trial import check_template
from stageline.errors import UserError

Message = dict[str, Any]
# templates look for them, whether or not the tokenizer has them as tokens
_TAGS = ("<think>", "</think>")
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MOST_LAYOUTS = 256


class ChatTemplate:
    """The chat template of a processor; use `ChatTemplate.of`, which keeps one for each.

    Attributes:
        layouts: what was found out of conversations of one structure, the last ones used.
        num_renders: how often the template ran.

    Raises:
        UserError: there is none.
        CheckpointError: it takes too long, too much memory, or tries to break out.
    """

    _known: "weakref.WeakKeyDictionary[Any, tuple[Any, ChatTemplate]]"
    _known = weakref.WeakKeyDictionary()

    def __init__(self, processor: Any) -> None:
        self.tokenizer = get_tokenizer(processor)
        self.template = _template_of(processor)
        self.image_token = get_image_token(processor)
        self.reserved = TextEncoder.of(processor).reserved
        self.layouts: OrderedDict[str, Any] = OrderedDict()
        self.num_renders = 0
        if not self.template:
            raise UserError(
                f"`prompt_fn` chat needs a chat template, and the tokenizer {self.name!r} has "
                "none. It says how the model writes turns: use `prompt_fn` fill with a plain "
                "template, or put a chat_template.jinja into the processor's folder."
            )
        check_template(self.template, source=self.name)

    @classmethod
    def of(cls, processor: Any) -> "ChatTemplate":
        """That of this processor; a new one when the template changed or tokens were added."""
        state = (_template_of(processor), len(get_tokenizer(processor)))
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
    def end_pattern(self) -> re.Pattern[str]:
        """Matches a special token."""
        return _any_of(self.reserved)

    @functools.cached_property
    def _tag_pattern(self) -> re.Pattern[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        texts = {str(token) for token in added if not token.special} | set(_TAGS)
        tags = [text for text in texts if text.strip() and text not in self.reserved]
        return re.compile(rf"(\s*{_any_of(tags).pattern}\s*)")

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


def _template_of(processor: Any) -> Any:
    return getattr(processor, "chat_template", None) or get_tokenizer(processor).chat_template


def _any_of(texts: Any) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("(?:" + "|".join(map(re.escape, longest_first)) + ")")
