"""Rows of the user's own JSON or JSON-lines files as samples."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from stageline.data.batches.collate_part import ROLES
from stageline.data.images.videos import with_videos
from stageline.data.rows.bad_rows import current_bad_rows
from stageline.data.rows.conversations import says_label
from stageline.data.rows.converters import file_of_part, make_converter
from stageline.data.rows.read_json import Row, RowFileReader, read_rows, text_lines
from stageline.data.rows.readers import (
    RowsDataset,
    check_split,
    dataset_folder,
    find_file,
    split_rows,
)
from stageline.errors import DataError, UserError

_IMAGE_TYPES = ("image", "image_url")
_PROMPT_NAMES = ("question", "prompt", "instruction")
_MEMBERS = ("anchor", "positive", "negatives")  # of a group
# columns that a sample made by a converter has in its own form, or not at all
_CONVERTED = {
    *("conversations", "messages", "chosen", "rejected", "completion", "history", "kto_tag"),
    *("system", "tools", "images", "image", "videos", "video"),
}


class JsonLines(RowsDataset):
    """Your own rows: JSON lines (or a .json list) with question, answer, image, or messages.

    A row is {"question": ..., "answer": ..., "image": "a.png" or ["a.png", "b.png"]}, or
    {"instruction": ..., "input": ..., "output": ...}, or {"messages": [{"role": "user",
    "content": ...}, ...]} for `prompt_fn` chat. Every field can be used in a template by its name.
    Conversations in other words, preferences, labels, tools and videos: docs/data_formats.md.
    dataset_path is a file, or a folder with train.jsonl and test.jsonl.

    Args:
        fields: other names of fields, {"question": "prompt", "answer": "completion"}.
        image_path: folder that image names are relative to; by default that of the file.
        test_size: held-out rows of a single file, as a number, or below 1 as a share; 1.0: all.
        test_path: file of the held-out rows; all of dataset_path is trained then.
        group: field that names the group of a row in reports.
        formatting: how rows are written; auto: by the columns of each.
        columns: names of the columns, {"messages": "dialog"}, as in dataset_info.json.
        tags: words of the messages, {"role_tag": "from", "user_tag": "human"}.
        ranking: rows are preferences (chosen, rejected).
        num_frames: most images that a video becomes.
    """

    kind = "jsonl"

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        fields: dict[str, str] | None = None,
        image_path: str | None = None,
        test_size: int | float = 0.1,
        test_path: str | None = None,
        group: str = "group",
        formatting: Literal["auto", "alpaca", "sharegpt", "openai", "text"] = "auto",
        columns: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        ranking: bool = False,
        num_frames: int = 8,
    ) -> None:
        path = dataset_folder(dataset_path, name=self.kind)
        check_split(split)
        self._fields = dict(fields or {})
        self._group = group
        self._converter = make_converter(formatting, columns=columns, tags=tags, ranking=ranking)
        self._converts_all = formatting != "auto" or bool(columns) or ranking
        self._replaced = _CONVERTED | set((columns or {}).values())
        self._num_frames = num_frames
        if test_path is not None:
            file = Path(test_path) if split == "test" else self._file(path, "train")
            rows = self.read(file)
        elif path.is_dir():
            file = self._file(path, split)
            rows = self.read(file)
        else:
            file = path
            rows = split_rows(self.read(file), split=split, test_size=test_size)
        roots = [Path(image_path)] if image_path else [file.parent, file.parent / "images"]
        self._name = file.stem
        super().__init__(self.samples(rows), image_roots=roots)

    def read(self, file: Path) -> list[Row]:
        """The rows of a file, before they are split."""
        return read_rows(file)

    def samples(self, rows: Sequence[Row]) -> Sequence[Row]:
        """A row for each sample, of the rows of this split."""
        return rows

    @staticmethod
    def _file(path: Path, split: str) -> Path:
        if path.is_file():
            return path
        return find_file(path, (f"{split}.jsonl", f"{split}.json"))

    def __getitem__(self, index: int) -> tuple[list[Image.Image] | None, dict[str, Any]]:
        images, sample = super().__getitem__(index)
        if "videos" not in sample or not self._is_converted(self.rows[index]):
            return images, sample
        options: dict[str, Any] = {"folders": self._folders, "num_frames": self._num_frames}
        return with_videos(sample, images, source=sample["source"], **options)

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        sample = self._converted(row) if self._is_converted(row) else self._plain(row)
        images = image_names(row.source, sample)
        is_pair = "chosen" in sample and "rejected" in sample
        if sample.get("messages") is None and not is_pair and not _has_text(sample):
            raise _missing(row, "answer", "it is what the model learns to write")
        sample["id"] = str(row.data.get("id", f"{self._name}-{row.number}"))
        sample["group"] = str(sample.get(self._group, "all"))
        return images, sample

    def _is_converted(self, row: Row) -> bool:
        """Whether a row is read by the converter; not what a template can be filled with."""
        return self._converts_all or (not self._fields and _needs_converter(row.data))

    def _converted(self, row: Row) -> dict[str, Any]:
        """The converter's sample, and the row's other fields beside it."""
        rest = {name: value for name, value in row.data.items() if name not in self._replaced}
        return {**rest, **self._converter(row.data, row.source)}

    def _plain(self, row: Row) -> dict[str, Any]:
        sample = dict(row.data)
        for name, own in self._fields.items():
            if own not in row.data:
                raise _missing(row, own, f"it is to be the {name} (`dataset.fields`)")
            sample[name] = row.data[own]
        if "instruction" in sample:
            extra = f"\n{sample['input']}" if sample.get("input") else ""
            sample.setdefault("question", f"{sample['instruction']}{extra}")
            sample.setdefault("answer", sample.get("output"))
        return sample


def _needs_converter(data: dict[str, Any]) -> bool:
    """Whether a row has what neither a template nor `messages` as they are can say."""
    there = {name for name, value in data.items() if value not in (None, "", [])}
    if {"chosen", "rejected"} <= there and isinstance(data["chosen"], str) and "question" in there:
        return False  # the answers of a template
    if "conversations" in there or {"chosen", "rejected"} <= there:
        return True
    if {"messages", "instruction"} <= there:
        return True  # refused there: which one is it?
    if {"prompt", "completion"} <= there and not _has_text(data):
        return True
    if "instruction" in there:
        return bool({"history", "tools", "kto_tag", "videos"} & there)
    messages = data.get("messages")
    if not isinstance(messages, list):
        return False
    has_label = "kto_tag" in there or says_label(data.get("label"))
    return has_label or bool({"tools", "videos"} & there) or any(map(_calls, messages))


def _calls(message: Any) -> bool:
    """Whether a message is part of a call of a function."""
    return isinstance(message, dict) and (
        bool(message.get("tool_calls") or message.get("function_call"))
        or message.get("role") in ("tool", "function")
    )


def _has_text(sample: dict[str, Any]) -> bool:
    """Whether there is something that a template can learn."""
    learnt = (sample.get(name) for name in ("answer", "caption", "text"))
    return any(isinstance(value, str | int | float) for value in learnt)


def image_names(source: str, sample: dict[str, Any]) -> list[str] | None:
    """Names of the images: of the row, and else of the parts of its messages."""
    names = sample.get("images", sample.get("image"))
    names = [names] if isinstance(names, str) else names
    if names is None:
        names = list(_message_images(sample.get("messages")))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{source}: the image is {names!r}. A file name or a list of them was expected, "
            "because images are read from files: correct the row."
        )
    unread = {"videos", "audios"} if names else {"videos", "video", "audios", "audio"}
    unread -= {"videos"} if "video" in _part_kinds(sample.get("messages")) else set()
    if there := sorted(name for name in unread if sample.get(name)):
        raise DataError(
            f"{source}: the row has {there[0]}, which its text has no place for. Images were "
            "expected, or videos beside messages or an instruction, because nothing else is shown "
            "to the model: write it so, or take the field out."
        )
    return names or None


def _part_kinds(messages: Any) -> set[Any]:
    """The types of the content parts of messages."""
    contents = [one.get("content") for one in messages or () if isinstance(one, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return {part.get("type") for part in parts if isinstance(part, dict)}


def _message_images(messages: Any) -> list[Any]:
    """File names in content parts: {"type": "image", "image": "a.png"}, or an image_url."""
    found = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and part.get("type") in _IMAGE_TYPES:
                found.append(file_of_part(part))
    return [name for name in found if name]


def _missing(row: Row, field: str, reason: str) -> DataError:
    return DataError(
        f"{row.source}: the field {field!r} is missing. Text was expected in it, because {reason}; "
        f"the row has the fields {', '.join(sorted(row.data)) or 'none'}. Correct the row, or name "
        'its fields with `dataset.fields` \'{"question": "...", "answer": "..."}\'.'
    )


class PromptRows(RowsDataset):
    """What is asked, a sample a prompt; its answer is empty unless the row has one.

    A row is {"question": ...} (or prompt, or instruction and input) with "image" if there is one,
    or {"messages": [...]}. Its `id` is its own, or made of its place and its content, so that a
    prompt that was changed is answered anew.

    Args:
        texts: the prompts themselves.
        path: a file of them: .jsonl or .json with rows; any other has one prompt a line.
    """

    def __init__(self, texts: Sequence[str] = (), *, path: str | Path | None = None) -> None:
        rows = [Row(text, f"`text` {place}", place) for place, text in enumerate(texts, start=1)]
        self._name = "text"
        roots: list[Path] = []
        if path is not None:
            file = Path(path)
            self._name = file.stem
            roots = [file.parent, file.parent / "images"]
            rows += read_rows(file) if file.suffix in (".jsonl", ".json") else _lines(file)
        super().__init__(rows, image_roots=roots)

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        sample = {"question": row.data} if isinstance(row.data, str) else dict(row.data)
        name = next((name for name in _PROMPT_NAMES if isinstance(sample.get(name), str)), None)
        if sample.get("messages") is not None:
            sample.setdefault("question", _last_text(sample["messages"]))
        elif name is None:
            raise DataError(
                f"{row.source}: the row asks nothing. Text in one of the fields "
                f"{', '.join(_PROMPT_NAMES)}, or messages, was expected, because it is what is "
                f"answered; the row has the fields {', '.join(sorted(sample)) or 'none'}: correct "
                "the row."
            )
        else:
            extra = sample.get("input") if name == "instruction" else None
            sample["question"] = sample[name] + (f"\n{extra}" if extra else "")
            sample.setdefault("answer", "")  # a template may have a place for it
        content = json.dumps(row.data, sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        sample["id"] = str(sample.get("id", f"{self._name}-{row.number}-{digest}"))
        return image_names(row.source, sample), sample


def _lines(file: Path) -> list[Row]:
    """A prompt a line; empty lines ask nothing."""
    lines = text_lines(RowFileReader(file))
    rows = [Row(text.strip(), source, number) for text, source, number in lines]
    if not rows:
        raise DataError(f"{file} holds no prompt. A line with text was expected: write one.")
    return rows


def _last_text(messages: Any) -> str:
    """What was asked last, for the screen and for comparing."""
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            return content if isinstance(content, str) else json.dumps(content)
    return ""


class Groups(JsonLines):
    """Your own groups: a line is {"anchor": {...}, "positive": {...}, "negatives": [{...}, ...]}.

    Each member is a row as jsonl takes it (question, answer, image ...); fields beside the three
    are shared by all members. A group is rows in the order anchor, positive, negatives.

    Args:
        num_negatives: take the first so many of each group; by default all, which must be the same
            number in each group.
        fields: other names of fields, {"question": "prompt", "answer": "completion"}.
        image_path: folder that image names are relative to; by default that of the file.
        test_size: held-out groups of a single file, as a number, or below 1 as a share; 1.0: all.
        test_path: file of the held-out groups; all of dataset_path is trained then.
        group: field that names the group of a row in reports.
    """

    kind = "groups"

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        num_negatives: int | None = None,
        fields: dict[str, str] | None = None,
        image_path: str | None = None,
        test_size: int | float = 0.1,
        test_path: str | None = None,
        group: str = "group",
    ) -> None:
        if num_negatives is not None and num_negatives < 1:
            raise UserError(
                f"`dataset.num_negatives` {num_negatives}: at least 1 was expected, because an "
                "anchor's positive is compared with negatives."
            )
        self._num_negatives = num_negatives
        self._first = ""  # the group that says how many there are, where no option does
        super().__init__(
            dataset_path=dataset_path,
            split=split,
            fields=fields,
            image_path=image_path,
            test_size=test_size,
            test_path=test_path,
            group=group,
        )
        self.rows = _whole(self.rows, self.group_size)

    @property
    def group_size(self) -> int:
        assert self._num_negatives is not None, "known once the file is read"
        return 2 + self._num_negatives

    def read(self, file: Path) -> list[Row]:
        """The groups of a file; their number of negatives is that of the first good one."""
        good = []
        for row in read_rows(file):
            try:
                self._check(row)
            except DataError as error:
                current_bad_rows().take(row.source, error)
                continue
            good.append(row)
        return good

    def samples(self, rows: Sequence[Row]) -> list[Row]:
        return [member for row in rows for member in self._members(row)]

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        place = f"{row.source} ({row.data['member']})"
        images, sample = super().convert(replace(row, source=place))
        del sample["member"]
        return images, sample

    def _members(self, row: Row) -> Iterable[Row]:
        shared = {name: value for name, value in row.data.items() if name not in _MEMBERS}
        group = str(shared.pop("id", f"{self._name}-{row.number}"))
        negatives = row.data["negatives"][: self._num_negatives]
        for place, own in enumerate([row.data["anchor"], row.data["positive"], *negatives]):
            role = ROLES[min(place, 2)]
            member = role if place < 2 else f"{role} {place - 1}"
            facts = {"contrast_group": group, "role": role, "member": member}
            name = own.get("id", f"{group}-{member.replace(' ', '-')}")
            yield replace(row, data={**shared, **own, **facts, "id": name})

    def _check(self, row: Row) -> None:
        for name in ("anchor", "positive"):
            if not isinstance(row.data.get(name), dict):
                raise _wrong(row, name, "an object with question, answer, image ...")
        negatives = row.data.get("negatives")
        if not isinstance(negatives, list) or not negatives:
            raise _wrong(row, "negatives", "a list of at least one object")
        if not all(isinstance(negative, dict) for negative in negatives):
            raise _wrong(row, "negatives", "a list of objects")
        count = len(negatives)
        if self._num_negatives is None:
            self._num_negatives, self._first = count, row.source
        wanted = self._num_negatives
        if count == wanted or (count > wanted and not self._first):
            return
        why = f"as in {self._first}" if self._first else f"as `dataset.num_negatives` {wanted} says"
        raise DataError(
            f"{row.source}: the group has {count} negatives, {wanted} were expected, {why}, "
            "because batches hold whole groups of one size. Correct the row, or take the first few "
            "of each with `dataset.num_negatives`."
        )


def _whole(rows: Sequence[Row], size: int) -> list[Row]:
    """Without the rest of groups of which a member was bad; neighbours have the same source."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.source] = counts.get(row.source, 0) + 1
    whole = [row for row in rows if counts[row.source] == size]
    if not whole:
        raise DataError(
            f"no whole group is left of {len(counts)}, because each has a bad member. At least one "
            f"was expected:\n{current_bad_rows().listed(5)}"
        )
    return whole


def _wrong(row: Row, field: str, expected: str) -> DataError:
    value = row.data.get(field)
    what = "is missing" if value is None else f"is {repr(value)[:60]}"
    return DataError(
        f"{row.source}: {field!r} {what}. {expected.capitalize()} was expected, because a line is "
        "one group of anchor, positive and negatives; the line has the fields "
        f"{', '.join(sorted(row.data)) or 'none'}. Correct the row."
    )
