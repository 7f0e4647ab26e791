"""Public datasets of spatial questions: VSR, Spatial-MM, What'sUp, and rotated pictures.

Each class says in its docstring how the files look; none of them is downloaded here. A sample has
`groups` (relation, task, perspective, ...) for the report, `group`, the most telling of them, and
`cluster`, its picture.
"""

import hashlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from stageline.data.rows.readers import (
    Row,
    check_split,
    dataset_folder,
    find_file,
    read_rows,
    split_rows,
)
from stageline.tasks.answers import (
    is_clock,
    normalize,
    parse_angle,
    parse_choice,
    parse_clock,
    parse_directions,
    parse_truth,
)
from stageline.tasks.spatial_rows import (
    PAIRS,
    PREPOSITIONS,
    VSR_RELATIONS,
    Named,
    Others,
    SpatialRows,
    check_options,
    image_roots,
)

# -- visual Spatial Reasoning: statements about pictures that are true or false -------------------


class VSR(SpatialRows):
    """Visual Spatial Reasoning: is a statement about a picture true?

    Files `{split_type}/train.jsonl`, `dev.jsonl`, `test.jsonl` in dataset_path or in `splits` or
    `data/splits` below it, with lines such as {"image": "000000372029.jpg", "caption": "The dog is
    on the surfboard.", "label": 1, "relation": "on"}. Pictures lie in `images`, `trainval2017`,
    `train2017` or `val2017`.

    Args:
        split_type: random, or zeroshot, where no concept of the test was trained.
        answers: how the label is written.
        image_path: folder of the pictures.
        other_relations: whether relations that the public set does not have are taken.
    """

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        split_type: Literal["random", "zeroshot"] = "random",
        answers: Literal["true_false", "yes_no"] = "true_false",
        image_path: str | None = None,
        other_relations: Others = "error",
    ) -> None:
        folder = dataset_folder(dataset_path, name="vsr")
        if split != "dev":
            check_split(split)
        name = f"{split_type}/{split}.jsonl"
        file = find_file(folder, (name, f"splits/{name}", f"data/splits/{name}", f"data/{name}"))
        self._words = ("false", "true") if answers == "true_false" else ("no", "yes")
        self._name = f"vsr-{split_type}-{split}"
        self._others = other_relations
        roots = image_roots(
            folder, image_path, "images", "trainval2017", "train2017", "val2017",
            "data/images", "data/trainval2017",
        )  # fmt: skip
        super().__init__(read_rows(file), image_roots=roots)

    def sample_id(self, row: Row) -> str:
        return f"{self._name}-{row.number}"

    def read(self, row: Named) -> tuple[list[str], dict[str, Any]]:
        label = row.data.get("label")
        if type(label) is not int or label not in (0, 1):
            raise row.bad(
                f"the label is {label!r}. The number 0 or 1 was expected, because a statement is "
                "false or true"
            )
        caption = row.text("caption")
        relation = row.known(
            row.data.get("relation"), VSR_RELATIONS, what="relation", others=self._others
        )
        return [row.text("image")], {
            "caption": caption,
            "question": f"Is this statement about the picture true or false? {caption}",
            "answer": self._words[label],
            "label": label,
            "relation": relation,
            "group": relation,
            "groups": {"relation": relation, "category": VSR_RELATIONS.get(relation, "other")},
        }


# -- spatial-MM: questions about places and directions, from the camera's side and from others' ---

_OPTION = re.compile(r"^\s*\(?([A-Z])[.):]\s*(.*?)\s*$", re.MULTILINE)


class SpatialMM(SpatialRows):
    """Spatial-MM: questions about places and directions, with options in the question.

    Files `spatial_mm_one_obj.json`, `spatial_mm_two_obj.json` and `multihop_reasoning_309.json`:
    lists of {"image_name": "129d118ad0.jpg", "question": "Which direction ...?\\nA. bottom
    left\\nB. left", "answer": "B. left"}; multihop answers are words without options.

    Args:
        subset: which files.
        test_size: held-out rows, as a number or a share; a picture is on one side only. 1.0 holds
            out all, as for an evaluation of the public set.
        image_path: folder of the pictures.
    """

    _FILES = {
        "one_obj": "spatial_mm_one_obj.json",
        "two_obj": "spatial_mm_two_obj.json",
        "multihop": "multihop_reasoning_309.json",
    }

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        subset: Literal["one_obj", "two_obj", "multihop", "obj"] = "obj",
        test_size: int | float = 0.2,
        image_path: str | None = None,
    ) -> None:
        folder = dataset_folder(dataset_path, name="spatial_mm")
        rows: list[Row] = []
        for part in ("one_obj", "two_obj") if subset == "obj" else (subset,):
            name = self._FILES[part]
            for row in read_rows(find_file(folder, (name, f"data/{name}"))):
                data = {**row.data, "subset": part, "number": row.number}
                rows.append(replace(row, data=data, number=len(rows) + 1))
        chosen = split_rows(
            rows,
            split=split,
            test_size=test_size,
            key=lambda row: Named(row, self.sample_id(row)).text("image_name"),
        )
        roots = image_roots(folder, image_path, "Spatial_MM_Obj", "images", "imgs", "data/imgs")
        super().__init__(chosen, image_roots=roots)

    def sample_id(self, row: Row) -> str:
        return f"spatial_mm-{row.data['subset']}-{row.data['number']}"

    def read(self, row: Named) -> tuple[list[str], dict[str, Any]]:
        question, answer = row.text("question"), row.text("answer")
        subset, perspective = row.data["subset"], _perspective(question)
        sample: dict[str, Any] = {
            "question": question,
            "answer": answer,
            "group": f"{subset}: {perspective}",
        }
        groups = {"subset": subset, "perspective": perspective, "task": "words"}
        found = _OPTION.findall(question)
        if found:
            choices = [text for _, text in found]
            _check_letters(row, [letter for letter, _ in found])
            check_options(row, choices)
            index = _right_option(row, answer, choices)
            sample |= {"choices": choices, "answer_index": index}
            is_verdict = {parse_truth(choice) for choice in choices} == {True, False}
            groups["task"] = "yes or no" if is_verdict else "place"
            groups["relation"] = choices[index].lower()
        return [row.text("image_name")], {**sample, "groups": groups}


def _perspective(question: str) -> str:
    """Whose left and right are meant: the harder case is a person's in the picture."""
    if "camera's perspective" in question.lower():
        return "camera"
    return "in the picture" if "perspective" in question.lower() else "not said"


def _check_letters(row: Named, letters: list[str]) -> None:
    expected = [chr(ord("A") + index) for index in range(len(letters))]
    if letters != expected:
        raise row.bad(
            f"the options have the letters {', '.join(letters)}. {', '.join(expected)} was "
            "expected, because an answer is told by its letter"
        )


def _right_option(row: Named, answer: str, choices: list[str]) -> int:
    found = _OPTION.match(answer)
    index = ord(found[1]) - ord("A") if found else -1
    if found is None or not 0 <= index < len(choices):
        raise row.bad(
            f"the answer {answer[:60]!r} names none of the {len(choices)} options of the question. "
            "It was expected to begin with an option's letter ('B. right'), because that is the "
            "right one"
        )
    texts = [normalize(choice) for choice in choices]
    text = normalize(found[2])
    if text and text != texts[index] and text in texts:
        raise row.bad(
            f"the answer {answer[:60]!r} has the letter of the option {choices[index]!r} and the "
            "text of another one. Both of one option were expected, because only one is right"
        )
    return index


# -- what'sUp: which of some captions, that differ in a preposition, fits a picture ---------------


class WhatsUp(SpatialRows):
    """What'sUp: which of the captions fits the picture?

    `controlled_images_dataset.json` (a) and `controlled_clevr_dataset.json` (b) are lists of
    {"image_path": "data/controlled_images/mug_on_table.jpeg", "caption_options": [...]};
    `coco_qa_*_obj.json` and `vg_qa_*_obj.json` lists of [image id, caption, caption]. The first
    caption is right everywhere; here the options come in a fixed, drawn order.

    Args:
        subset: which file.
        test_size: held-out rows, as a number or a share; pictures of the same two objects are on
            one side only. 1.0 holds out all, as for an evaluation of the public set.
        image_path: folder of the pictures.
        other_relations: whether captions without a preposition of the public set are taken.
    """

    _FILES = {
        "a": ("controlled_images_dataset.json",),
        "b": ("controlled_clevr_dataset.json",),
        "coco_one": ("coco_qa_one_obj.json",),
        "coco_two": ("coco_qa_two_obj.json",),
        "vg_one": ("vg_qa_one_obj.json", "vg_qa_one_obj_v2.json"),
        "vg_two": ("vg_qa_two_obj.json", "vg_qa_two_obj_v2.json"),
    }

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        subset: Literal["a", "b", "coco_one", "coco_two", "vg_one", "vg_two"] = "a",
        test_size: int | float = 0.2,
        image_path: str | None = None,
        other_relations: Others = "error",
    ) -> None:
        folder = dataset_folder(dataset_path, name="whats_up")
        self._subset = subset
        self._others = other_relations
        names = self._FILES[subset]
        file = find_file(folder, (*names, *(f"data/{name}" for name in names)))
        rows = split_rows(
            read_rows(file, may_be_lists=True), split=split, test_size=test_size, key=self._objects
        )
        roots = image_roots(
            folder, image_path, "val2017", "vg_images", "controlled_images", "controlled_clevr",
        )  # fmt: skip
        super().__init__(rows, image_roots=roots)

    def sample_id(self, row: Row) -> str:
        return f"whats_up-{self._subset}-{row.number}"

    def read(self, row: Named) -> tuple[list[str], dict[str, Any]]:
        image, captions = self._image_and_captions(row)
        check_options(row, captions)
        order = sorted(range(len(captions)), key=lambda i: _draw(self._subset, row.row.number, i))
        choices = [captions[i] for i in order]
        right = order.index(0)
        lines = "\n".join(f"{chr(ord('A') + i)}. {text}" for i, text in enumerate(choices))
        relation = self._preposition(row, captions[0])
        sample = {
            "question": f"Which caption fits the picture?\n{lines}",
            "answer": f"{chr(ord('A') + right)}. {captions[0]}",
            "caption": captions[0],
            "choices": choices,
            "answer_index": right,
            "group": relation,
            "groups": {"relation": relation, "subset": self._subset},
        }
        if self._subset in ("a", "b") and relation in PAIRS:
            objects = _objects(image)
            sample |= {"set": objects, "pair": f"{objects}: {PAIRS[relation]}"}
        return [image], sample

    def _image_and_captions(self, row: Named) -> tuple[str, list[str]]:
        if isinstance(row.data, list):
            number, *captions = row.data or [""]
            width = 12 if self._subset.startswith("coco") else 0
            if type(number) not in (int, str):
                raise row.bad(
                    f"the image is {number!r}. A number or a text was expected, because the "
                    "picture's file has that name"
                )
            image = f"{str(number).zfill(width)}.jpg"
        else:
            captions = row.data.get("caption_options")
            # written from the folder above "data"; here only the last folder counts
            image = "/".join(Path(row.text("image_path")).parts[-2:])
        if isinstance(captions, list) and all(isinstance(caption, str) for caption in captions):
            return image, captions
        raise row.bad(
            f"the captions are {repr(captions)[:60]}. A list of texts was expected, the right one "
            "first, because the model chooses among them"
        )

    def _preposition(self, row: Named, caption: str) -> str:
        words = caption.lower().replace("-", " ").replace(".", " ").split()
        found = next((word for word in PREPOSITIONS if word in words), None)
        if found is not None:
            return found
        if self._others == "allow":
            return "other"
        raise row.bad(
            f"the relation of the caption {caption[:60]!r} is not known: it has none of the words "
            f"{', '.join(PREPOSITIONS)}. One of them was expected, because figures are given for "
            "each",
            more=", or allow others with `dataset.other_relations` allow",
        )

    def _objects(self, row: Row) -> str:
        """The objects in the picture: a, b name them in the file; else the picture itself."""
        return _objects(self._image_and_captions(Named(row, self.sample_id(row)))[0])


def _objects(image: str) -> str:
    words = Path(image).stem.split("_")
    return " ".join((words[0], words[-1]))


def _draw(subset: str, number: int, option: int) -> bytes:
    return hashlib.sha256(f"{subset} {number} {option}".encode()).digest()


# -- pictures that may be rotated: questions about them, and captions -----------------------------

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


# -------------------------------------------------------------------------------------------------

__all__ = ["VSR", "RotateCaption", "RotateQA", "SpatialMM", "WhatsUp"]
