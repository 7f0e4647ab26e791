"""Rows of the user's own JSON or JSON-lines files as samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from stageline.data.converters import make_converter
from stageline.data.converters.answers import says_label
from stageline.data.readers import (
    Row,
    RowsDataset,
    check_split,
    dataset_folder,
    find_file,
    read_rows,
    split_rows,
)
from stageline.data.video_frames import read_frames, with_frames
from stageline.errors import DataError

_IMAGE_TYPES = ("image", "image_url")
# columns that a sample made by a converter has in its own form, or not at all
_CONVERTED = {
    *("conversations", "messages", "chosen", "rejected", "completion", "history", "kto_tag"),
    *("system", "tools", "images", "image", "videos", "video"),
}


class JsonLines(RowsDataset):
    """Your own rows: JSON lines (or a .json list) with question, answer, image, or messages.

    A row is {"question": ..., "answer": ..., "image": "a.png" or ["a.png", "b.png"]}, or
    {"instruction": ..., "input": ..., "output": ...}, or {"messages": [{"role": "user",
    "content": ...}, ...]} for --prompt-fn chat. Every field can be used in a template by its name.
    Conversations in other words, preferences, labels, tools and films: docs/data_formats.md.
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
        num_frames: most pictures that a film becomes.
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
        videos = sample.get("videos") if self._is_converted(self.rows[index]) else None
        if not videos:
            return images, sample
        films = [
            read_frames(
                video,
                folders=self._folders,
                num_frames=self._num_frames,
                source=sample["source"],
            )
            for video in videos
        ]
        return with_frames(sample, images, films)

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
                raise _missing(row, own, f"it is to be the {name} (--dataset.fields)")
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
    return any(
        isinstance(sample.get(name), str | int | float) for name in ("answer", "caption", "text")
    )


def image_names(source: str, sample: dict[str, Any]) -> list[str] | None:
    """Names of the images: of the row, and else of the parts of its messages."""
    names = sample.get("images", sample.get("image"))
    names = [names] if isinstance(names, str) else names
    if names is None:
        names = list(_message_images(sample.get("messages")))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{source}: the image is {names!r}. A file name or a list of them was expected, "
            "because pictures are read from files: correct the row."
        )
    return names or None


def _message_images(messages: Any) -> list[Any]:
    """File names in content parts: {"type": "image", "image": "a.png"}, or an image_url."""
    found = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and part.get("type") in _IMAGE_TYPES:
                value = next((part[key] for key in ("image", "path", "url") if key in part), None)
                url = part.get("image_url")
                url = url.get("url") if isinstance(url, dict) else url
                found += [value or url] if value or url else []
    return found


def _missing(row: Row, field: str, reason: str) -> DataError:
    return DataError(
        f"{row.source}: the field {field!r} is missing. Text was expected in it, because {reason}; "
        f"the row has the fields {', '.join(sorted(row.data)) or 'none'}. Correct the row, or name "
        'its fields with --dataset.fields \'{"question": "...", "answer": "..."}\'.'
    )
