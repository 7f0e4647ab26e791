"""Pictures that may be rotated: questions about them, and captions."""

import math
from typing import Any

from PIL import Image

from stageline.data.answers import (
    is_clock,
    parse_angle,
    parse_choice,
    parse_clock,
    parse_directions,
    parse_truth,
)
from stageline.data.readers import (
    Row,
    check_split,
    dataset_folder,
    find_file,
    read_rows,
    split_rows,
)
from stageline.data.spatial.rows import Named, Others, SpatialRows, check_options, image_roots

# task -> whether a text is an answer of it, and how such answers look
_TASKS = {
    "direction": (lambda text: bool(parse_directions(text)), "'left' or 'upper right'"),
    "clock": (lambda text: is_clock(text) or parse_clock(text) is not None, "'3 o'clock'"),
    "angle": (lambda text: parse_angle(text) is not None, "'90'"),
    "yes_no": (lambda text: parse_truth(text) is not None, "'yes' or 'no'"),
    "caption": (lambda text: bool(text.strip()), "words"),
}


class RotateQA(SpatialRows):
    """Questions about pictures that may be rotated: directions, clock positions, angles.

    A `.json` list or `.jsonl` file of {"image": "a.jpg", "rotation": 90, "question": "Where is the
    cup?", "answer": "left"}; rotation is in degrees clockwise. An answer is a direction ("upper
    left"), a clock position ("3 o'clock"), an angle ("90"), yes or no; with "options": ["left",
    "right"] one of these ("B", "(B)" or its text). "task" is direction, clock, angle or yes_no,
    a group of the report; its answers are read as such. dataset_path is the file, or a folder with
    `rotate_qa.json` (`.jsonl`) or one file a split, `train.json`.

    Args:
        test_size: held-out rows where there is one file; a picture is on one side only.
        rotate_images: the files are upright: rotate the pictures when they are opened. This
            decodes them on every rank; better store them rotated.
        image_path: folder of the pictures; by default `images` beside the file, or its folder.
        other_tasks: whether tasks of other names are taken.
    """

    _name = "rotate_qa"

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        test_size: int | float = 0.2,
        rotate_images: bool = False,
        image_path: str | None = None,
        other_tasks: Others = "error",
    ) -> None:
        path = dataset_folder(dataset_path, name=self._name)
        self._rotate_images = rotate_images
        self._others = other_tasks
        check_split(split)
        if path.is_dir() and any((path / f"{split}.{end}").is_file() for end in ("json", "jsonl")):
            rows = read_rows(find_file(path, (f"{split}.json", f"{split}.jsonl")))
        else:
            names = (f"{self._name}.json", f"{self._name}.jsonl")
            file = path if path.is_file() else find_file(path, names)
            rows = split_rows(
                read_rows(file),
                split=split,
                test_size=test_size,
                key=lambda row: Named(row, self.sample_id(row)).text("image"),
            )
        folder = path if path.is_dir() else path.parent
        super().__init__(rows, image_roots=image_roots(folder, image_path, "images"))

    def sample_id(self, row: Row) -> str:
        return f"{self._name}-{row.data.get('id', row.number)}"

    def read(self, row: Named) -> tuple[list[str], dict[str, Any]]:
        rotation, task = _rotation(row), self._task(row)
        question, answer = row.text("question"), _answer(row)
        sample: dict[str, Any] = {"question": question, "answer": answer}
        options = row.data.get("options")
        if options is not None:
            sample |= _choices(row, answer, options)
        elif task in _TASKS and not _TASKS[task][0](answer):
            raise row.bad(
                f"the answer {answer[:60]!r} is none of the task {task!r}. One such as "
                f"{_TASKS[task][1]} was expected, because predictions are read and compared as such"
            )
        return [row.text("image")], {**sample, **_groups(rotation, task)}

    def _task(self, row: Named) -> str | None:
        task = row.data.get("task")
        if task is None:
            return None
        return row.known(task, _TASKS, what="task", others=self._others)

    def __getitem__(self, index: int) -> tuple[list[Image.Image] | None, dict[str, Any]]:
        images, sample = super().__getitem__(index)
        if self._rotate_images and sample["rotation"] and images is not None:
            images = [image.rotate(-sample["rotation"], expand=True) for image in images]
        return images, sample


class RotateCaption(RotateQA):
    """Captions of pictures that may be rotated.

    As rotate_qa, with "caption" in place of question and answer:
    {"image": "a.jpg", "rotation": 180, "caption": "A cat on a chair, upside down."}.

    Args:
        test_size: held-out rows where there is one file; a picture is on one side only.
        rotate_images: rotate the pictures when they are opened.
        image_path: folder of the pictures.
        other_tasks: whether tasks of other names are taken.
    """

    _name = "rotate_caption"

    def read(self, row: Named) -> tuple[list[str], dict[str, Any]]:
        rotation, task = _rotation(row), self._task(row)
        caption = row.text("caption")
        return [row.text("image")], {
            "question": "Describe the picture.",
            "caption": caption,
            "answer": caption,
            **_groups(rotation, task),
        }


def _groups(rotation: int | float, task: str | None) -> dict[str, Any]:
    turned = f"{rotation} degrees"
    return {
        "rotation": rotation,
        "task": task,
        "group": task or turned,
        "groups": {"task": task, "rotation": turned},
    }


def _answer(row: Named) -> str:
    answer = row.data.get("answer")
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    return str(answer) if is_number else row.text("answer")


def _choices(row: Named, answer: str, options: Any) -> dict[str, Any]:
    if not isinstance(options, list) or not all(type(o) in (str, int, float) for o in options):
        raise row.bad(
            f"the options are {repr(options)[:60]}. A list of texts was expected, because the "
            "model chooses among them"
        )
    choices = [str(option) for option in options]
    check_options(row, choices)
    index = parse_choice(answer, choices)
    if index is None:
        raise row.bad(
            f"the answer {answer[:60]!r} is none of the options {choices!r}. A letter of them or "
            "the text of one was expected, because that is the right one"
        )
    return {"choices": choices, "answer_index": index}


def _rotation(row: Named) -> int | float:
    rotation = row.data.get("rotation", 0)
    is_number = isinstance(rotation, int | float) and not isinstance(rotation, bool)
    if is_number and math.isfinite(rotation):
        return int(rotation) if rotation == int(rotation) else rotation  # 90.0 is the group of 90
    raise row.bad(
        f"the rotation is {rotation!r}. Degrees clockwise were expected, as a number, because "
        "figures are given by it"
    )
