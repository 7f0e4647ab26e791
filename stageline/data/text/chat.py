"""Renders turns with the model's own chat template, and knows where each character came from.

The template also runs on messages whose texts stand between private marks. Where its text without
the marks is what it writes for the messages themselves, the marks show what came from the data.

An answer begins where the prompt for generation ends, and ends with its end-of-turn token. Both
are found by rendering the messages before it, and those up to it: these renders are beginnings of
the whole one. Where they are not (templates drop thoughts of earlier turns, or move tools), the
stretch between the messages before and the answer is compared instead.

Where texts and answers stand depends on the structure of a conversation and is kept: a further
sample of the same structure costs one render.
"""

import itertools
import os.path
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stageline.data.text.chat_template import (
    ChatTemplate,
    Message,
    fitting_templates,
    strings_in,
    template_of,
    use_template,
)
from stageline.data.text.messages import SYSTEM_ROLES, Tool, Turn
from stageline.data.text.processor import get_tokenizer
from stageline.data.text.rendered import Piece, Rendered
from stageline.data.text.tool_forms import forms_of
from stageline.errors import DataError, UserError

Learnt = Literal["answers", "all", "all_but_system"]
Form = Literal["text", "list"]  # of contents
Part = Literal["content", "reasoning", "call", "other"]
TOOLS = -1  # in place of the number of a turn
_OPEN, _CLOSE = "\ue000", "\ue001"  # around the number of a text, in its place
_PLACE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_LEFT_OUT = "it leaves out or changes"  # so begins a reason
_MOST_LAYOUTS = 256
_has_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class DataText:
    """A text of the data: of which turn, and which part of it."""

    turn: int
    part: Part
    text: str
    is_image: bool = False
    is_answer: bool = False


@dataclass(frozen=True)
class Segment:
    """A stretch of the rendered text: what the template wrote, or the text of that number."""

    text: str = ""
    number: int = -1
    is_target: bool = False
    is_image: bool = False


@dataclass(frozen=True)
class Layout:
    """The rendered text of a structure.

    Attributes:
        bare: with places for the texts.
        segments: the same, cut up.
        end: an end-of-sequence token to add behind the last segment that is learnt.
        notes: warnings for the user.
    """

    bare: str
    segments: tuple[Segment, ...]
    end: str = ""
    notes: tuple[str, ...] = ()


class LayoutError(Exception):
    """The template can't be followed."""


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
    has_images = any(piece.is_image for turn in turns for piece in turn.pieces)
    forms: tuple[Form, ...] = ("list", "text") if has_images else ("text", "list")
    reasons: list[str] = []
    for way, shown, note in forms_of(turns, tools, knows_tools=template.knows_tools):
        chat = _Chat(template, way, shown, template_options or {}, for_generation, learnt)
        for form in forms:
            try:
                pieces, notes = chat.pieces(form)
            except Exception as error:  # templates raise what they like
                is_ours = isinstance(error, LayoutError)
                reasons.append(str(error) if is_ours else f"{type(error).__name__}: {error}")
                continue
            for text in (note, *notes):
                if text and (template.name, text) not in _has_warned:
                    _has_warned.add((template.name, text))
                    warnings.warn(f"the chat template of {template.name}: {text}.", stacklevel=3)
            return Rendered(tuple(pieces), is_chat=True, for_generation=for_generation)
    raise _not_followed(template, reasons, source=source)


def _not_followed(template: ChatTemplate, reasons: Sequence[str], *, source: str) -> UserError:
    # what begins so may only say that the template takes contents in the other form
    others = [reason for reason in reasons if not reason.startswith(_LEFT_OUT)] or reasons
    refused = next((one for one in others if one.startswith("TemplateError: ")), None)
    if refused and source:  # by its raise_exception
        return DataError(
            f"{source}: the chat template of {template.name} refuses the conversation: "
            f"{refused.partition(': ')[2]}. Correct the row, or use another template."
        )
    names = ", ".join(fitting_templates(template.tokenizer))
    return UserError(
        f"the chat template of {template.name} cannot be followed{source and f' in {source}'}: "
        f"{'; '.join(dict.fromkeys(others))}. So it isn't known which tokens are the answer: use "
        f"`prompt_fn.template` (its tokens fit {names}), another chat_template.jinja in the folder "
        "of `processor_path`, other `prompt_fn.template_options` (enable_thinking ...), rows "
        "without what it does not write, or a plain template (`prompt_fn` fill)."
    )


class _Writer:
    """Writes messages and tools for a template, with something in place of each text of the data.

    These are all contents but tags such as <think>, which templates look for, reasoning, names and
    texts of tool calls, and whatever else could become a special token. Empty texts stay: templates
    ask whether there is one.

    Args:
        put: (number, text) -> what stands in its place; None: the text itself.
    """

    def __init__(
        self, template: ChatTemplate, form: Form, put: Callable[[int, str], str] | None
    ) -> None:
        self.template = template
        self.form = form
        self.put = put
        self.texts: list[DataText] = []

    def messages(self, turns: Sequence[Turn]) -> list[Message]:
        """The messages of the turns."""
        return [self._message(number, turn) for number, turn in enumerate(turns)]

    def tools(self, tools: Sequence[Tool]) -> list[Tool]:
        """The descriptions of tools; texts that can't become a special token stay."""
        return [self._tree(TOOLS, "other", tool, only_risky=True) for tool in tools]

    def _put(self, turn: int, part: Part, text: str, **kind: bool) -> str:
        self.texts.append(DataText(turn, part, text, **kind))
        return text if self.put is None else self.put(len(self.texts) - 1, text)

    def _message(self, number: int, turn: Turn) -> Message:
        message: Message = {"role": turn.role, "content": self._content(number, turn)}
        for name, value in (("name", turn.name), ("tool_call_id", turn.tool_call_id)):
            if value:
                is_risky = self.template.is_risky(value)
                message[name] = self._put(number, "other", value) if is_risky else value
        if turn.reasoning.strip():
            message["reasoning_content"] = self._put(number, "reasoning", turn.reasoning)
        elif turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [self._call(number, call) for call in turn.tool_calls]
        return message

    def _content(self, number: int, turn: Turn) -> Any:
        """Text, or a list of parts."""
        parts: list[dict[str, str]] = []
        for text, is_image in self._parts(number, turn):
            if is_image and self.form == "list":
                parts.append({"type": "image"})
            elif parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += text
            else:
                parts.append({"type": "text", "text": text})
        return parts if self.form == "list" else "".join(part["text"] for part in parts)

    def _parts(self, number: int, turn: Turn) -> Iterator[tuple[str, bool]]:
        is_answer = turn.is_target and not turn.tool_calls and not turn.reasoning
        for piece in turn.pieces:
            if piece.is_image:
                is_own = self.form == "text"
                text = self._put(number, "content", piece.text, is_image=True) if is_own else ""
                yield text, True
            elif not piece.is_user or not (
                piece.text.strip() or (is_answer and len(turn.pieces) == 1)
            ):
                yield piece.text, False
            elif not self.template.has_tags(piece.text):
                yield self._put(number, "content", piece.text, is_answer=piece.is_answer), False
            else:
                for text, is_tag in self.template.cut_at_tags(piece.text):
                    given = {"is_answer": piece.is_answer}
                    yield text if is_tag else self._put(number, "content", text, **given), False

    def _call(self, number: int, call: Tool) -> Tool:
        function = call["function"]
        name = self._put(number, "call", function["name"])
        arguments = self._tree(number, "call", function["arguments"])
        made = {**call, "function": {**function, "name": name, "arguments": arguments}}
        if "id" in call and self.template.is_risky(call["id"]):
            made["id"] = self._put(number, "call", call["id"])
        return made

    def _tree(self, number: int, part: Part, value: Any, *, only_risky: bool = False) -> Any:
        """A value of JSON."""
        if isinstance(value, str):
            is_put = self.template.is_risky(value) if only_risky else bool(value.strip())
            return self._put(number, part, value) if is_put else value
        if isinstance(value, dict):
            return {
                self._tree(number, part, key, only_risky=True): self._tree(
                    number, part, item, only_risky=only_risky
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._tree(number, part, item, only_risky=only_risky) for item in value]
        return value


@dataclass
class _Chat:
    """One conversation that is to be rendered."""

    template: ChatTemplate
    turns: Sequence[Turn]
    tools: Sequence[Tool]
    options: dict[str, Any]
    for_generation: bool = False
    learnt: Learnt = "answers"

    def pieces(self, form: Form) -> tuple[list[Piece], tuple[str, ...]]:
        """What the template writes, in pieces; and warnings.

        Raises:
            LayoutError: why it can't be followed.
        """
        plain = _Writer(self.template, form, None)
        official = self._render(plain.messages(self.turns), plain.tools(self.tools))
        shape = _Writer(self.template, form, lambda number, text: f"{_OPEN}{number}")
        targets = [turn.is_target for turn in self.turns]
        structure = [shape.messages(self.turns), shape.tools(self.tools), targets, self.learnt]
        key = repr([form, structure, self.options, self.for_generation])
        layout = self.template.layouts.get(key)
        texts = layout and _same_or_trimmed(layout, shape.texts, official)
        if layout is None or texts is None:
            layout, texts = self._follow(form, official, layout)
            if len(self.template.layouts) >= _MOST_LAYOUTS:
                self.template.layouts.clear()
            self.template.layouts[key] = layout
        pieces = [
            Piece(
                text,
                is_user=part.number >= 0,
                is_target=part.is_target,
                is_image=part.is_image,
                is_answer=part.number >= 0 and shape.texts[part.number].is_answer,
            )
            for part, text in zip(layout.segments, texts, strict=True)
        ]
        if layout.end:  # behind the last piece that is learnt, for blanks behind it if any
            last = max(place for place, piece in enumerate(pieces) if piece.is_target)
            if not "".join(piece.text for piece in pieces[last + 1 :]).strip():
                del pieces[last + 1 :]
            pieces.insert(last + 1, Piece(layout.end, is_target=True))
        return [piece for piece in pieces if piece.text or piece.is_image], layout.notes

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return self.template(
            messages, tools=tools, options=self.options, for_generation=self.for_generation
        )

    def _follow(self, form: Form, official: str, kept: Layout | None) -> tuple[Layout, list[str]]:
        """The layout, and the text of each of its segments, from renders with marks.

        Args:
            kept: a layout of the structure; it stays if the template writes the same.
        """
        strings = [text for turn in self.turns for text in _strings_of(turn)]
        everything = "".join([*strings, *strings_in(list(self.tools))])
        unused = (mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in everything)
        begin, middle, end = itertools.islice(unused, 3)
        marked = re.compile(f"{begin}([0-9]+){middle}([^{end}]*){end}")

        def trimmed(number: int, text: str) -> str:
            return f"{begin}{number}{middle}{text.strip()}{end}"

        def between_blanks(number: int, text: str) -> str:
            core = text.strip()
            before, behind = text.split(core, 1) if core else (text, "")
            return f"{before}{trimmed(number, core)}{behind}"

        def bare_of(text: str) -> str:
            return marked.sub(rf"{_OPEN}\1{_CLOSE}", text)

        writer = _Writer(self.template, form, trimmed)
        messages, tools = writer.messages(self.turns), writer.tools(self.tools)
        full = self._render(messages, tools)
        if kept is None or kept.bare != bare_of(full):
            kept = _Finder(self, form, writer.texts, messages, tools, full, bare_of).layout()
        known = _same_or_trimmed(kept, writer.texts, official)
        if known is not None:
            return kept, known
        texts = [text for _, text in marked.findall(full)]  # escaped, as in JSON
        if marked.sub(r"\2", full) != official:  # or some trimmed, and others not
            other = _Writer(self.template, form, between_blanks)
            blank = self._render(other.messages(self.turns), other.tools(self.tools))
            if marked.sub(r"\2", blank) != official:
                raise LayoutError(f"{_LEFT_OUT} contents")
            texts = _with_blanks(texts, _PLACE.split(bare_of(full)), _PLACE.split(bare_of(blank)))
        rest = iter(texts)
        return kept, [next(rest) if part.number >= 0 else part.text for part in kept.segments]


def _strings_of(turn: Turn) -> Iterator[str]:
    yield from (piece.text for piece in turn.pieces)
    yield from strings_in([turn.reasoning, turn.name, turn.tool_call_id, *turn.tool_calls])


def _with_blanks(texts: list[str], without: list[str], blank: list[str]) -> list[str]:
    """The texts with those blanks that a template does not trim.

    Args:
        without: what it writes around trimmed texts, and between two the number of the text.
        blank: the same with blanks around texts.
    """
    if without[1::2] != blank[1::2]:
        raise LayoutError(f"{_LEFT_OUT} contents")
    found = list(texts)
    for number, (part, longer) in enumerate(zip(without[::2], blank[::2], strict=True)):
        is_last = number == len(texts)
        start = longer.rfind(part) if is_last else longer.find(part)
        if start < 0:
            raise LayoutError(f"{_LEFT_OUT} contents")
        if number:
            found[number - 1] += longer[:start]
        if not is_last:
            found[number] = longer[start + len(part) :] + found[number]
    return found


def _same_or_trimmed(layout: Layout, texts: Sequence[DataText], official: str) -> list[str] | None:
    """The texts as they are, or all of them trimmed: nearly all templates do one of the two."""
    whole = [texts[part.number].text if part.number >= 0 else part.text for part in layout.segments]
    if "".join(whole) == official:
        return whole
    pairs = zip(layout.segments, whole, strict=True)
    trimmed = [text.strip() if part.number >= 0 else text for part, text in pairs]
    return trimmed if "".join(trimmed) == official else None


@dataclass
class _Finder:
    """Finds where the answers of one conversation stand.

    Args:
        texts: by their number.
        messages, tools: with marks around the texts.
        full: what the template writes of them.
        bare_of: puts places for the texts into what the template writes.
    """

    chat: _Chat
    form: Form
    texts: Sequence[DataText]
    messages: Sequence[Message]
    tools: Sequence[Tool]
    full: str
    bare_of: Callable[[str], str]
    notes: list[str] = field(default_factory=list)

    def layout(self) -> Layout:
        """Where texts and answers stand.

        Raises:
            LayoutError: the template leaves something out, or it can't be seen where an answer is.
        """
        turns, texts = self.chat.turns, self.texts
        self.bare = self.bare_of(self.full)
        self.ends = self.chat.template.end_pattern
        self.places = [
            (found.start(), found.end(), int(found[1])) for found in _PLACE.finditer(self.bare)
        ]
        written = {texts[number].turn for _, _, number in self.places}
        for text in texts:
            if text.turn not in {*written, TOOLS} and turns[text.turn].role != "assistant":
                raise LayoutError(f"{_LEFT_OUT} message {text.turn}, of {turns[text.turn].role}")
        spans, end = ([], "") if self.chat.for_generation else self._targets()
        segments = tuple(self._segments(spans))
        num_images = sum(piece.is_image for turn in turns for piece in turn.pieces)
        if sum(segment.is_image for segment in segments) != num_images:
            raise LayoutError(f"it does not write {num_images} images")
        return Layout(self.bare, segments, end, tuple(self.notes))

    def _targets(self) -> tuple[list[tuple[int, int]], str]:
        """Spans of characters that are learnt; the end-of-sequence token to add behind the last."""
        turns, template = self.chat.turns, self.chat.template
        targets = [number for number, turn in enumerate(turns) if turn.is_target]
        for number in targets:
            self._check_answer(number)
        end = ""
        if template.has_markers:
            spans = self._marked(targets)
        else:
            found = [self._span(number) for number in targets]
            spans = [(start, stop) for start, _, stop in found]
            lacking = [
                number
                for number, (_, text_end, stop) in zip(targets, found, strict=True)
                if not self.ends.search(self.bare, text_end, stop)
            ]
            if lacking[-1:] == [len(turns) - 1]:
                end = template.tokenizer.eos_token or ""
            if len(lacking) > bool(end):
                self.notes.append(
                    "no token ends its turns, so the model does not learn to stop after answers "
                    "that something follows"
                )
        if self.chat.learnt != "answers":
            spans = [(self._first_learnt(), spans[-1][1] if end else len(self.bare))]
        return spans, end

    def _check_answer(self, number: int) -> None:
        """Refuses a template that drops what is to be learnt; thoughts of earlier turns may go."""
        hidden = {text.part for text in self.texts if text.turn == number}
        written = {self.texts[place[2]].part for place in self._own(number)}
        if "call" in hidden - written:
            raise LayoutError(f"it writes no tool calls, which message {number} has")
        if hidden and not written:
            raise LayoutError(f"{_LEFT_OUT} answer {number}")
        if "reasoning" in hidden - written and number == len(self.chat.turns) - 1:
            raise LayoutError("it does not write the reasoning_content of the last answer")
        if "content" in hidden - written:
            self.notes.append("it leaves out the content of messages with tool calls")

    def _own(self, number: int) -> list[tuple[int, int, int]]:
        return [place for place in self.places if self.texts[place[2]].turn == number]

    def _first_learnt(self) -> int:
        if self.chat.learnt == "all":
            return 0
        turns = self.chat.turns
        others = (
            start
            for start, _, number in self.places
            if (turn := self.texts[number].turn) != TOOLS and turns[turn].role not in SYSTEM_ROLES
        )
        return next(others, 0)

    def _marked(self, targets: list[int]) -> list[tuple[int, int]]:
        """The spans of the targets that the template itself marks."""
        places = self.chat.template.marked_spans(
            self.messages, tools=self.tools, options=self.chat.options
        )
        spans = [tuple(len(self.bare_of(self.full[:place])) for place in span) for span in places]
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        answers = [n for n, turn in enumerate(self.chat.turns) if turn.role == "assistant"]
        for index, (start, end) in enumerate(spans):
            if len(spans) == len(answers):
                found[answers[index]].append((start, end))
                continue
            # thoughts, or the end of a turn, have marks of their own
            inside = [number for first, _, number in self.places if start <= first < end]
            before = [number for _, last, number in self.places if last <= start]
            if inside or before:
                found[self.texts[(inside or before[-1:])[0]].turn].append((start, end))
        missing = [number for number in targets if number not in found]
        if missing:
            raise LayoutError(f"its {{% generation %}} marks leave out answer {missing[0]}")
        for number in targets:
            first, stop = found[number][-1]
            last_text = max([end for _, end, _ in self.places if end <= stop], default=first)
            if not self.ends.search(self.bare, last_text, stop):
                self.notes.append(
                    "its {% generation %} marks leave out the token that ends a turn, so the model "
                    "does not learn to stop"
                )
                break
        return [span for number in targets for span in found[number]]

    def _span(self, number: int) -> tuple[int, int, int]:
        """Where an answer begins, where its last text ends, and where its end-of-turn token."""
        upto: str | None = self.bare
        if number < len(self.chat.turns) - 1:
            upto = self._render(number + 1, for_generation=False)
        own = self._own(number)
        if upto is not None:  # what a tool answers may repeat the name of the call
            there = [self.texts[int(found[1])].turn for found in _PLACE.finditer(upto)]
            own = own[: there.count(number)]
        before = self._render(number, for_generation=True) if number else None
        start = self._start(number, before, own[0][0] if own else None)
        text_end = own[-1][1] if own else start
        return start, text_end, self._end(number, upto, text_end)

    def _render(self, count: int, *, for_generation: bool) -> str | None:
        """The first messages; None where the template does not take them alone."""
        template, options = self.chat.template, self.chat.options
        try:
            messages = self.messages[:count]
            return self.bare_of(
                template(messages, tools=self.tools, options=options, for_generation=for_generation)
            )
        except Exception:  # templates raise what they like
            return None

    def _start(self, number: int, before: str | None, first: int | None) -> int:
        if before is not None and self.bare.startswith(before):
            if first is None or len(before) <= first:
                return len(before)
        if first is None:
            raise LayoutError(f"it can't be seen where answer {number} begins")
        if before is None:
            return first
        reached = [place for place in self.places if place[1] <= first]
        last = list(_PLACE.finditer(before))
        if not reached or not last or int(last[-1][1]) != reached[-1][2]:
            raise LayoutError(f"what it writes before answer {number} depends on what comes after")
        tail, written = before[last[-1].end() :], self.bare[reached[-1][1] : first]
        if written.startswith(tail):
            return reached[-1][1] + len(tail)
        # thoughts that a template opens for the model are dropped from earlier turns
        if tail.startswith(written) and number < len(self.chat.turns) - 1:
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
        has_calls = bool(self.chat.turns[number].tool_calls)
        rest = _PLACE.split(self.bare[after:], maxsplit=1)[0]
        is_begin = upto is not None and self.bare.startswith(upto)
        other = self.bare[after : len(upto or "")] if is_begin else _PLACE.split(upto or "")[-1]
        alike = os.path.commonprefix([other, rest])
        if is_begin and has_calls:  # texts of a call may stand between special tokens
            length = len(alike.rstrip())
            ends = list(self.ends.finditer(alike))
            if not ends or ends[-1].end() < length:
                length += self._length_of_next(number, self.bare[after + length :])
            return after + length
        ends = list(self.ends.finditer(alike))
        if ends:
            end = ends[-1 if has_calls else 0]
            for further in ends[1:]:  # special tokens in a row; the last one ends the sequence
                gap = alike[end.end() : further.start()]
                eos = self.chat.template.tokenizer.eos_token
                if end[0] == eos or gap.strip() or (gap and further[0] != eos):
                    break
                end = further
            return after + end.end()
        # the last answer may end with another token than the ones before
        here, there = (self.ends.search(text) for text in (rest, other))
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
        others = [turn.role for turn in self.chat.turns[number + 1 : number + 2]]
        found = self.ends.match(rest, len(rest) - len(rest.lstrip()))
        template = self.chat.template
        outer = {template.tokenizer.bos_token, template.image_token}
        if not found or others in ([], ["assistant"]) or found[0] in outer:
            return 0
        return found.end()

    def _segments(self, spans: Sequence[tuple[int, int]]) -> Iterator[Segment]:
        """The rendered text, cut at texts, images and borders of what is learnt."""
        borders = sorted(set(itertools.chain(*spans)))
        token = self.chat.template.image_token if self.form == "list" else None
        done = 0
        for start, end, number in [*self.places, (len(self.bare), len(self.bare), -1)]:
            cuts = [done, *(border for border in borders if done < border < start), start]
            for left, right in itertools.pairwise(cuts):
                is_target = _is_in(left, spans)
                text = self.bare[left:right]
                for part in re.split(f"({re.escape(token)})", text) if token else [text]:
                    if part:
                        is_image = part == token
                        yield Segment(part, -1, is_target and not is_image, is_image)
            if number >= 0:
                is_image = self.texts[number].is_image
                yield Segment("", number, _is_in(start, spans) and not is_image, is_image)
            done = end


def _is_in(place: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= place < end for start, end in spans)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"...{text[-57:]}")


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
        try:
            pieces, _ = _Chat(template, turns, tools, options).pieces(form)
        except Exception:  # templates raise what they like
            continue
        for is_target, group in itertools.groupby(pieces, lambda piece: piece.is_target):
            if is_target:
                texts = [_OPEN if piece.is_user else piece.text for piece in group]
                before, _, rest = "".join(texts).rpartition(_OPEN)
                yield before, rest
