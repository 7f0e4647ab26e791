"""Public datasets of spatial questions: VSR, Spatial-MM, What'sUp, and rotated pictures.

Each class says in its docstring how the files look; none of them is downloaded here. A sample has
`groups` (relation, task, perspective, ...) for the report, `group`, the most telling of them, and
`cluster`, its picture.
"""

import difflib
import hashlib
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from PIL import Image

from examples.spatial.answers import (
    is_clock,
    parse_angle,
    parse_choice,
    parse_clock,
    parse_directions,
    parse_truth,
)
from stageline.data.rows.read_rows import Row, read_rows
from stageline.data.rows.readers import (
    RowsDataset,
    check_split,
    dataset_folder,
    find_file,
    split_rows,
)
from stageline.errors import DataError
from stageline.inference.answer_text import normalize

Found = TypeVar("Found")
Others = Literal["error", "allow"]  # the handling of a relation or task that is not known
_OPTION = re.compile(r"^\s*\(?([A-Z])[.):]\s*(.*?)\s*$", re.MULTILINE)

# VSR: `analysis_scripts/rel_meta_category_dict.txt` of the authors' repository
# (github.com/cambridgeltl/visual-spatial-reasoning), which is table 1 of their paper (TACL 2023).
# "among" stands there in two categories; here it is topological.
_VSR: dict[str, str] = {
    "adjacency": "adjacent to, alongside, at the side of, at the right side of, at the left side "
    "of, attached to, at the back of, ahead of, against, at the edge of",
    "directional": "off, past, toward, down, deep down, up, away from, along, around, from, into, "
    "to, across, across from, through, down from",
    "orientation": "facing, facing away from, parallel to, perpendicular to",
    "projective": "on top of, beneath, beside, behind, left of, right of, under, in front of, "
    "below, above, over, in the middle of",
    "proximity": "by, close to, near, far from, far away from",
    "topological": "connected to, detached from, has as a part, part of, contains, within, at, on, "
    "in, with, surrounding, among, consists of, out of, between, inside, outside, touching",
    "unallocated": "beyond, next to, opposite to, after, enclosed by",
}
# relation -> category
VSR_RELATIONS: dict[str, str] = {
    relation: category for category, names in _VSR.items() for relation in names.split(", ")
}

# What'sUp: the prepositions by which the authors' evaluation splits its figures
# (github.com/amitakamath/whatsup_vlms, dataset_zoo/aro_datasets.py); in this order, since "on the
# left" says left
PREPOSITIONS = (
    *("left", "right", "front", "behind", "under", "above", "below", "top", "bottom", "on"),
)
# the pair of one set of two objects that a preposition belongs to
PAIRS = {
    **{"left": "left and right", "right": "left and right", "on": "on and under"},
    **{"under": "on and under", "front": "front and behind", "behind": "front and behind"},
}

# task of RotateQA -> whether a text is an answer of it, and how such answers look
_TASKS = {
    "direction": (lambda text: bool(parse_directions(text)), "'left' or 'upper right'"),
    "clock": (lambda text: is_clock(text) or parse_clock(text) is not None, "'3 o'clock'"),
    "angle": (lambda text: parse_angle(text) is not None, "'90'"),
    "yes_no": (lambda text: parse_truth(text) is not None, "'yes' or 'no'"),
    "caption": (lambda text: bool(text.strip()), "words"),
}


class SpatialRows(RowsDataset):
    """Rows of a public set; a subclass says the id of a row and reads the rest."""

    def convert(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        images, sample = self._read_named(row, self.read)
        return images, {"id": self.sample_id(row), "cluster": images[0], **sample}

    def sample_id(self, row: Row) -> str:
        """Return the id, which every error of the row contains."""
        raise NotImplementedError

    def read(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        """Names of the row's images and its sample but for the id; errors do not name the row."""
        raise NotImplementedError

    def _read_named(self, row: Row, read: Callable[[Row], Found]) -> Found:
        """Read a row; an error gets file, line and sample."""
        try:
            return read(row)
        except DataError as error:
            place = f"{row.source}: sample {self.sample_id(row)}"
            raise DataError(f"{place}: {error}") from None

    def _split(
        self, rows: list[Row], split: str, test_size: int | float, key: Callable[[Row], str]
    ) -> list[Row]:
        """Call `split_rows`; errors of the key name the sample."""

        def named_key(row: Row) -> str:
            return self._read_named(row, key)

        return split_rows(rows, split=split, test_size=test_size, key=named_key)


def _bad(what: str, *, more: str = "") -> DataError:
    return DataError(f"{what}. Correct the row{more}.")


def _text(row: Row, field: str) -> str:
    """Return the text of a field that may not be empty."""
    value = row.data.get(field)
    if isinstance(value, str) and value.strip():
        return value
    what = "is missing" if value is None else f"is {repr(value)[:60]}"
    raise _bad(
        f"the field {field!r} {what}, but the prompt needs its text. The row has the fields "
        f"{', '.join(sorted(map(str, row.data))) or 'none'}"
    )


def _known(value: Any, names: Collection[str], *, what: str, others: Others) -> str:
    """Return a relation or task in lower case, one of `names` unless others are allowed."""
    if not isinstance(value, str) or not value.strip():
        came = "missing" if value is None else repr(value)[:60]
        raise _bad(f"the {what} is {came}, but it must be text")
    name = " ".join(value.lower().split())
    if others == "allow" or name in names:
        return name
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    listed = ", ".join(sorted(names)) if len(names) <= 12 else f"{len(names)} are known"
    hint = f" (nearest: {', '.join(near)})" if near else f" ({listed})"
    raise _bad(
        f"the {what} {value[:60]!r} is not known{hint}",
        more=f", or allow others with `dataset.other_`{what}s allow",
    )


def _image_roots(folder: Path, image_path: str | None, *names: str) -> list[Path]:
    """Return the folders to look for images in: only the given one, or the usual ones."""
    if image_path:
        return [Path(image_path)]
    folder = folder if folder.is_dir() else folder.parent
    return [folder, *(folder / name for name in names), folder.parent]


def _check_options(options: Sequence[str]) -> None:
    """Refuse fewer than two options, and two that read the same."""
    texts = [" ".join(option.lower().split()) for option in options]
    double = next((text for i, text in enumerate(texts) if text in texts[:i]), None)
    if double is not None:
        raise _bad(f"the option {double!r} stands twice among {list(options)!r}")
    if len(options) < 2 or "" in texts:
        raise _bad(f"the options are {list(options)!r}, but they must be at least two texts")


class VSR(SpatialRows):
    """Visual Spatial Reasoning: is a statement about a picture true?

    Files `{split_type}/train.jsonl`, `dev.jsonl`, `test.jsonl` in dataset_path or in `splits` or
    `data/splits` below it, with lines such as {"image": "000000372029.jpg", "caption": "The dog is
    on the surfboard.", "label": 1, "relation": "on"}. Pictures are in `images`, `trainval2017`,
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
        roots = _image_roots(
            folder, image_path, "images", "trainval2017", "train2017", "val2017",
            "data/images", "data/trainval2017",
        )  # fmt: skip
        super().__init__(read_rows(file), image_roots=roots)

    def sample_id(self, row: Row) -> str:
        return f"{self._name}-{row.number}"

    def read(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        label = row.data.get("label")
        if type(label) is not int or label not in (0, 1):
            raise _bad(f"the label is {label!r}, but it must be the number 0 (false) or 1 (true)")
        caption, given = _text(row, "caption"), row.data.get("relation")
        relation = _known(given, VSR_RELATIONS, what="relation", others=self._others)
        return [_text(row, "image")], {
            "caption": caption,
            "question": f"Is this statement about the picture true or false? {caption}",
            "answer": self._words[label],
            "label": label,
            "num_choices": 2,
            "relation": relation,
            "group": relation,
            "groups": {"relation": relation, "category": VSR_RELATIONS.get(relation, "other")},
        }


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
        chosen = self._split(rows, split, test_size, lambda row: _text(row, "image_name"))
        roots = _image_roots(folder, image_path, "Spatial_MM_Obj", "images", "imgs", "data/imgs")
        super().__init__(chosen, image_roots=roots)

    def sample_id(self, row: Row) -> str:
        return f"spatial_mm-{row.data['subset']}-{row.data['number']}"

    def read(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        question, answer = _text(row, "question"), _text(row, "answer")
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
            letters = [letter for letter, _ in found]
            expected = [chr(ord("A") + index) for index in range(len(letters))]
            if letters != expected:
                raise _bad(
                    f"the options have the letters {', '.join(letters)}, not {', '.join(expected)}"
                )
            _check_options(choices)
            index = _right_option(answer, choices)
            sample |= {"choices": choices, "answer_index": index}
            is_verdict = {parse_truth(choice) for choice in choices} == {True, False}
            groups["task"] = "yes or no" if is_verdict else "place"
            groups["relation"] = choices[index].lower()
        return [_text(row, "image_name")], {**sample, "groups": groups}


def _perspective(question: str) -> str:
    """Return whose left and right are meant; those of a person in the picture are harder."""
    if "camera's perspective" in question.lower():
        return "camera"
    return "in the picture" if "perspective" in question.lower() else "not said"


def _right_option(answer: str, choices: list[str]) -> int:
    found = _OPTION.match(answer)
    index = ord(found[1]) - ord("A") if found else -1
    if found is None or not 0 <= index < len(choices):
        raise _bad(
            f"the answer {answer[:60]!r} names none of the {len(choices)} options of the question. "
            "It must begin with the letter of the right option ('B. right')"
        )
    texts = [normalize(choice) for choice in choices]
    text = normalize(found[2])
    if text and text != texts[index] and text in texts:
        raise _bad(
            f"the answer {answer[:60]!r} has the letter of the option {choices[index]!r} and the "
            "text of another one"
        )
    return index


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
        rows = read_rows(file, may_be_lists=True)
        rows = self._split(
            rows, split, test_size, lambda row: _objects(self._image_and_captions(row)[0])
        )
        roots = _image_roots(
            folder, image_path, "val2017", "vg_images", "controlled_images", "controlled_clevr",
        )  # fmt: skip
        super().__init__(rows, image_roots=roots)

    def sample_id(self, row: Row) -> str:
        return f"whats_up-{self._subset}-{row.number}"

    def read(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        image, captions = self._image_and_captions(row)
        _check_options(captions)
        order = sorted(range(len(captions)), key=lambda option: self._draw(row, option))
        choices = [captions[i] for i in order]
        right = order.index(0)
        lines = "\n".join(f"{chr(ord('A') + i)}. {text}" for i, text in enumerate(choices))
        relation = self._preposition(captions[0])
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

    def _draw(self, row: Row, option: int) -> bytes:
        return hashlib.sha256(f"{self._subset} {row.number} {option}".encode()).digest()

    def _image_and_captions(self, row: Row) -> tuple[str, list[str]]:
        if isinstance(row.data, list):
            number, *captions = row.data or [""]
            width = 12 if self._subset.startswith("coco") else 0
            if type(number) not in (int, str):
                raise _bad(
                    f"the image is {number!r}, but it must be the number or text that "
                    "names the picture's file"
                )
            image = f"{str(number).zfill(width)}.jpg"
        else:
            captions = row.data.get("caption_options")
            # written from the folder above "data"; here only the last folder counts
            image = "/".join(Path(_text(row, "image_path")).parts[-2:])
        if isinstance(captions, list) and all(isinstance(caption, str) for caption in captions):
            return image, captions
        raise _bad(
            f"the captions are {repr(captions)[:60]}, but they must be a list of texts, the "
            "right one first"
        )

    def _preposition(self, caption: str) -> str:
        words = caption.lower().replace("-", " ").replace(".", " ").split()
        found = next((word for word in PREPOSITIONS if word in words), None)
        if found is not None:
            return found
        if self._others == "allow":
            return "other"
        raise _bad(
            f"the relation of the caption {caption[:60]!r} is not known: it has none of the words "
            f"{', '.join(PREPOSITIONS)}",
            more=", or allow others with `dataset.other_relations` allow",
        )


def _objects(image: str) -> str:
    """Return the objects in the picture: a, b name them in the file; else the picture itself."""
    words = Path(image).stem.split("_")
    return f"{words[0]} {words[-1]}"


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
        image_path: folder of the pictures; by default `images` next to the file, or its folder.
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
            rows = self._split(read_rows(file), split, test_size, lambda row: _text(row, "image"))
        folder = path if path.is_dir() else path.parent
        super().__init__(rows, image_roots=_image_roots(folder, image_path, "images"))

    def sample_id(self, row: Row) -> str:
        return f"{self._name}-{row.data.get('id', row.number)}"

    def read(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        facts = self._facts(row)
        question, answer = _text(row, "question"), row.data.get("answer")
        answer = str(answer) if type(answer) in (int, float) else _text(row, "answer")
        sample: dict[str, Any] = {"question": question, "answer": answer}
        options = row.data.get("options")
        if options is not None:
            sample |= _choices(answer, options)
        elif (task := facts["task"]) in _TASKS and not _TASKS[task][0](answer):
            raise _bad(
                f"the answer {answer[:60]!r} does not fit the task {task!r}. It must be like "
                f"{_TASKS[task][1]}"
            )
        return [_text(row, "image")], {**sample, **facts}

    def _facts(self, row: Row) -> dict[str, Any]:
        """Rotation and task, and the groups that follow from them."""
        rotation, task = _rotation(row), row.data.get("task")
        if task is not None:
            task = _known(task, _TASKS, what="task", others=self._others)
        turned = f"{rotation} degrees"
        groups = {"task": task, "rotation": turned}
        return {"rotation": rotation, "task": task, "group": task or turned, "groups": groups}

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

    def read(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        facts, caption = self._facts(row), _text(row, "caption")
        texts = {"question": "Describe the picture.", "caption": caption, "answer": caption}
        return [_text(row, "image")], {**texts, **facts}


def _choices(answer: str, options: Any) -> dict[str, Any]:
    if not isinstance(options, list) or not all(type(o) in (str, int, float) for o in options):
        raise _bad(f"the options are {repr(options)[:60]}, but they must be a list of texts")
    choices = [str(option) for option in options]
    _check_options(choices)
    index = parse_choice(answer, choices)
    if index is None:
        raise _bad(
            f"the answer {answer[:60]!r} is not one of the options {choices!r}. It must be "
            "the letter or the text of the right one"
        )
    return {"choices": choices, "answer_index": index}


def _rotation(row: Row) -> int | float:
    rotation = row.data.get("rotation", 0)
    if type(rotation) in (int, float) and math.isfinite(rotation):
        return int(rotation) if rotation == int(rotation) else rotation  # 90.0 is the group of 90
    raise _bad(f"the rotation is {rotation!r}, but it must be a number of degrees clockwise")
