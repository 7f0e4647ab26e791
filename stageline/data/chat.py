"""Renders turns with the model's own chat template, and still knows what every character is.

The template runs on private sentinels in place of the contents; these are then replaced by the
contents, one for one. So nothing in the data can be taken for markup, and nothing is searched for
in it. The outcome is compared with the template run on the contents themselves.

What the sentinels show depends on the structure of a conversation alone, and is kept: a further
sample of the same structure costs one render, of its official text.
"""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stageline.data.chat_filling import fill
from stageline.data.chat_layout import LEFT_OUT, Layout, LayoutMaker, Learnt
from stageline.data.chat_masking import (
    Cut,
    Form,
    Masking,
    messages_of,
    whole,
    with_arguments_as_text,
)
from stageline.data.chat_template import ChatTemplate
from stageline.data.messages import Turn
from stageline.data.rendered import Rendered
from stageline.data.tool_calls import Tool
from stageline.errors import UserError

_has_warned: set[tuple[str, str]] = set()


def render_chat(
    turns: Sequence[Turn],
    processor: Any,
    *,
    for_generation: bool = False,
    template_options: dict[str, Any] | None = None,
    tools: Sequence[Tool] = (),
    learnt: Learnt = "answers",
) -> Rendered:
    """The conversation as the model's chat template writes it.

    Supervised is what the model has to write in target turns: all between the prompt for
    generation and the end-of-turn token, and that token. Where the template has none after the
    last answer, the tokenizer's end-of-sequence token is added: the model could not learn to stop
    otherwise. A template with {% generation %} marks says itself what is supervised.

    Args:
        for_generation: end with what the template puts before an answer.
        template_options: variables of the template, such as enable_thinking.
        tools: descriptions of tools, for the template.
        learnt: the answers; or everything but images, with the system message or without.

    Raises:
        UserError: there is no chat template, or it changes contents in a way that can't be
            followed.
        CheckpointError: the template takes too long, too much memory, or tries to break out.
    """
    template = ChatTemplate.of(processor)
    reasons: list[str] = []
    ways = [turns]
    if any(turn.tool_calls for turn in turns):
        ways.append(with_arguments_as_text(turns))
    for way in ways:
        run = _Run(template, way, tools, dict(template_options or {}), for_generation, learnt)
        for form, cut in run.ways():
            result = run.attempt(form, cut)
            if isinstance(result, Rendered):
                return result
            reasons.append(result)
    raise UserError(
        f"the chat template of {template.name} cannot be followed: {_telling(reasons)}. A "
        "template that puts each content, whole or trimmed, into its text was expected, and "
        "answers that begin where its prompt for generation ends, because otherwise it isn't "
        "known which tokens are the answer: use another chat template (a chat_template.jinja in "
        "the folder of --processor-path), other --prompt-fn.template_options (enable_thinking "
        "...), rows without what it does not write, or a plain template (--prompt-fn fill)."
    )


@dataclass(frozen=True)
class _Run:
    """One conversation that is to be rendered."""

    template: ChatTemplate
    turns: Sequence[Turn]
    tools: Sequence[Tool]
    options: dict[str, Any]
    for_generation: bool
    learnt: Learnt

    def ways(self) -> Iterator[tuple[Form, Cut]]:
        """Contents as text or as lists of parts, hidden whole or without tags such as <think>."""
        has_images = any(piece.is_image for turn in self.turns for piece in turn.pieces)
        forms: tuple[Form, ...] = ("list", "text") if has_images else ("text", "list")
        has_tags = any(
            self.template.has_tags(piece.text) for turn in self.turns for piece in turn.pieces
        )
        cuts = (self.template.cut_at_tags, whole) if has_tags else (whole,)
        return itertools.product(forms, cuts)

    def attempt(self, form: Form, cut: Cut) -> Rendered | str:
        """The rendered conversation, or why this way does not work."""
        masking = Masking(self.template, self.turns, self.tools, form=form, cut=cut)
        try:
            official = self.template(
                messages_of(self.turns, form=form), tools=self.tools, **self._common()
            )
            layout, is_new = self._layout(masking)
            pieces = None if layout.problem else fill(layout, masking.slots, official)
            if pieces is None and not is_new:  # the template may have written the date
                layout, is_new = self._layout(masking, known=layout)
                if is_new and not layout.problem:
                    pieces = fill(layout, masking.slots, official)
        except Exception as error:  # templates raise what they like
            return f"{type(error).__name__}: {error}"
        if pieces is None:
            return layout.problem or "it changes contents"
        for note in layout.notes:
            _warn_once(self.template.name, note)
        return Rendered(tuple(pieces), is_chat=True, for_generation=self.for_generation)

    def _common(self) -> dict[str, Any]:
        return {"options": self.options, "for_generation": self.for_generation}

    def _layout(self, masking: Masking, known: Layout | None = None) -> tuple[Layout, bool]:
        """The layout of the structure, and whether it was made just now.

        Args:
            known: one that did not fit; if the template writes the same still, it stays.
        """
        targets = [turn.is_target for turn in self.turns]
        structure = (masking.messages, masking.tools, targets, self.learnt, *self._common().items())
        key = repr((masking.form, structure))
        kept = self.template.layouts.get(key)
        if kept is not None and known is None:
            self.template.keep_layout(key, kept)
            return kept, False
        masked = self.template(masking.messages, tools=masking.tools, **self._common())
        if known is not None and known.masked == masked:
            return known, False
        maker = LayoutMaker(
            self.template, self.turns, masking, self.options, self.for_generation, self.learnt
        )
        layout = maker.make(masked)
        self.template.keep_layout(key, layout)
        return layout, True


def _telling(reasons: list[str]) -> str:
    """Without what only says that the template takes contents in the other form."""
    others = [reason for reason in reasons if not reason.startswith(LEFT_OUT)]
    return "; ".join(dict.fromkeys(others or reasons))


def _warn_once(name: str, note: str) -> None:
    if (name, note) not in _has_warned:
        _has_warned.add((name, note))
        warnings.warn(f"the chat template of {name}: {note}.", stacklevel=4)
