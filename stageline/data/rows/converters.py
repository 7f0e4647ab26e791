"""Makes samples of rows that are written in the format of a data set, or finds out which it is."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stageline.data.rows.conversations import (
    OPENAI_TAGS,
    SHAREGPT_TAGS,
    TAGS,
    Message,
    Tags,
    bad_row,
    make_tags,
    names_text,
    read_answer,
    read_messages,
    read_tools,
    shown,
    state_of,
    with_row_weights,
)
from stageline.errors import DataError, UserError

Converter = Callable[[dict[str, Any], str], dict[str, Any]]
# the columns that hold the text of each format; names as in dataset_info.json
_TEXT_COLUMNS = {
    "alpaca": {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "history": "history",
    },
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages", "prompt": "prompt", "response": "completion"},
    "text": {"text": "text"},
}
_SHARED_COLUMNS = ("system", "tools", "images", "videos", "chosen", "rejected", "kto_tag")
_DISTINCTIVE = "messages conversations instruction prompt completion chosen rejected text".split()
_PLACEHOLDER = re.compile(r"(<image>|<video>)")
_KIND = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}


def make_converter(
    formatting: str = "auto",
    *,
    columns: dict[str, str] | None = None,
    tags: dict[str, str] | None = None,
    ranking: bool = False,
) -> Converter:
    """Return a function (row, source) -> sample without id, source and group.

    Args:
        formatting: alpaca, sharegpt, openai, text, or auto: by the columns of each row.
        columns: names of the columns, as in dataset_info.json: prompt, query, response, history,
            messages, system, tools, images, videos, chosen, rejected, kto_tag; null: not there.
            Where one of the text columns is named, those that are not named do not exist.
        tags: words of the messages: role_tag, content_tag, user_tag, assistant_tag,
            observation_tag, function_tag, system_tag.
        ranking: rows are preferences, with the columns chosen and rejected.

    Raises:
        UserError: an unknown format, column or tag.
    """
    columns = dict(columns or {})
    known = [formatting] if formatting in _TEXT_COLUMNS else [*_TEXT_COLUMNS]
    _check_known("the formatting", [formatting], ("auto", *_TEXT_COLUMNS))
    _check_known("a name in `columns`", columns, [*_text_names(known), *_SHARED_COLUMNS])
    _check_known("a name in `tags`", tags or (), TAGS)
    if formatting == "auto" and tags:
        raise UserError(
            f"tags ({', '.join(tags)}) require a formatting. Name it, sharegpt or openai."
        )

    @functools.cache
    def make(formatting: str, messages: str | None = None) -> Callable[..., FormattedRow]:
        """Return `FormattedRow` for a formatting; `messages` is their column if not the usual."""
        text: dict[str, str | None] = {**_TEXT_COLUMNS[formatting]}
        shared = {name: name for name in _SHARED_COLUMNS}
        own = {name: column for name, column in columns.items() if name in {*text, *shared}}
        own |= {} if messages is None else {"messages": messages}
        named = frozenset(name for name, column in own.items() if column)
        if named.intersection(_text_names(_TEXT_COLUMNS)):  # the others do not exist
            text = dict.fromkeys(text)
        return functools.partial(
            FormattedRow,
            formatting=formatting,
            columns={**text, **shared, **{name: column or None for name, column in own.items()}},
            tags=make_tags(formatting, tags),
            ranking=ranking or "chosen" in named,
            named=named,
        )

    def convert(row: dict[str, Any], source: str) -> dict[str, Any]:
        try:
            if not isinstance(row, Mapping):
                raise bad_row(f"the row is {shown(row)}", "an object")
            found = _find_format(columns, row) if formatting == "auto" else (formatting,)
            return _converted(make(*found)(data=row)) if found else dict(row)
        except DataError as error:
            raise DataError(f"{source}: {error}") from None

    return convert


def _text_names(formattings: Iterable[str]) -> list[str]:
    names = [name for formatting in formattings for name in _TEXT_COLUMNS[formatting]]
    return [*dict.fromkeys(names)]


def _check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"{what} is {unknown[0]!r}. One of {', '.join(known)} is possible.")


def _find_format(columns: Mapping[str, str], row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the formatting of a row, and the column of its messages where it is not the usual one.

    Empty for a row whose fields a template takes as they are.
    """
    there = {name for name, value in row.items() if value is not None}
    has = {name for name in _DISTINCTIVE if columns.get(name, name) in there}
    found: list[str] = [name for name in ("messages", "conversations") if name in has]
    if "instruction" in has or {"query", "response"} & columns.keys():
        found.append("instruction")
    if "prompt" in has and {"completion", "chosen"} & has and not found:
        found.append("prompt")
    unclear = f"columns of several formats, {', '.join(found)}"
    if len(found) <= 1:
        unclear = "no column that names its format"
        if found == ["instruction"]:
            return ("alpaca",)
        if found == ["prompt"] or (not found and {"chosen", "rejected"} <= has):
            return ("openai",)
        if not found and {"question", "answer"} <= there:
            return ()
        if not found and "text" in has:
            return ("text",)
        if found:  # the fields of the first message decide
            column = columns.get(found[0], found[0])
            first = row[column][0] if isinstance(row[column], list) and row[column] else None
            fields = set(first) if isinstance(first, Mapping) else set()
            kinds = {"openai": OPENAI_TAGS, "sharegpt": SHAREGPT_TAGS}
            fitting = [kind for kind, tags in kinds.items() if tags.role in fields]
            if len(fitting) == 1:
                is_usual = column == _TEXT_COLUMNS[fitting[0]]["messages"]
                return (fitting[0],) if is_usual else (fitting[0], column)
            unclear = f"messages in {column!r} that begin with {shown(first)}"
    raise bad_row(
        f"the row has {unclear}; seen were {names_text(row)}",
        "one of conversations (from, value), messages (role, content), instruction, prompt "
        "with completion or chosen and rejected, question with answer, text",
        f"give the formatting, one of {', '.join(_TEXT_COLUMNS)}, and the columns",
    )


@dataclass(frozen=True)
class FormattedRow:
    """A row and how it is written."""

    data: Mapping[str, Any]
    formatting: str
    columns: Mapping[str, str | None]  # {our name: the row's column}; None: there is none
    tags: Tags
    ranking: bool  # rows have a chosen and a rejected answer
    named: frozenset[str]  # the columns that the user gave, not the defaults

    def value(self, what: str) -> Any:
        name = self.columns.get(what)
        return None if name is None else self.data.get(name)

    def name(self, what: str) -> str:
        return self.columns.get(what) or what

    @property
    def has_pair(self) -> bool:
        """The set is a ranking, or the row has both answers of a preference."""
        return self.ranking or None not in (self.value("chosen"), self.value("rejected"))

    @property
    def has_label(self) -> bool:
        """The set or the row has a column that marks answers as desirable."""
        return self.value("kto_tag") is not None or "kto_tag" in self.named

    def text(self, what: str, *, is_needed: bool = False) -> str:
        value = self.value(what)
        if isinstance(value, str) or (value is None and not is_needed):
            return value or ""
        is_pair = what == "response" and bool({"chosen", "rejected"} & set(self.data))
        do = "say that the set is a ranking (ranking: true)" if is_pair else ""
        came = f"the column {self.name(what)!r} {state_of(value)}"
        raise bad_row(f"{came}; the row has {names_text(self.data)}", "text", do)

    def messages(self, what: str) -> list[Message]:
        value = with_row_weights(self.data, self.value(what))
        return read_messages(value, self.tags, column=self.name(what))

    def answer(self, what: str) -> list[Message]:
        return read_answer(self.value(what), self.tags, column=self.name(what))


def _converted(row: FormattedRow) -> dict[str, Any]:
    if row.formatting == "text":
        text = row.value("text")
        if isinstance(text, str) and text:
            return {"text": text}
        raise bad_row(f"the column {row.name('text')!r} {state_of(text)}", "text")
    sample = _CONVERT[row.formatting](row)
    if "messages" not in sample:
        return sample
    system, first = row.text("system"), sample["messages"][0]
    if system and first["role"] != "system":
        sample["system"] = system
    elif system and first["content"] != system:
        what = f"the column {row.name('system')!r} is {shown(system)}"
        what += f", and the first message is the system's, {shown(first['content'])}"
        raise bad_row(what, "one of them")
    tools = read_tools(row.value("tools"), column=row.name("tools"))
    if tools:
        sample["tools"] = tools
    return {**sample, **_place_media(sample["messages"], row)}


def _convert_sharegpt(row: FormattedRow) -> dict[str, Any]:
    """Convert a conversation whose speakers take turns, as fine-tuning tools demand."""
    messages, column = row.messages("messages"), row.name("messages")
    # without `ranking` a conversation that ends with an answer is one to learn
    is_pair = row.ranking or (row.has_pair and messages[-1]["role"] in ("user", "tool"))
    start = 1 if messages[0]["role"] == "system" else 0
    for place, message in enumerate(messages[start:]):
        wanted = ("user", "tool") if place % 2 == 0 else ("assistant",)
        if message["role"] not in wanted:
            what = f"message {start + place} of {column!r} is of the {message['role']}"
            raise bad_row(what, f"one of the {' or '.join(wanted)}")
    _check_last(messages, has_answer=not is_pair, column=column)
    return _pair(row, messages) if is_pair else _with_label(messages, row)


def _convert_alpaca(row: FormattedRow) -> dict[str, Any]:
    """Convert instruction, input and output; text where only the prompt's column is named."""
    has_answers = row.columns.get("response") is not None or row.has_pair
    if "prompt" in row.named and not has_answers:
        return {"text": row.text("prompt", is_needed=True)}
    question = "\n".join(part for name in ("prompt", "query") if (part := row.text(name)))
    if not question:
        names = " and ".join(repr(row.name(name)) for name in ("prompt", "query"))
        what = f"the columns {names} are empty or missing; the row has {names_text(row.data)}"
        raise bad_row(what, "text in one of them")
    history = row.value("history") or []
    messages: list[Message] = []
    for pair in history if isinstance(history, list) else [history]:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            what = f"the column {row.name('history')!r} has {shown(pair)}"
            raise bad_row(what, "a list of [question, answer]")
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    messages.append({"role": "user", "content": question})
    if row.ranking or (row.has_pair and row.value("response") is None):
        return _pair(row, messages)
    answer = row.text("response", is_needed=True)
    return _with_label([*messages, {"role": "assistant", "content": answer}], row)


def _convert_openai(row: FormattedRow) -> dict[str, Any]:
    """Convert messages as OpenAI's interface has them, or TRL's rows of prompt and completion."""
    there = [name for name in ("messages", "prompt") if row.value(name) is not None]
    both = f"{row.name('messages')!r} {{}} {row.name('prompt')!r}"
    if len(there) == 2:
        do = 'say which one does not count, such as columns: {"messages": null}'
        raise bad_row(f"the row has both {both.format('and')}", "one of them", do)
    if not there and not row.has_pair:
        what = f"the row has neither {both.format('nor')}, but {names_text(row.data)}"
        raise bad_row(what, "one of them")
    column = there[0] if there else "prompt"
    messages: list[Message] = []
    if column == "prompt" and isinstance(row.value(column), str):
        messages = [{"role": "user", "content": row.value(column)}]
    elif there:
        messages = row.messages(column)
    if row.has_pair:
        return _pair(row, messages)
    if row.value("response") is not None or column != "messages":
        _check_last(messages, has_answer=False, column=row.name(column))
        messages = messages + row.answer("response")
    _check_last(messages, has_answer=True, column=row.name(column))
    # a column `label` may be anything in a row with messages; next to a completion it is a label
    if not row.has_label and "label" in row.data:
        if row.value("response") is not None or says_label(row.data["label"]):
            return {"messages": messages, "label": _label(row.data["label"], "label")}
    return _with_label(messages, row)


_CONVERT = {"alpaca": _convert_alpaca, "sharegpt": _convert_sharegpt, "openai": _convert_openai}


def _pair(row: FormattedRow, prompt: list[Message]) -> dict[str, Any]:
    """Return `messages`, `chosen` and `rejected` of a preference."""
    chosen, rejected = row.answer("chosen"), row.answer("rejected")
    if chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant":
        # the common beginning of two conversations is the prompt; at least the end is the answer
        most, same = min(len(chosen), len(rejected)) - 1, 0
        while same < most and chosen[same] == rejected[same]:
            same += 1
        roles = chosen[same]["role"], rejected[same]["role"]
        if roles != ("assistant", "assistant"):
            what = f"{row.name('chosen')!r} and {row.name('rejected')!r} differ first in message "
            what += f"{same}, of the {' and the '.join(roles)}"
            raise bad_row(what, "the same prompt in both, and then the assistant's answers")
        whole, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        if prompt and whole[-len(prompt) :] != prompt:
            what = f"the prompt is {shown(prompt[-1]['content'])}, and both answers are "
            what += f"conversations that begin with {shown(whole[-1:])}"
            raise bad_row(what, "the same prompt")
        prompt = whole
    _check_last(chosen, has_answer=True, column=row.name("chosen"))
    _check_last(rejected, has_answer=True, column=row.name("rejected"))
    if not prompt:
        wanted = "messages, a prompt, or two conversations with the same beginning"
        raise bad_row("there is no prompt before the chosen and the rejected answer", wanted)
    _check_last(prompt, has_answer=False, column="the prompt")
    return {"messages": prompt, "chosen": chosen, "rejected": rejected}


def _check_last(messages: Sequence[Message], *, has_answer: bool, column: str) -> None:
    """Refuse a conversation that ends with the wrong role, or with an answer without has_answer."""
    role = messages[-1]["role"]
    if has_answer != (role == "assistant") or (not has_answer and role == "system"):
        what = f"the last of {len(messages)} messages of {column!r} is of the {role}"
        raise bad_row(what, "the assistant's" if has_answer else "the user's or a tool's")


def _with_label(messages: list[Message], row: FormattedRow) -> dict[str, Any]:
    label = (row.value("kto_tag"), row.name("kto_tag"))
    return {"messages": messages, **({"label": _label(*label)} if row.has_label else {})}


def _label(value: Any, column: str) -> bool:
    """Return whether an answer is desirable, by the value of a column."""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise bad_row(f"the column {column!r} {state_of(value)}", "true or false")


def says_label(value: Any) -> bool:
    """Tell whether a value can be a label, and not something else of that name."""
    is_word = isinstance(value, str) and value.lower() in ("true", "false")
    return isinstance(value, bool) or is_word


def _place_media(messages: list[Message], row: FormattedRow) -> dict[str, list[Any]]:
    """Turn <image> and <video> in texts into parts; return `images` and `videos` in their order.

    Only where the row has the column are they places; elsewhere, and in answers, they are text.
    Names without a place come before the first message of the user.
    """
    names = {kind: _names(row, kind) for kind in ("video", "image")}
    given = {f"<{kind}>" for kind, value in names.items() if value is not None}
    has_parts = any(isinstance(message["content"], list) for message in messages)
    for message in messages if given and not has_parts else ():
        texts = [text for text in _PLACEHOLDER.split(message["content"]) if text]
        if message["role"] == "assistant" or given.isdisjoint(texts):
            continue
        message["content"] = []
        for is_place, group in itertools.groupby(texts, key=lambda text: text in given):
            if is_place:
                message["content"] += [{"type": text[1:-1]} for text in group]
            else:
                message["content"].append({"type": "text", "text": "".join(group)})
    # put before the text one after the other: images are first
    media = {f"{kind}s": _fill(messages, kind, found or []) for kind, found in names.items()}
    return {kind: found for kind, found in media.items() if found}


def _names(row: FormattedRow, kind: str) -> list[Any] | None:
    """Return the files of a row; a video may be the files of its frames."""
    value = row.value(f"{kind}s")
    if value is None and f"{kind}s" not in row.named:
        value = row.data.get(kind)
    if value is None:
        return None
    value = [value] if isinstance(value, str) else value
    for name in value if isinstance(value, list) else [None]:
        frames = name if kind == "video" and isinstance(name, list) and name else [name]
        if not all(isinstance(frame, str) for frame in frames):
            raise bad_row(f"the {kind}s are {shown(value)}", "a file name or a list of them")
    return value


def _fill(messages: Sequence[Message], kind: str, names: list[Any]) -> list[Any]:
    """Return the names in the order of their places, and remove them from the parts."""
    contents = [one["content"] for one in messages if isinstance(one["content"], list)]
    places = [part for content in contents for part in content if _KIND.get(part["type"]) == kind]
    if not places and names:
        message = next((message for message in messages if message["role"] == "user"), None)
        if message is None:
            raise bad_row("no message is of the user", "one with the row's images")
        content = message["content"]
        text = [{"type": "text", "text": content}] if isinstance(content, str) else content
        message["content"] = [*({"type": kind} for _ in names), *text]
        return names
    own, rest = [file_of_part(part) for part in places], list(names)
    for part in places:
        part.clear()
        part["type"] = kind
    num_open = own.count(None)
    if num_open != len(rest):
        what = f"the row has {num_open} places for {kind}s and {len(rest)} names"
        raise bad_row(what, f"as many places (<{kind}>, or a part) as names")
    return [rest.pop(0) if name is None else name for name in own]


def file_of_part(part: Mapping[str, Any]) -> Any:
    """Return the file that a part of a message names; None where it names none."""
    for key in ("image", "video", "path", "url", "image_url", "video_url"):
        value = part.get(key)
        value = value.get("url") if isinstance(value, Mapping) else value
        if isinstance(value, str | list) and value:
            return value
    return None
