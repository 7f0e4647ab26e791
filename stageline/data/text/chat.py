"""Renders turns with the model's own chat template, and knows where each character came from.

The template also runs on messages whose texts are between private marks, which show where the
texts of the data are. They must be there as they are, trimmed, or escaped as in JSON.

An answer begins where the prompt for generation ends, and ends with its end-of-turn token. Both are
found by rendering only the messages before it, or up to it. The places of texts and answers depend
on the structure of a conversation and are kept: a further sample of the same structure costs one
render.
"""

import itertools
import os.path
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from stageline.data.text.chat_template import (
    ChatTemplate,
    Message,
    fitting_templates,
    template_of,
    use_template,
)
from stageline.data.text.messages import SYSTEM_ROLES, Tool, Turn, as_json, forms_of
from stageline.data.text.processor import get_tokenizer
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, UserError

Learnt = Literal["answers", "all", "all_but_system"]
Form = Literal["text", "list"]  # form of a message's content
Part = Literal["content", "reasoning", "call", "other"]
TOOLS = -1  # in place of the number of a turn
_OPEN, _CLOSE, _BEGIN = "\ue000", "\ue001", "\ue002"
_MARKED = re.compile(f"{_OPEN}([0-9]+){_BEGIN}[^{_CLOSE}]*{_CLOSE}")  # number and text
_PLACE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")  # the same without the text
_NO_MARKS = dict.fromkeys(map(ord, (_OPEN, _CLOSE, _BEGIN)))
_LEFT_OUT = "it leaves out or changes"  # first words of a reason
_MOST_LAYOUTS = 256
_has_warned: set[tuple[str, str]] = set()


class DataText(NamedTuple):
    """A text of the data: of which turn, and which part of it."""

    turn: int
    part: Part
    text: str
    is_image: bool = False
    is_answer: bool = False


class Segment(NamedTuple):
    """A stretch of the rendered text: what the template wrote, or the text of that number."""

    text: str = ""
    number: int = -1
    is_target: bool = False
    is_image: bool = False


@dataclass(frozen=True)
class Layout:
    """The rendered text of a structure, cut up."""

    segments: tuple[Segment, ...]
    end: str = ""  # an end-of-sequence token to add behind the last segment in the loss
    notes: tuple[str, ...] = ()  # warnings for the user


class LayoutError(Exception):
    """The template cannot be followed."""


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
    """Write the conversation with the model's chat template.

    In target turns, all tokens after the prompt for generation up to and including the end-of-turn
    token are in the loss. Where the template has none after the last answer, the tokenizer's
    end-of-sequence token is added: else the model could not learn to stop. A template with
    {% generation %} marks decides itself. `learnt` puts the answers in the loss, or everything but
    images, with the system message or without.

    Args:
        for_generation: end with what the template puts before an answer.
        template_options: variables of the template, such as enable_thinking.
        source: the row, by its file and line.

    Raises:
        DataError: the template itself refuses the row (raise_exception).
        UserError: there is no chat template, or it changes contents.
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
            except Exception as error:  # templates can raise any exception
                is_ours = isinstance(error, LayoutError)
                reasons.append(str(error) if is_ours else f"{type(error).__name__}: {error}")
                continue
            for text in (note, *notes):
                if text and (template.name, text) not in _has_warned:
                    _has_warned.add((template.name, text))
                    warnings.warn(f"the chat template of {template.name}: {text}.", stacklevel=3)
            return Rendered(tuple(pieces), is_chat=True, for_generation=for_generation)
    # A reason that begins with _LEFT_OUT may only mean that the template takes the other form.
    others = [reason for reason in reasons if not reason.startswith(_LEFT_OUT)] or reasons
    refused = next((one for one in others if one.startswith("TemplateError: ")), None)
    if refused and source:  # by its raise_exception
        raise DataError(
            f"{source}: the chat template of {template.name} refuses the conversation: "
            f"{refused.partition(': ')[2]}. Correct the row, or use another template."
        )
    names = ", ".join(fitting_templates(template.tokenizer))
    raise UserError(
        f"the chat template of {template.name} cannot be followed{source and f' in {source}'}: "
        f"{'; '.join(dict.fromkeys(others))}. Use `prompt_fn.template` (its tokens fit {names}), "
        "other `prompt_fn.template_options` (enable_thinking ...), another chat_template.jinja in "
        "the folder of `processor_path`, or rows without what the template does not write."
    )


class _Writer:
    """Writes messages and tools for a template, with something in place of each text of the data.

    These are all contents but tags such as <think>, which templates look for, reasoning, names and
    texts of tool calls, and whatever else could become a special token. Empty texts stay: templates
    ask whether there is one. `put` returns what stands in place of (number, text).
    """

    def __init__(self, chat: "_Chat", form: Form, put: Callable[[int, str], str]) -> None:
        self.template = chat.template
        self.form = form
        self.put = put
        self.texts: list[DataText] = []
        self.messages = [self._message(number, turn) for number, turn in enumerate(chat.turns)]
        self.tools = [self._tree(TOOLS, "other", tool, only_risky=True) for tool in chat.tools]

    def _put(self, turn: int, part: Part, text: str, **kind: bool) -> str:
        self.texts.append(DataText(turn, part, text, **kind))
        return self.put(len(self.texts) - 1, text)

    def _message(self, number: int, turn: Turn) -> Message:
        message: Message = {"role": turn.role, "content": self._content(number, turn)}
        for name, value in (("name", turn.name), ("tool_call_id", turn.tool_call_id)):
            if value:
                message[name] = self._tree(number, "other", value, only_risky=True)
        if turn.reasoning:
            message["reasoning_content"] = self._tree(number, "reasoning", turn.reasoning)
        if turn.tool_calls:
            message["tool_calls"] = [self._call(number, call) for call in turn.tool_calls]
        return message

    def _content(self, number: int, turn: Turn) -> str | list[dict[str, str]]:
        is_answer = turn.is_target and not turn.tool_calls and not turn.reasoning
        is_whole = is_answer and len(turn.pieces) == 1
        parts: list[dict[str, str]] = []
        for piece in turn.pieces:
            text = piece.text
            if piece.is_image and self.form == "list":
                parts.append({"type": "image"})
                continue
            if piece.is_image:
                text = self._put(number, "content", text, is_image=True)
            elif piece.is_user and (text.strip() or is_whole):
                text = "".join(
                    part
                    if is_tag
                    else self._put(number, "content", part, is_answer=piece.is_answer)
                    for part, is_tag in self.template.cut_at_tags(text)
                )
            if parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += text
            else:
                parts.append({"type": "text", "text": text})
        return parts if self.form == "list" else "".join(part["text"] for part in parts)

    def _call(self, number: int, call: Tool) -> Tool:
        function = {
            name: self._tree(number, "call", value) for name, value in call["function"].items()
        }
        made = {**call, "function": function}
        if "id" in call:
            made["id"] = self._tree(number, "call", call["id"], only_risky=True)
        return made

    def _tree(self, number: int, part: Part, value: Any, *, only_risky: bool = False) -> Any:
        """Write a value of JSON."""
        if isinstance(value, str):
            is_put = self.template.is_risky(value) if only_risky else bool(value.strip())
            return self._put(number, part, value) if is_put else value
        if isinstance(value, dict):
            keys = [self._tree(number, part, key, only_risky=True) for key in value]
            items = self._tree(number, part, [*value.values()], only_risky=only_risky)
            return dict(zip(keys, items, strict=True))
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
        """Return what the template writes, in pieces; and warnings."""
        official = self.render(_Writer(self, form, lambda number, text: text))
        shape = _Writer(self, form, lambda number, text: f"{_OPEN}{number}")
        targets = [turn.is_target for turn in self.turns]
        structure = [shape.messages, shape.tools, targets, self.learnt]
        key = repr([form, structure, self.options, self.for_generation])
        layout = self.template.layouts.get(key)
        texts = layout and _texts_in(official, layout, shape.texts)
        if layout is None or texts is None:
            layout = _Finder(self, form).layout()
            texts = _texts_in(official, layout, shape.texts)
            if texts is None:
                raise LayoutError(f"{_LEFT_OUT} contents")
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
        if layout.end:  # behind the last piece in the loss, for blanks behind it if any
            last = max(place for place, piece in enumerate(pieces) if piece.is_target)
            if not "".join(piece.text for piece in pieces[last + 1 :]).strip():
                del pieces[last + 1 :]
            pieces.insert(last + 1, Piece(layout.end, is_target=True))
        return [piece for piece in pieces if piece.text or piece.is_image], layout.notes

    def render(
        self, writer: _Writer, count: int | None = None, *, for_generation: bool | None = None
    ) -> str:
        """Return what the template writes of the first `count` messages."""
        asks = self.for_generation if for_generation is None else for_generation
        return self.template(
            writer.messages[:count], tools=writer.tools, options=self.options, for_generation=asks
        )


def _texts_in(official: str, layout: Layout, texts: Sequence[DataText]) -> list[str] | None:
    """Return the text of each segment as the template wrote it; None where it wrote another."""
    found = [texts[part.number].text if part.number >= 0 else part.text for part in layout.segments]
    if "".join(found) == official:
        return found
    place = 0
    for index, part in enumerate(layout.segments):
        if part.number >= 0:
            text, behind = found[index], layout.segments[index + 1 :][:1]
            found[index] = _as_written(official, place, text, behind[0].text if behind else "")
        if not official.startswith(found[index], place):
            return None
        place += len(found[index])
    return found if place == len(official) else None


def _as_written(official: str, place: int, text: str, behind: str) -> str:
    """Return a text of the data as it is at a place: escaped, or with those blanks that stayed."""
    core = text.strip()
    for quoted in (as_json(text), as_json(core), repr(text)):
        escaped = quoted[1:-1]
        if escaped not in (text, core) and official.startswith(escaped, place):
            return escaped
    start = len(official) - len(official[place:].lstrip())
    if not official.startswith(core, start):
        return text
    rest = official[start + len(core) :]
    num_blanks = len(rest) - len(rest.lstrip()) - (len(behind) - len(behind.lstrip()))
    return official[place : max(start + len(core) + num_blanks, place)]


class _Finder:
    """Finds where the answers of one conversation are, from what the template makes of marks."""

    def __init__(self, chat: _Chat, form: Form) -> None:
        self.chat, self.template, self.turns = chat, chat.template, chat.turns

        def marked(number: int, text: str) -> str:
            return f"{_OPEN}{number}{_BEGIN}{text.strip().translate(_NO_MARKS)}{_CLOSE}"

        self.writer = _Writer(chat, form, marked)
        self.texts = self.writer.texts
        self.full = chat.render(self.writer)
        self.bare = _bare(self.full)
        self.ends = chat.template.end_pattern
        self.notes: list[str] = []
        self.places = [
            (found.start(), found.end(), int(found[1])) for found in _PLACE.finditer(self.bare)
        ]

    def layout(self) -> Layout:
        """Return where texts and answers are."""
        turns, written = self.turns, {self.texts[number].turn for _, _, number in self.places}
        for text in self.texts:
            if text.turn not in {*written, TOOLS} and turns[text.turn].role != "assistant":
                raise LayoutError(f"{_LEFT_OUT} message {text.turn}, of {turns[text.turn].role}")
        spans, end = ([], "") if self.chat.for_generation else self._targets()
        segments = tuple(self._segments(spans))
        num_images = sum(piece.is_image for turn in turns for piece in turn.pieces)
        if sum(segment.is_image for segment in segments) != num_images:
            raise LayoutError(f"it does not write {num_images} images")
        return Layout(segments, end, tuple(self.notes))

    def _targets(self) -> tuple[list[tuple[int, int]], str]:
        """Return the spans in the loss, and the end-of-sequence token to add behind the last."""
        targets = [number for number, turn in enumerate(self.turns) if turn.is_target]
        for number in targets:
            self._check_answer(number)
        end = ""
        if self.template.has_markers:
            spans = self._marked(targets)
        else:
            found = [self._span(number) for number in targets]
            spans = [(start, stop) for start, _, stop in found]
            lacking = [
                number
                for number, (_, text_end, stop) in zip(targets, found, strict=True)
                if not self.ends.search(self.bare, text_end, stop)
            ]
            if lacking[-1:] == [len(self.turns) - 1]:
                end = self.template.tokenizer.eos_token or ""
            if len(lacking) > bool(end):
                self.notes.append(
                    "no token ends its turns, so the model does not learn to stop after answers "
                    "that something follows"
                )
        if self.chat.learnt == "answers":
            return spans, end
        first = 0
        if self.chat.learnt == "all_but_system":
            others = (
                start
                for start, _, number in self.places
                if (turn := self.texts[number].turn) != TOOLS
                and self.turns[turn].role not in SYSTEM_ROLES
            )
            first = next(others, 0)
        return [(first, spans[-1][1] if end else len(self.bare))], end

    def _check_answer(self, number: int) -> None:
        """Refuse a template that drops what is in the loss; thoughts of earlier turns may go."""
        hidden = {text.part for text in self.texts if text.turn == number}
        written = {self.texts[place[2]].part for place in self._own(number)}
        if "call" in hidden - written:
            raise LayoutError(f"it writes no tool calls, which message {number} has")
        if hidden and not written:
            raise LayoutError(f"{_LEFT_OUT} answer {number}")
        if "reasoning" in hidden - written and number == len(self.turns) - 1:
            raise LayoutError("it does not write the reasoning_content of the last answer")
        if "content" in hidden - written:
            self.notes.append("it leaves out the content of messages with tool calls")

    def _own(self, number: int) -> list[tuple[int, int, int]]:
        return [place for place in self.places if self.texts[place[2]].turn == number]

    def _marked(self, targets: list[int]) -> list[tuple[int, int]]:
        """Return the spans of the targets that the template itself marks."""
        marks = self.template.marked_spans(
            self.writer.messages, tools=self.writer.tools, options=self.chat.options
        )
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for mark in marks:
            start, end = (len(_bare(self.full[:place])) for place in mark)
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
        """Return where an answer begins, and where its last text and its end-of-turn token end."""
        upto: str | None = self.bare
        if number < len(self.turns) - 1:
            upto = self._beginning(number + 1, for_generation=False)
        own = self._own(number)
        if upto is not None:  # a tool's result may repeat the name of the call
            there = [self.texts[int(found[1])].turn for found in _PLACE.finditer(upto)]
            own = own[: there.count(number)]
        if not own:
            raise LayoutError(f"it does not show where answer {number} begins")
        text_end = own[-1][1]
        return self._start(number, own[0][0]), text_end, self._end(number, upto, text_end)

    def _beginning(self, count: int, *, for_generation: bool) -> str | None:
        """Render only the first messages; None where the template does not take them."""
        try:
            return _bare(self.chat.render(self.writer, count, for_generation=for_generation))
        except Exception:  # templates can raise any exception
            return None

    def _start(self, number: int, first: int) -> int:
        """Return where an answer begins, of which `first` is the first text."""
        before = self._beginning(number, for_generation=True) if number else None
        if before is None:
            return first
        # the template's text between the last text before the answer and its first one
        written, asked = (
            _PLACE.split(text)[-2:] if _PLACE.search(text) else ["", text]
            for text in (self.bare[:first], before)
        )
        if written[0] != asked[0]:
            raise LayoutError(f"what it writes before answer {number} depends on what comes after")
        if written[1].startswith(asked[1]):
            return first - len(written[1]) + len(asked[1])
        # thoughts that a template opens for the model are dropped from earlier turns
        if asked[1].startswith(written[1]) and number < len(self.turns) - 1:
            return first
        raise LayoutError(
            f"before answer {number} it writes {written[1][-60:]!r}, but for generation "
            f"{asked[1][-60:]!r}, so that the model would learn what it is never asked for"
        )

    def _end(self, number: int, upto: str | None, after: int) -> int:
        """Return the place behind the end-of-turn token; without one, behind the text.

        `upto` are the messages up to this one, `after` is the end of its last text.
        """
        has_calls = bool(self.turns[number].tool_calls)
        rest = _PLACE.split(self.bare[after:], maxsplit=1)[0]
        is_begin = upto is not None and self.bare.startswith(upto)
        other = self.bare[after : len(upto or "")] if is_begin else _PLACE.split(upto or "")[-1]
        alike = os.path.commonprefix([other, rest])
        ends = list(self.ends.finditer(alike))
        if is_begin and has_calls:  # texts of a call may stand between special tokens
            length = len(alike.rstrip())
            if not ends or ends[-1].end() < length:
                length += self._length_of_next(number, self.bare[after + length :])
            return after + length
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
        here, there = (self.ends.search(text) for text in (rest, other))
        if here and there and rest[: here.start()] == other[: there.start()]:
            return after + here.end()
        next_length = self._length_of_next(number, rest)
        if has_calls and not next_length:
            raise LayoutError(f"it does not show where answer {number} ends")
        return after + next_length

    def _length_of_next(self, number: int, rest: str) -> int:
        """Return how much of what follows is the special token that begins the next message.

        Templates without a token of their own for the end of a turn (GLM-4.5) stop there.
        """
        others = [turn.role for turn in self.turns[number + 1 : number + 2]]
        found = self.ends.match(rest, len(rest) - len(rest.lstrip()))
        outer = {self.template.tokenizer.bos_token, self.template.image_token}
        if not found or others in ([], ["assistant"]) or found[0] in outer:
            return 0
        return found.end()

    def _segments(self, spans: Sequence[tuple[int, int]]) -> Iterator[Segment]:
        """Yield the rendered text, cut at texts, images and borders of what is in the loss."""

        def is_in_loss(place: int) -> bool:
            return any(start <= place < end for start, end in spans)

        borders = sorted(set(itertools.chain(*spans)))
        token = self.template.image_token if self.writer.form == "list" else None
        done = 0
        for start, end, number in [*self.places, (len(self.bare), len(self.bare), -1)]:
            cuts = [done, *(border for border in borders if done < border < start), start]
            for left, right in itertools.pairwise(cuts):
                text = self.bare[left:right]
                for part in re.split(f"({re.escape(token)})", text) if token else [text]:
                    if part:
                        is_image = part == token
                        yield Segment(part, -1, is_in_loss(left) and not is_image, is_image)
            if number >= 0:
                is_image = self.texts[number].is_image
                yield Segment("", number, is_in_loss(start) and not is_image, is_image)
            done = end


def _bare(text: str) -> str:
    """Return what a template wrote with places for the marked texts."""
    return _MARKED.sub(rf"{_OPEN}\1{_CLOSE}", text)


def prepare_chat(processor: Any, *, template: str | None = None, **others: Any) -> None:
    """Give a processor the chat template of that name, and the end of its turns as eos_token.

    Else an answer would never end for who asks the tokenizer only. A tokenizer whose eos_token the
    template itself writes keeps it.
    """
    use_template(processor, template=template)
    tokenizer, ends = get_tokenizer(processor), turn_ends(processor)
    if ends and tokenizer.eos_token not in ends and "eos_token" not in str(template_of(processor)):
        tokenizer.eos_token = ends[0]


def stop_ids_with(of_model: list[int] | int | None, processor: Any) -> list[int]:
    """Return the ids that end an answer: of the model, of its tokenizer, and of its chat template.

    Those of the template count where the tokenizer's own end is one of them (`prepare_chat`): the
    model may never have seen the template of other tokenizers.
    """
    tokenizer = get_tokenizer(processor)
    ids = of_model if isinstance(of_model, list) else [of_model]
    ends = turn_ends(processor)
    if tokenizer.eos_token in ends:
        ids = [*ids, *(tokenizer.convert_tokens_to_ids(end) for end in ends)]
    return sorted({int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None})


def turn_ends(processor: Any) -> tuple[str, ...]:
    """Return the tokens that end an answer in the chat template, a plain answer's first.

    They are the last special tokens in the loss of small conversations with thoughts and calls. A
    token that also comes before the end of another answer (`<|end|>` behind thoughts) is not one.
    """
    if not template_of(processor):
        return ()
    try:
        template = ChatTemplate.of(processor)
    except UserError:  # rendering with this template raises the error
        return ()
    if template.turn_ends is None:
        found = list(_learnt_in_samples(template))
        inner = {token for text, _ in found for token in template.end_pattern.findall(text)}
        ends = [tokens[-1] for _, rest in found if (tokens := template.end_pattern.findall(rest))]
        template.turn_ends = tuple(token for token in dict.fromkeys(ends) if token not in inner)
    return template.turn_ends


def _learnt_in_samples(template: ChatTemplate) -> Iterator[tuple[str, str]]:
    """Yield what is in the loss of small conversations: up to an answer's last text, and behind."""
    tool = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    function = {"name": "look", "arguments": {"place": "there"}}
    call: Tool = {"type": "function", "function": function, "id": "abcdefghi"}
    text = (Piece("a", is_user=True),)
    asked, result = Turn("user", text), Turn("tool", text, tool_call_id="abcdefghi")
    told = Turn("assistant", text, is_target=True)
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
        except Exception:  # templates can raise any exception
            continue
        for is_target, group in itertools.groupby(pieces, lambda piece: piece.is_target):
            if is_target:
                texts = [_OPEN if piece.is_user else piece.text for piece in group]
                before, _, rest = "".join(texts).rpartition(_OPEN)
                yield before, rest
