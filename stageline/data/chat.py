"""Renders turns with the model's own chat template, and still knows what every character is.

The template runs on private sentinels in place of the contents; these are then replaced by the
contents, one for one. So nothing in the data can be taken for markup, and nothing is searched for
in it. The outcome is compared with the template run on the contents themselves.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from stageline.data.encode import TextEncoder
from stageline.data.messages import Turn
from stageline.data.processor import get_image_token, get_tokenizer
from stageline.data.rendered import Piece, Rendered
from stageline.data.template_trial import check_template
from stageline.errors import UserError

_Form = Literal["text", "list"]
_OPEN, _CLOSE = "\ue000", "\ue001"


def render_chat(
    turns: Sequence[Turn],
    processor: Any,
    *,
    for_generation: bool = False,
    template_options: dict[str, Any] | None = None,
) -> Rendered:
    """The conversation as the model's chat template writes it.

    Supervised are the contents of target turns and the special token after each. Where the
    template has none after the last answer, the tokenizer's end-of-sequence token is added: the
    model could not learn to stop otherwise.

    Args:
        for_generation: end with what the template puts before an answer.
        template_options: variables of the template, such as enable_thinking.

    Raises:
        UserError: there is no chat template, or it changes contents in a way that can't be
            followed.
        CheckpointError: the template takes too long, too much memory, or tries to break out.
    """
    writer = _Writer(processor, for_generation=for_generation, options=dict(template_options or {}))
    has_images = any(piece.is_image for turn in turns for piece in turn.pieces)
    forms: tuple[_Form, ...] = ("list", "text") if has_images else ("text", "list")
    reasons: list[str] = []
    for form, cut in itertools.product(forms, (_whole, _stripped, writer.cut_at_tags)):
        result = _Attempt(writer, turns, form=form, cut=cut).run()
        if isinstance(result, Rendered):
            return result
        reasons.append(result)
    raise UserError(
        "the chat template cannot be followed: "
        f"{'; '.join(dict.fromkeys(reasons))}. A template that puts each content, whole or "
        "trimmed, into its text was expected, because otherwise it isn't known which tokens are "
        "the answer: use a plain template (--prompt-fn fill) or another chat template."
    )


class _Writer:
    """Runs the chat template of one processor."""

    def __init__(self, processor: Any, *, for_generation: bool, options: dict[str, Any]) -> None:
        self.processor = processor
        self.tokenizer = get_tokenizer(processor)
        self.template = getattr(processor, "chat_template", None) or self.tokenizer.chat_template
        self.for_generation = for_generation
        self.options = options
        if not self.template:
            raise UserError(
                f"--prompt-fn chat needs a chat template, and the tokenizer "
                f"{getattr(self.tokenizer, 'name_or_path', '')!r} has none. It says how the model "
                "writes turns: use --prompt-fn fill with a plain template, or put a "
                "chat_template.jinja into the processor's folder."
            )
        check_template(self.template, source=getattr(self.tokenizer, "name_or_path", ""))

    def __call__(self, messages: list[dict[str, Any]]) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            chat_template=self.template if isinstance(self.template, str) else None,
            tokenize=False,
            add_generation_prompt=self.for_generation,
            **self.options,
        )

    @property
    def end_pattern(self) -> re.Pattern[str]:
        """Matches a special token right after an answer."""
        reserved = sorted(TextEncoder.of(self.processor).reserved, key=len, reverse=True)
        return re.compile(r"\s*(?:" + "|".join(map(re.escape, reserved)) + ")")

    def cut_at_tags(self, text: str) -> list[tuple[str, bool]]:
        """(part, whether it is hidden from the template): tags such as <think> stay visible.

        Templates look for them; they are added tokens that are no special tokens.
        """
        added = self.tokenizer.added_tokens_decoder.values()
        reserved = TextEncoder.of(self.processor).reserved
        texts = [str(token) for token in added if not token.special]
        tags = [text for text in texts if text.strip() and text not in reserved]
        if not tags:
            return _stripped(text)
        pattern = r"(\s*(?:" + "|".join(map(re.escape, tags)) + r")\s*)"
        parts = re.split(pattern, text.strip())
        return [(part, index % 2 == 0) for index, part in enumerate(parts) if part]


def _whole(text: str) -> list[tuple[str, bool]]:
    return [(text, True)]


def _stripped(text: str) -> list[tuple[str, bool]]:
    return [(text.strip(), True)]


class _Attempt:
    """One try: contents as text or as lists of parts, cut in one way."""

    def __init__(
        self,
        writer: _Writer,
        turns: Sequence[Turn],
        *,
        form: _Form,
        cut: Callable[[str], list[tuple[str, bool]]],
    ) -> None:
        self.writer = writer
        self.turns = turns
        self.form = form
        self.cut = cut
        self.hidden: list[tuple[int, Piece]] = []  # (turn, content piece) by number of sentinel
        self.visible_start: dict[int, str] = {}  # target turn -> visible text that it begins with
        texts = [piece.text for turn in turns for piece in turn.pieces]
        self.nonce = "s"
        while any(_OPEN + self.nonce in text for text in texts):
            self.nonce += "s"

    def run(self) -> Rendered | str:
        """The rendered conversation, or why this way does not work."""
        try:
            official = self.writer([self._message(turn, turn.pieces) for turn in self.turns])
            masked = self.writer(
                [
                    self._message(turn, self._mask(number, turn))
                    for number, turn in enumerate(self.turns)
                ]
            )
        except Exception as error:  # templates raise what they like
            return f"{type(error).__name__}: {error}"
        pieces = list(self._substitute(masked))
        expected = sum(piece.is_image for turn in self.turns for piece in turn.pieces)
        if sum(piece.is_image for _, piece in pieces) != expected:
            return f"it does not write {expected} images"
        if "".join(piece.text for _, piece in pieces) != official:
            return "it changes contents"
        missing = set(self._target_turns()) - {number for number, _ in pieces}
        if missing:
            return f"it leaves out answer {min(missing)}"
        return Rendered(
            tuple(self._mark_targets(pieces)),
            is_chat=True,
            for_generation=self.writer.for_generation,
        )

    def _target_turns(self) -> list[int]:
        return [number for number, turn in enumerate(self.turns) if turn.is_target]

    def _message(self, turn: Turn, pieces: Sequence[Piece]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role}
        if turn.name:
            message["name"] = turn.name
        if self.form == "text":
            message["content"] = "".join(piece.text for piece in pieces)
            return message
        content: list[dict[str, str]] = []
        for piece in pieces:
            if piece.is_image:
                content.append({"type": "image"})
            elif content and content[-1]["type"] == "text":
                content[-1]["text"] += piece.text
            else:
                content.append({"type": "text", "text": piece.text})
        message["content"] = content
        return message

    def _mask(self, number: int, turn: Turn) -> list[Piece]:
        """The turn's pieces with sentinels in place of text from the data."""
        masked: list[Piece] = []
        for piece in turn.pieces:
            if piece.is_image:
                masked.append(piece if self.form == "list" else self._hide(number, piece))
            elif not piece.is_user:
                masked.append(piece)
            else:
                cuts = self.cut(piece.text)
                if turn.is_target and cuts and not cuts[0][1]:
                    self.visible_start[number] = cuts[0][0]
                for text, is_hidden in cuts:
                    part = Piece(text, is_user=True)
                    masked.append(self._hide(number, part) if is_hidden else part)
        return masked

    def _hide(self, number: int, piece: Piece) -> Piece:
        self.hidden.append((number, piece))
        return Piece(f"{_OPEN}{self.nonce}{len(self.hidden) - 1}{_CLOSE}", is_image=piece.is_image)

    def _substitute(self, masked: str) -> Iterator[tuple[int, Piece]]:
        """(turn or -1, piece) of the text; the template's own text belongs to no turn."""
        pattern = re.escape(_OPEN + self.nonce) + "([0-9]+)" + _CLOSE
        for index, part in enumerate(re.split(pattern, masked)):
            if index % 2:
                yield self.hidden[int(part)]
            else:
                yield from ((-1, piece) for piece in self._split_images(part))

    def _split_images(self, text: str) -> Iterator[Piece]:
        token = get_image_token(self.writer.processor) if self.form == "list" else None
        parts = re.split(f"({re.escape(token)})", text) if token else [text]
        for index, part in enumerate(parts):
            if part:
                yield Piece(part, is_image=index % 2 == 1)

    def _mark_targets(self, pieces: list[tuple[int, Piece]]) -> list[Piece]:
        """Marks answers with what stands inside them, and the special token after each."""
        marked = [piece for _, piece in pieces]
        borders: list[Piece] = []
        done = 0
        for number in self._target_turns():
            places = [place for place, (owner, _) in enumerate(pieces) if owner == number]
            first, last = places[0], places[-1]
            before = marked[done:first]
            lead = self.visible_start.get(number, "")
            if lead and before and before[-1].text.endswith(lead):
                before[-1:] = [Piece(before[-1].text.removesuffix(lead)), Piece(lead, False, True)]
            borders += before
            borders += [
                Piece(piece.text, piece.is_user, True) for piece in marked[first : last + 1]
            ]
            done = last + 1
            after = marked[done].text if done < len(marked) else ""
            end = self.writer.end_pattern.match(after)
            if end:
                borders.append(Piece(end[0], is_target=True))
                marked[done] = Piece(after[end.end() :])
            elif number == len(self.turns) - 1 and self.writer.tokenizer.eos_token:
                borders.append(Piece(self.writer.tokenizer.eos_token, is_target=True))
                if not after.strip():
                    return borders
        return [piece for piece in borders + marked[done:] if piece.text or piece.is_image]
