"""Renders turns with the model's own chat template, and still knows what every character is.

The template runs on private sentinels in place of the contents; these are then replaced by the
contents, one for one. So nothing in the data can be taken for markup, and nothing is searched for
in it. The outcome is compared with the template run on the contents themselves.

What the sentinels show depends on the structure of a conversation alone, and is kept: a further
sample of the same structure costs one render, of its official text.

An answer begins where the prompt for generation ends, and ends with its end-of-turn token. Both
are found by rendering the messages before it, and those up to it: these renders are beginnings of
the whole one. Where they are not (templates drop thoughts of earlier turns, or move tools), the
stretch between the messages before and the answer is compared instead.
"""

import itertools
import json
import os.path
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stageline.data.text.chat_template import (
    CLOSE,
    LEFT_OUT,
    OPEN,
    TOOLS,
    ChatTemplate,
    Cut,
    Form,
    Masking,
    TextSlot,
    messages_of,
    not_followed,
    template_of,
    use_template,
    whole,
)
from stageline.data.text.messages import SYSTEM_ROLES, Tool, Turn
from stageline.data.text.processor import get_tokenizer
from stageline.data.text.rendered import Piece, Rendered
from stageline.data.text.tool_forms import forms_of
from stageline.errors import UserError

Learnt = Literal["answers", "all", "all_but_system"]


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
class TemplateLayout:
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

    def make(self, masked: str) -> TemplateLayout:
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
            return TemplateLayout(masked, problem=str(error))
        return TemplateLayout(masked, segments, end=end, notes=tuple(self.notes))

    def _find(self, text: str) -> Iterator[re.Match[str]]:
        return self.pattern.finditer(text)

    def _slot(self, number: int) -> TextSlot:
        return self.masking.slots[number]

    def _check_prompt(self) -> None:
        """Refuses a template that leaves out a message of the prompt."""
        written = {self._slot(number).turn for _, _, number in self.places}
        for number, turn in enumerate(self.turns):
            hidden = any(slot.turn == number for slot in self.masking.slots)
            if turn.role != "assistant" and hidden and number not in written:
                raise LayoutError(f"{LEFT_OUT} message {number}, of {turn.role}")

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
            spans = [self._span(number) for number in targets]
            lacking = [
                number
                for number, (_, stop) in zip(targets, spans, strict=True)
                if not self.template.end_pattern.search(self.full, self.last_texts[number], stop)
            ]
            is_last = lacking[-1:] == [len(self.turns) - 1]
            end = (self.template.tokenizer.eos_token or "") if is_last else ""
            if len(lacking) > bool(end):
                self.notes.append(
                    "no token ends its turns, so the model does not learn to stop after answers "
                    "that something follows"
                )
        if self.learnt != "answers":
            spans = [(self._first_learnt(), spans[-1][1] if end else len(self.full))]
        return spans, end

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
        found = {number: [span] for number, span in zip(answers, spans)}
        if len(spans) != len(answers):  # thoughts, or the end of a turn, have marks of their own
            found = defaultdict(list)
            for span in spans:
                inside = [slot for start, _, slot in self.places if span[0] <= start < span[1]]
                before = [slot for _, end, slot in self.places if end <= span[0]]
                if inside or before:
                    found[self._slot((inside or before[-1:])[0]).turn].append(span)
        missing = [number for number in targets if number not in found]
        if missing:
            raise LayoutError(f"its {{% generation %}} marks leave out answer {missing[0]}")
        ends = self.template.end_pattern
        if not all(ends.search(self.full, *self._rest(found[number][-1])) for number in targets):
            self.notes.append(
                "its {% generation %} marks leave out the token that ends a turn, so the model "
                "does not learn to stop"
            )
        return [span for number in targets for span in found[number]]

    def _span(self, number: int) -> tuple[int, int]:
        """Where an answer begins and ends, its end-of-turn token included."""
        upto: str | None = self.full
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
                length = len(alike.rstrip())
                ends = list(self.template.end_pattern.finditer(alike))
                if not ends or ends[-1].end() < length:
                    length += self._length_of_next(number, self.full[after + length :])
                return after + length
        else:
            found = list(self._find(upto or ""))
            other = upto[found[-1].end() :] if upto and found else ""
            alike = os.path.commonprefix([other, rest])
        ends = list(self.template.end_pattern.finditer(alike))
        if ends:
            end = ends[-1 if has_calls else 0]
            for further in ends[1:]:  # special tokens in a row; the last one ends the sequence
                gap = alike[end.end() : further.start()]
                eos = self.template.tokenizer.eos_token
                if end[0] == eos or gap.strip() or (gap and further[0] != eos):
                    break
                end = further
            return after + end.end()
        # the last answer may end with another token than the ones before
        here, there = (self.template.end_pattern.search(text) for text in (rest, other))
        if here and there and rest[: here.start()] == other[: there.start()]:
            return after + here.end()
        next_length = self._length_of_next(number, rest)
        if has_calls and not next_length:
            raise LayoutError(f"it can't be seen where answer {number} ends")
        return after + next_length

    def _length_of_next(self, number: int, rest: str) -> int:
        """How much of what follows an answer is the special token that begins the next message.

        Templates without a token of their own for the end of a turn (GLM-4.5) stop there.
        """
        others = [turn.role for turn in self.turns[number + 1 : number + 2]]
        found = self.template.end_pattern.match(rest, len(rest) - len(rest.lstrip()))
        outer = {self.template.tokenizer.bos_token, self.template.image_token}
        if not found or others in ([], ["assistant"]) or found[0] in outer:
            return 0
        return found.end()

    def _segments(self, spans: Sequence[tuple[int, int]]) -> Iterator[Segment]:
        borders = sorted(set(itertools.chain(*spans)))
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
    return repr(text if len(text) <= 60 else f"...{text[-57:]}")


def fill(layout: TemplateLayout, slots: Sequence[TextSlot], official: str) -> list[Piece] | None:
    """The pieces of a conversation; None where the layout is not that of `official`.

    Each hidden text comes back where the template wrote its sentinel, perhaps trimmed or escaped
    as in JSON: together they are, character by character, what the template writes for it.
    """
    segments = layout.segments
    texts = _likely(segments, slots, official) or _match(segments, slots, official)
    if texts is None:
        return None
    pieces = [
        Piece(
            text,
            is_user=part.slot >= 0,
            is_target=part.is_target,
            is_image=part.is_image,
            is_answer=part.slot >= 0 and slots[part.slot].is_answer,
        )
        for part, text in zip(layout.segments, texts, strict=True)
    ]
    if layout.end:
        _add_end(pieces, layout.end)
    return [piece for piece in pieces if piece.text or piece.is_image]


def _likely(
    segments: Sequence[Segment], slots: Sequence[TextSlot], official: str
) -> list[str] | None:
    """The texts as they are, or all of them trimmed; nearly all templates do one of the two."""
    texts = [slots[part.slot].text if part.slot >= 0 else part.text for part in segments]
    if "".join(texts) == official:
        return texts
    pairs = zip(segments, texts, strict=True)
    texts = [text.strip() if part.slot >= 0 else text for part, text in pairs]
    return texts if "".join(texts) == official else None


def _match(
    segments: Sequence[Segment], slots: Sequence[TextSlot], official: str
) -> list[str] | None:
    """The text of each segment, so that together they are the official one."""
    chosen: list[str] = []
    ends = [0]
    tries = [_choices(segments[0], slots, official, 0)]
    budget = 1000 + 20 * len(segments)
    while tries and budget:
        budget -= 1
        text = next(tries[-1], None)
        if text is None:
            tries.pop()
            ends.pop()
            if chosen:
                chosen.pop()
            continue
        end = ends[-1] + len(text)
        if len(chosen) + 1 < len(segments):
            chosen.append(text)
            ends.append(end)
            tries.append(_choices(segments[len(chosen)], slots, official, end))
        elif end == len(official):
            return [*chosen, text]
    return None


def _choices(
    segment: Segment, slots: Sequence[TextSlot], official: str, start: int
) -> Iterator[str]:  # fmt: skip
    """The ways to write a segment that fit there, the likeliest first."""
    texts = [segment.text] if segment.slot < 0 else _ways(slots[segment.slot].text)
    return (text for text in texts if official.startswith(text, start))


def _ways(text: str) -> Iterator[str]:
    seen = set()
    for cut in (text, text.strip(), text.strip("\n"), text.rstrip(), text.lstrip(),
                text.rstrip("\n"), text.lstrip("\n")):  # fmt: skip
        if cut not in seen:
            seen.add(cut)
            yield cut
    for cut in (text, text.strip()):
        for is_ascii in (False, True):
            escaped = json.dumps(cut, ensure_ascii=is_ascii)[1:-1]
            twice = json.dumps(escaped, ensure_ascii=is_ascii)[1:-1]
            for way in (escaped, twice):
                if way not in seen:
                    seen.add(way)
                    yield way


def _add_end(pieces: list[Piece], end: str) -> None:
    """Adds a supervised end behind the last piece that is learnt, for blanks behind it if any."""
    last = max(place for place, piece in enumerate(pieces) if piece.is_target)
    if not "".join(piece.text for piece in pieces[last + 1 :]).strip():
        del pieces[last + 1 :]
    pieces.insert(last + 1, Piece(end, is_target=True))


def prepare_chat(processor: Any, *, template: str | None = None, **others: Any) -> None:
    """Gives a processor the chat template of that name, and the end of its turns as eos_token.

    An answer that ends otherwise than the tokenizer says would never end where only the tokenizer
    is asked. A tokenizer whose eos_token the template itself writes keeps it.
    """
    use_template(processor, template=template)
    tokenizer, ends = get_tokenizer(processor), turn_ends(processor)
    if ends and tokenizer.eos_token not in ends and "eos_token" not in str(template_of(processor)):
        tokenizer.eos_token = ends[0]


def stop_ids_with(of_model: list[int] | int | None, processor: Any) -> list[int]:
    """The ids that end an answer: of the model, of its tokenizer, and of its chat template.

    Those of the template count where the tokenizer's own end is one of them (`prepare_chat`): other
    tokenizers may have a template, and the model knows nothing of it.
    """
    tokenizer = get_tokenizer(processor)
    ids = of_model if isinstance(of_model, list) else [of_model]
    ends = turn_ends(processor)
    if tokenizer.eos_token in ends:
        ids = [*ids, *(tokenizer.convert_tokens_to_ids(end) for end in ends)]
    return sorted({int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None})


def turn_ends(processor: Any) -> tuple[str, ...]:
    """The tokens that end an answer in the chat template, a plain answer's first; none without one.

    They are the last special tokens that are learnt in small conversations with thoughts and calls.
    What also comes before the end of another answer (`<|end|>` behind thoughts) is not one.
    """
    if not template_of(processor):
        return ()
    try:
        template = ChatTemplate.of(processor)
    except UserError:  # whoever renders with it gets the error
        return ()
    if template.turn_ends is None:
        found = list(_learnt_in_samples(template))
        inner = {token for text, _ in found for token in template.end_pattern.findall(text)}
        ends = [tokens[-1] for _, rest in found if (tokens := template.end_pattern.findall(rest))]
        template.turn_ends = tuple(token for token in dict.fromkeys(ends) if token not in inner)
    return template.turn_ends


def _learnt_in_samples(template: ChatTemplate) -> Iterator[tuple[str, str]]:
    """What is learnt of each answer in small conversations: up to its last text, and behind it."""
    function = {"name": "look", "arguments": {"place": "there"}}
    tool = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    asked, told, result = (
        Turn(role, (Piece("a", is_user=True),), is_target=role == "assistant", tool_call_id=call)
        for role, call in (("user", None), ("assistant", None), ("tool", "abcdefghi"))
    )
    call: Tool = {"type": "function", "function": function, "id": "abcdefghi"}
    calling = Turn("assistant", (), is_target=True, tool_calls=(call,))
    thinking = replace(told, reasoning="b")
    conversations: list[tuple[list[Turn], list[Tool]]] = [
        ([asked, told], []),
        ([asked, told, asked, told], []),
        ([asked, thinking, asked, thinking], []),
        ([asked, calling, result, told], [{"type": "function", "function": tool}]),
    ]
    forms: tuple[Form, ...] = ("text", "list")
    ways = itertools.product(conversations, forms, ({}, {"enable_thinking": False}))
    for (turns, tools), form, options in ways:
        run = _Run(template, turns, tools, options, for_generation=False, learnt="answers")
        try:
            layout, _ = run._layout(Masking(template, turns, tools, form=form, cut=whole))
        except Exception:  # templates raise what they like
            continue
        for is_target, group in itertools.groupby(layout.segments, lambda part: part.is_target):
            if is_target:
                texts = [part.text if part.slot < 0 else OPEN for part in group]
                before, _, rest = "".join(texts).rpartition(OPEN)
                yield before, rest or layout.end


_has_warned: set[tuple[str, str]] = set()


def render_chat(
    turns: Sequence[Turn],
    processor: Any,
    *,
    for_generation: bool = False,
    template_options: dict[str, Any] | None = None,
    tools: Sequence[Tool] = (),
    learnt: Learnt = "answers",
    source: str = "",
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
        source: the row, by its file and line.

    Raises:
        DataError: the template itself refuses the row (raise_exception).
        UserError: there is no chat template, or it changes contents in a way that can't be
            followed.
    """
    template = ChatTemplate.of(processor)
    reasons: list[str] = []
    for way, shown, note in forms_of(turns, tools, knows_tools=template.knows_tools):
        run = _Run(template, way, shown, dict(template_options or {}), for_generation, learnt)
        result = run.first_that_fits(reasons)
        if result is not None:
            _warn_once(template.name, note)
            return result
    raise not_followed(template.name, reasons, source=source)


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

    def first_that_fits(self, reasons: list[str]) -> Rendered | None:
        """The conversation in the first way that works; why others did not goes into `reasons`."""
        for form, cut in self.ways():
            result = self.attempt(form, cut)
            if isinstance(result, Rendered):
                return result
            reasons.append(result)
        return None

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

    def _layout(
        self, masking: Masking, known: TemplateLayout | None = None
    ) -> tuple[TemplateLayout, bool]:
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


def _warn_once(name: str, note: str) -> None:
    if note and (name, note) not in _has_warned:
        _has_warned.add((name, note))
        warnings.warn(f"the chat template of {name}: {note}.", stacklevel=4)
