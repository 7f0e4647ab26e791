"""Rows of the user's own JSON or JSON-lines files as samples."""

import collections
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from stageline.data.batches.collate_part import ROLES
from stageline.data.rows.bad_rows import current_bad_rows
from stageline.data.rows.conversations import IMAGE_TYPES, names_text, state_of
from stageline.data.rows.converters import file_of_part, make_converter, says_label
from stageline.data.rows.read_rows import Row, read_rows
from stageline.data.rows.readers import (
    RowsDataset,
    check_split,
    dataset_folder,
    find_file,
    split_rows,
)
from stageline.errors import DataError, UserError

_PROMPT_NAMES = ("question", "prompt", "instruction")
_PLACE = "<image>"  # where a format of messages has an image
_MEMBERS = ("anchor", "positive", "negatives")  # members of a group
# columns that a sample made by a converter has in its own form, or not at all
_CONVERTED = set(
    "conversations messages chosen rejected completion history kto_tag system tools images image "
    "videos video".split()
)


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
        self._fields, self._group = dict(fields or {}), group
        self._converter = make_converter(formatting, columns=columns, tags=tags, ranking=ranking)
        self._converts_all = formatting != "auto" or bool(columns) or ranking
        self._replaced = _CONVERTED | set((columns or {}).values())
        file = path
        if test_path is not None and split == "test":
            file = Path(test_path)
        elif not path.is_file():
            name = "train" if test_path is not None else split
            file = find_file(path, (f"{name}.jsonl", f"{name}.json"))
        rows, self._name = self.read(file), file.stem
        if test_path is None and path.is_file():
            rows = split_rows(rows, split=split, test_size=test_size)
        roots = [Path(image_path)] if image_path else [file.parent, file.parent / "images"]
        super().__init__(self.samples(rows), image_roots=roots, num_frames=num_frames)

    def read(self, file: Path) -> list[Row]:
        """Return the rows of a file, before they are split."""
        return read_rows(file)

    def samples(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return a row for each sample, of the rows of this split."""
        return rows

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        # a row of a format is read by the converter; not what a template can be filled with
        if self._converts_all or (not self._fields and _needs_converter(row.data)):
            data = dict(row.data)
            if isinstance(data.get("image"), str) and not data.get("images"):
                data["images"] = [data["image"]]
            rest = {name: value for name, value in data.items() if name not in self._replaced}
            sample = {**rest, **self._converter(data, row.source)}
        else:
            sample = dict(row.data)
            for name, own in self._fields.items():
                if own not in row.data:
                    raise _missing(row, own, f"the {name} by `dataset.fields`")
                sample[name] = row.data[own]
            if "instruction" in sample:
                extra = f"\n{sample['input']}" if sample.get("input") else ""
                sample.setdefault("question", f"{sample['instruction']}{extra}")
                sample.setdefault("answer", sample.get("output"))
        images = image_names(row.source, sample)
        if images and _PLACE in str(sample.get("question", "")):
            raise DataError(
                f"{row.source}: the question has {_PLACE}, and its image is put where the template "
                "has [IMAGE]. Take it out, or write messages, where it marks the place."
            )
        is_pair = "chosen" in sample and "rejected" in sample
        if sample.get("messages") is None and not is_pair and not _has_text(sample):
            raise _missing(row, "answer", "the text to train on")
        sample["id"] = str(row.data.get("id", f"{self._name}-{row.number}"))
        sample["group"] = str(sample.get(self._group, "all"))
        return images, sample


def _needs_converter(data: dict[str, Any]) -> bool:
    """Tell whether a row has what neither a template nor `messages` as they are can express."""
    there = {name for name, value in data.items() if value not in (None, "", [])}
    if {"chosen", "rejected"} <= there:  # or the answers of a template
        return not (isinstance(data["chosen"], str) and "question" in there)
    # The converter refuses rows with messages and an instruction.
    if "conversations" in there or {"messages", "instruction"} <= there:
        return True
    if {"prompt", "completion"} <= there and not _has_text(data):
        return True
    has_images = bool({"images", "image"} & there)
    if "instruction" in there:
        is_placed = has_images and any(_PLACE in str(data.get(n)) for n in ("instruction", "input"))
        return is_placed or bool({"history", "tools", "kto_tag", "videos"} & there)
    messages = data.get("messages")
    if not isinstance(messages, list):
        return False
    told = [message for message in messages if isinstance(message, dict)]
    contents = [one.get("content") for one in told]
    return (
        (has_images and any(isinstance(text, str) and _PLACE in text for text in contents))
        or bool({"kto_tag", "tools", "videos"} & there)
        or says_label(data.get("label"))
        or any(one.get("tool_calls") or one.get("function_call") for one in told)
        or any(one.get("role") in ("tool", "function") for one in told)
    )


def _has_text(sample: dict[str, Any]) -> bool:
    """Tell whether there is text that a template can train on."""
    learnt = (sample.get(name) for name in ("answer", "caption", "text"))
    return any(isinstance(value, str | int | float) for value in learnt)


def image_names(source: str, sample: dict[str, Any]) -> list[str] | None:
    """Return the names of the images: of the row, and else of the parts of its messages."""
    told = [one.get("content") for one in sample.get("messages") or () if isinstance(one, dict)]
    contents = [content for content in told if isinstance(content, list)]
    parts = [part for content in contents for part in content if isinstance(part, dict)]
    names = sample.get("images", sample.get("image"))
    names = [names] if isinstance(names, str) else names
    if names is None:
        files = [file_of_part(part) for part in parts if part.get("type") in IMAGE_TYPES]
        names = [name for name in files if name]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{source}: the image is {names!r}. Give a file name or a list of file names."
        )
    unread = {"videos", "audios"} if names else {"videos", "video", "audios", "audio"}
    unread -= {"videos"} if any(part.get("type") == "video" for part in parts) else set()
    if there := sorted(name for name in unread if sample.get(name)):
        raise DataError(
            f"{source}: the row has {there[0]}, for which its text has no place. Take the field "
            "out, or write videos next to messages or an instruction."
        )
    return names or None


def _missing(row: Row, field: str, what: str) -> DataError:
    return DataError(
        f"{row.source}: the row has no {field!r} ({what}); its fields are "
        f"{names_text(row.data)}. Correct the row, or name its fields with `dataset.fields` "
        '\'{"question": "...", "answer": "..."}\'.'
    )


class PromptRows(RowsDataset):
    """Prompts, one a sample; the answer is empty unless the row has one.

    A row is {"question": ...} (or prompt, or instruction and input) with "image" if there is one,
    or {"messages": [...]}; files but .jsonl and .json have one prompt a line. The `id` is its
    own, or made of its place and content, so that a prompt that was changed is answered again.
    """

    def __init__(self, texts: Sequence[str] = (), *, path: str | Path | None = None) -> None:
        rows = [Row(text, f"`text` {place}", place) for place, text in enumerate(texts, start=1)]
        file = None if path is None else Path(path)
        self._name = "text" if file is None else file.stem
        if file is not None and file.suffix in (".jsonl", ".json"):
            rows += read_rows(file)
        elif file is not None:
            lines = read_rows(file, "text")
            rows += [Row(row.data["text"].strip(), row.source, row.number) for row in lines]
        roots = [] if file is None else [file.parent, file.parent / "images"]
        super().__init__(rows, image_roots=roots)

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        sample = {"question": row.data} if isinstance(row.data, str) else dict(row.data)
        name = next((name for name in _PROMPT_NAMES if isinstance(sample.get(name), str)), None)
        if isinstance(sample.get("messages"), list):
            told = [one for one in sample["messages"] if isinstance(one, dict)]
            asked = [one.get("content") for one in told if one.get("role") == "user"]
            text = asked[-1] if asked else ""
            sample.setdefault("question", text if isinstance(text, str) else json.dumps(text))
        elif name is None:
            raise DataError(
                f"{row.source}: the row asks nothing; it has the fields {names_text(sample)}. Give "
                f"it messages, or text as one of {', '.join(_PROMPT_NAMES)}."
            )
        else:
            extra = sample.get("input") if name == "instruction" else None
            sample["question"] = sample[name] + (f"\n{extra}" if extra else "")
            sample.setdefault("answer", "")  # a template may have a place for it
        content = json.dumps(row.data, sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        sample["id"] = str(sample.get("id", f"{self._name}-{row.number}-{digest}"))
        return image_names(row.source, sample), sample


class Groups(JsonLines):
    """Your own groups: a line is {"anchor": {...}, "positive": {...}, "negatives": [{...}, ...]}.

    Each member is a row as jsonl takes it (question, answer, image ...); other fields of the line
    are shared by all members. A group is rows in the order anchor, positive, negatives.

    Args:
        num_negatives: negatives taken of each group, its first; by default all, which must be the
            same number in each group.
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
            raise UserError(f"`dataset.num_negatives` is {num_negatives}. Give at least 1.")
        self._num_negatives = num_negatives
        self._first = ""  # the group that sets the number of negatives, if no option does
        options: dict[str, Any] = {
            "image_path": image_path,
            "test_size": test_size,
            "test_path": test_path,
        }
        super().__init__(
            dataset_path=dataset_path, split=split, fields=fields, group=group, **options
        )
        # without the rest of groups of which a member was bad
        assert self._num_negatives is not None, "known once the file is read"
        self.group_size = 2 + self._num_negatives
        counts = collections.Counter(row.source for row in self.rows)
        self.rows = [row for row in self.rows if counts[row.source] == self.group_size]
        if not self.rows:
            raise DataError(
                f"each of {len(counts)} groups has a bad member. Correct them:\n"
                f"{current_bad_rows().listed(5)}"
            )

    def read(self, file: Path) -> list[Row]:
        """Return the groups of a file; the first good one sets the number of negatives."""
        good = []
        for row in read_rows(file):
            try:
                self._check(row)
            except DataError as error:
                current_bad_rows().take(row.source, error)
                continue
            good.append(row)
        return good

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        place = f"{row.source} ({row.data['member']})"
        images, sample = super().convert(replace(row, source=place))
        del sample["member"]
        return images, sample

    def samples(self, rows: Sequence[Row]) -> list[Row]:
        made = []
        for row in rows:
            shared = {name: value for name, value in row.data.items() if name not in _MEMBERS}
            group = str(shared.pop("id", f"{self._name}-{row.number}"))
            negatives = row.data["negatives"][: self._num_negatives]
            for place, own in enumerate([row.data["anchor"], row.data["positive"], *negatives]):
                role = ROLES[min(place, 2)]
                member = role if place < 2 else f"{role} {place - 1}"
                facts = {"contrast_group": group, "role": role, "member": member}
                name = own.get("id", f"{group}-{member.replace(' ', '-')}")
                made.append(replace(row, data={**shared, **own, **facts, "id": name}))
        return made

    def _check(self, row: Row) -> None:
        for name in _MEMBERS:
            value = row.data.get(name)
            members = [value] if name != "negatives" else value if isinstance(value, list) else []
            if not members or not all(isinstance(member, dict) for member in members):
                raise DataError(
                    f"{row.source}: {name!r} {state_of(value)}. Write anchor and positive as "
                    "objects with question, answer, image ..., negatives as a list of objects."
                )
        count = len(row.data["negatives"])
        if self._num_negatives is None:
            self._num_negatives, self._first = count, row.source
        wanted = self._num_negatives
        if count < wanted or (self._first and count != wanted):
            why = f"as in {self._first}" if self._first else "as `dataset.num_negatives` says"
            raise DataError(
                f"{row.source}: the group has {count} negatives, not {wanted} {why}. Correct the "
                "row, or take the first few of each with `dataset.num_negatives`."
            )
