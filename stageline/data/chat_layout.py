"""What a chat template makes of conversations of one structure, and what of it is the assistant's.

An answer begins where the prompt for generation ends, and ends with its end-of-turn token. Both
are found by rendering the messages before it, and those up to it: these renders are beginnings of
the whole one. Where they are not (templates drop thoughts of earlier turns, or move tools), the
stretch between the messages before and the answer is compared instead.
"""

import os.path
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stageline.data.chat_masking import CLOSE, OPEN, TOOLS, Masking, Slot
from stageline.data.chat_template import ChatTemplate
from stageline.data.messages import SYSTEM_ROLES, Turn

Learnt = Literal["answers", "all", "all_but_system"]
LEFT_OUT = "it leaves out or changes"


@dataclass(frozen=True)
class Segment:
    """A stretch of the text.

    Attributes:
        text: what the template writes; of a slot "".
        slot: the number of the hidden text that stands here; -1: none does.
    """

    text: str = ""
    slot: int = -1
    is_target: bool = False
    is_image: bool = False


@dataclass(frozen=True)
class Layout:
    """The text of a structure, or why it can't be followed.

    Attributes:
        masked: what the template wrote for hidden texts.
        segments: the same, cut up.
        end: an end-of-sequence token to add behind the last segment that is learnt.
        notes: what the user should hear of.
    """

    masked: str
    segments: tuple[Segment, ...] = ()
    problem: str = ""
    end: str = ""
    notes: tuple[str, ...] = ()


class LayoutError(Exception):
    """The template can't be followed."""


@dataclass
class LayoutMaker:
    """Finds out the layout of one structure.

    Args:
        learnt: the answers, or everything but images, or that without the system message.
    """

    template: ChatTemplate
    turns: Sequence[Turn]
    masking: Masking
    options: dict[str, Any]
    for_generation: bool
    learnt: Learnt = "answers"
    notes: list[str] = field(default_factory=list)
    last_texts: dict[int, int] = field(default_factory=dict)

    def make(self, masked: str) -> Layout:
        """The layout of the masked text."""
        self.full = masked
        pattern = re.escape(OPEN + self.masking.nonce) + "([0-9]+)" + CLOSE
        self.pattern = re.compile(pattern)
        self.places = [(found.start(), found.end(), int(found[1])) for found in self._find(masked)]
        try:
            self._check_prompt()
            spans, end = self._targets()
            segments = tuple(self._segments(spans))
            self._check_images(segments)
        except LayoutError as error:
            return Layout(masked, problem=str(error))
        return Layout(masked, segments, end=end, notes=tuple(self.notes))

    def _find(self, text: str) -> Iterator[re.Match[str]]:
        return self.pattern.finditer(text)

    def _slot(self, number: int) -> Slot:
        return self.masking.slots[number]

    # -- what must be there ------------------------------------------------------------------

    def _check_prompt(self) -> None:
        """Refuses a template that leaves out a message of the prompt, or the tools."""
        written = {self._slot(number).turn for _, _, number in self.places}
        for number, turn in enumerate(self.turns):
            hidden = any(slot.turn == number for slot in self.masking.slots)
            if turn.role != "assistant" and hidden and number not in written:
                raise LayoutError(f"{LEFT_OUT} message {number}, of {turn.role}")
        if self.masking.tools and not self.template.knows_tools:
            raise LayoutError("it knows no tools, which the row has")

    def _check_answer(self, number: int, own: list[tuple[int, int, int]]) -> None:
        """Refuses a template that drops what is to be learnt; thoughts of earlier turns may go."""
        hidden = {slot.part for slot in self.masking.slots if slot.turn == number}
        written = {self._slot(place[2]).part for place in own}
        if "call" in hidden - written:
            raise LayoutError(f"it writes no tool calls, which message {number} has")
        if hidden and not written:
            raise LayoutError(f"{LEFT_OUT} answer {number}")
        if "reasoning" in hidden - written and number == len(self.turns) - 1:
            raise LayoutError("it does not write the reasoning_content of the last answer")
        if "content" in hidden - written:
            self.notes.append("it leaves out the content of messages with tool calls")

    def _check_images(self, segments: Sequence[Segment]) -> None:
        expected = sum(piece.is_image for turn in self.turns for piece in turn.pieces)
        if sum(segment.is_image for segment in segments) != expected:
            raise LayoutError(f"it does not write {expected} images")

    # -- what is learnt ----------------------------------------------------------------------

    def _targets(self) -> tuple[list[tuple[int, int]], str]:
        """Spans of characters that are learnt; the end-of-sequence token to add behind the last."""
        if self.for_generation:
            return [], ""
        targets = [number for number, turn in enumerate(self.turns) if turn.is_target]
        for number in targets:
            self._check_answer(number, self._own(number))
        if self.template.has_markers:
            spans, end = self._marked(targets), ""
        else:
            spans, end = [self._span(number) for number in targets], self._missing_end(targets)
            rest = (self.last_texts.get(targets[-1], 0), spans[-1][1]) if targets else (0, 0)
            if end and self.template.end_pattern.search(self.full, *rest):
                end = ""
        if self.learnt != "answers":
            spans = [(self._first_learnt(), spans[-1][1] if end else len(self.full))]
        return spans, end

    def _missing_end(self, targets: list[int]) -> str:
        ends_with_answer = bool(targets) and targets[-1] == len(self.turns) - 1
        return (self.template.tokenizer.eos_token or "") if ends_with_answer else ""

    def _rest(self, span: tuple[int, int]) -> tuple[int, int]:
        """Of an answer what follows its last text."""
        return max([end for _, end, _ in self.places if end <= span[1]], default=span[0]), span[1]

    def _own(self, number: int) -> list[tuple[int, int, int]]:
        return [place for place in self.places if self._slot(place[2]).turn == number]

    def _first_learnt(self) -> int:
        if self.learnt == "all":
            return 0
        others = (
            start
            for start, _, number in self.places
            if (turn := self._slot(number).turn) != TOOLS
            and self.turns[turn].role not in SYSTEM_ROLES
        )
        return next(others, 0)

    def _marked(self, targets: list[int]) -> list[tuple[int, int]]:
        """The spans of the targets that the template itself marks."""
        spans = self.template.marked_spans(
            self.masking.messages, tools=self.masking.tools, options=self.options
        )
        answers = [number for number, turn in enumerate(self.turns) if turn.role == "assistant"]
        if len(spans) == len(answers):
            found = dict(zip(answers, spans, strict=True))
        else:
            found = {
                self._slot(number).turn: span
                for span in spans
                for start, end, number in self.places
                if span[0] <= start and end <= span[1]
            }
        missing = [number for number in targets if number not in found]
        if missing:
            raise LayoutError(f"its {{% generation %}} marks leave out answer {missing[0]}")
        ends = self.template.end_pattern
        if not all(ends.search(self.full, *self._rest(found[number])) for number in targets):
            self.notes.append(
                "its {% generation %} marks leave out the token that ends a turn, so the model "
                "does not learn to stop"
            )
        return [found[number] for number in targets]

    def _span(self, number: int) -> tuple[int, int]:
        """Where an answer begins and ends, its end-of-turn token included."""
        upto = self.full
        if number < len(self.turns) - 1:
            upto = self._render(number + 1, for_generation=False)
        own = self._own(number)
        if upto is not None:  # what a tool answers may repeat the name of the call
            own = own[: sum(self._slot(int(found[1])).turn == number for found in self._find(upto))]
        before = self._render(number, for_generation=True)
        start = self._start(number, before, own[0][0] if own else None)
        end = self._end(number, upto, own[-1][1] if own else start)
        self.last_texts[number] = own[-1][1] if own else start
        return start, end

    def _render(self, count: int, *, for_generation: bool) -> str | None:
        """The first messages; None where the template does not take them alone."""
        if not count:
            return None
        try:
            return self.template(
                self.masking.messages[:count],
                tools=self.masking.tools,
                options=self.options,
                for_generation=for_generation,
            )
        except Exception:  # templates raise what they like
            return None

    def _start(self, number: int, before: str | None, first: int | None) -> int:
        if before is not None and self.full.startswith(before):
            if first is None or len(before) <= first:
                return len(before)
        if first is None:
            raise LayoutError(f"it can't be seen where answer {number} begins")
        if before is None:
            return first
        reached = [place for place in self.places if place[1] <= first]
        last = list(self._find(before))
        if not reached or not last or int(last[-1][1]) != reached[-1][2]:
            raise LayoutError(f"what it writes before answer {number} depends on what comes after")
        tail, written = before[last[-1].end() :], self.full[reached[-1][1] : first]
        if written.startswith(tail):
            return reached[-1][1] + len(tail)
        # thoughts that a template opens for the model are dropped from earlier turns
        if tail.startswith(written) and number < len(self.turns) - 1:
            return first
        raise LayoutError(
            f"before answer {number} it writes {_short(written)}, but for generation "
            f"{_short(tail)}, so that the model would learn what it is never asked for"
        )

    def _end(self, number: int, upto: str | None, after: int) -> int:
        """Behind the end-of-turn token; without one, behind the text.

        Args:
            upto: the messages up to this one.
            after: the end of its last text.
        """
        has_calls = bool(self.turns[number].tool_calls)
        rest = self.pattern.split(self.full[after:], maxsplit=1)[0]
        if upto is not None and self.full.startswith(upto):
            alike = other = self.full[after : len(upto)]
            if has_calls:  # texts of a call may stand between special tokens
                return after + len(alike.rstrip())
        else:
            found = list(self._find(upto or ""))
            other = upto[found[-1].end() :] if upto and found else ""
            alike = os.path.commonprefix([other, rest])
        ends = list(self.template.end_pattern.finditer(alike))
        if ends:
            return after + ends[-1 if has_calls else 0].end()
        # the last answer may end with another token than the ones before
        here, there = (self.template.end_pattern.search(text) for text in (rest, other))
        if here and there and rest[: here.start()] == other[: there.start()]:
            return after + here.end()
        if has_calls:
            raise LayoutError(f"it can't be seen where answer {number} ends")
        return after

    # -- cutting up --------------------------------------------------------------------------

    def _segments(self, spans: Sequence[tuple[int, int]]) -> Iterator[Segment]:
        borders = sorted({border for span in spans for border in span})
        done = 0
        for start, end, number in [*self.places, (len(self.full), len(self.full), -1)]:
            cuts = [done, *(border for border in borders if done < border < start), start]
            for left, right in zip(cuts, cuts[1:], strict=False):
                yield from self._literal(self.full[left:right], _is_in(left, spans))
            if number >= 0:
                is_image = self._slot(number).is_image
                is_target = _is_in(start, spans) and not is_image
                yield Segment(slot=number, is_target=is_target, is_image=is_image)
            done = end

    def _literal(self, text: str, is_target: bool) -> Iterator[Segment]:
        token = self.template.image_token if self.masking.form == "list" else None
        parts = re.split(f"({re.escape(token)})", text) if token else [text]
        for index, part in enumerate(parts):
            if part:
                is_image = index % 2 == 1
                yield Segment(part, is_target=is_target and not is_image, is_image=is_image)


def _is_in(place: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= place < end for start, end in spans)


def _short(text: str) -> str:
    shown = text if len(text) <= 60 else f"...{text[-57:]}"
    return repr(shown)
