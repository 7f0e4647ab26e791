"""Public datasets of spatial questions: VSR, Spatial-MM, What'sUp, and rotated pictures.

Each class says in its docstring how the files look; none of them is downloaded here.
"""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from stageline.data.readers import (
    Row,
    RowsDataset,
    check_split,
    dataset_folder,
    find_file,
    read_rows,
    split_rows,
)
from stageline.errors import DataError

_OPTION = re.compile(r"^\s*\(?([A-Z])[.):]\s*(.+?)\s*$", re.MULTILINE)


class VSR(RowsDataset):
    """Visual Spatial Reasoning: is a statement about a picture true?

    Files `{split_type}/train.jsonl`, `dev.jsonl`, `test.jsonl` in dataset_path or in `splits` or
    `data/splits` below it, with lines such as {"image": "000000372029.jpg", "caption": "The dog is
    on the surfboard.", "label": 1, "relation": "on"}. Pictures lie in `images`, `trainval2017`,
    `train2017` or `val2017`.

    Args:
        split_type: random, or zeroshot, where no concept of the test was trained.
        answers: how the label is written.
        image_path: folder of the pictures.
    """

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        split_type: Literal["random", "zeroshot"] = "random",
        answers: Literal["true_false", "yes_no"] = "true_false",
        image_path: str | None = None,
    ) -> None:
        folder = dataset_folder(dataset_path, name="vsr")
        if split != "dev":
            check_split(split)
        name = f"{split_type}/{split}.jsonl"
        file = find_file(folder, (name, f"splits/{name}", f"data/splits/{name}", f"data/{name}"))
        self._words = ("false", "true") if answers == "true_false" else ("no", "yes")
        self._name = f"vsr-{split_type}-{split}"
        roots = _image_roots(
            folder, image_path, "images", "trainval2017", "train2017", "val2017",
            "data/images", "data/trainval2017",
        )  # fmt: skip
        super().__init__(read_rows(file), image_roots=roots)

    def convert(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        label = row.data.get("label")
        if label not in (0, 1):
            raise DataError(
                f"{row.source}: the label is {label!r}. 0 or 1 was expected, because a statement "
                "is false or true: correct the row."
            )
        caption = row.text("caption")
        relation = row.data.get("relation")
        return [row.text("image")], {
            "id": f"{self._name}-{row.number}",
            "caption": caption,
            "question": f"Is this statement about the picture true or false? {caption}",
            "answer": self._words[int(label)],
            "label": int(label),
            "relation": relation,
            "group": relation or "none",
        }


class SpatialMM(RowsDataset):
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
            rows, split=split, test_size=test_size, key=lambda row: row.text("image_name")
        )
        roots = _image_roots(folder, image_path, "Spatial_MM_Obj", "images", "imgs", "data/imgs")
        super().__init__(chosen, image_roots=roots)

    def convert(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        question, answer = row.text("question"), row.text("answer")
        subset = row.data["subset"]
        sample: dict[str, Any] = {
            "id": f"spatial_mm-{subset}-{row.data['number']}",
            "question": question,
            "answer": answer,
            "group": f"{subset}: {_perspective(question)}",
        }
        choices = [match[2] for match in _OPTION.finditer(question)]
        if choices:
            sample["choices"] = choices
            letter = _OPTION.match(answer)
            sample["answer_index"] = _choice_index(row, letter[1] if letter else "", choices)
        return [row.text("image_name")], sample


def _perspective(question: str) -> str:
    """Whose left and right are meant: the harder case is a person's in the picture."""
    if "camera's perspective" in question.lower():
        return "camera"
    return "in the picture" if "perspective" in question.lower() else "not said"


def _choice_index(row: Row, letter: str, choices: list[str]) -> int:
    index = ord(letter) - ord("A") if letter else -1
    if 0 <= index < len(choices):
        return index
    raise DataError(
        f"{row.source}: the answer {row.data.get('answer')!r} names none of the {len(choices)} "
        "options of the question. It was expected to begin with an option's letter ('B. right'), "
        "because that is the right one: correct the row."
    )


class WhatsUp(RowsDataset):
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
    ) -> None:
        folder = dataset_folder(dataset_path, name="whats_up")
        self._subset = subset
        names = self._FILES[subset]
        file = find_file(folder, (*names, *(f"data/{name}" for name in names)))
        rows = split_rows(
            read_rows(file, may_be_lists=True), split=split, test_size=test_size, key=self._objects
        )
        roots = _image_roots(
            folder, image_path, "val2017", "vg_images", "controlled_images", "controlled_clevr",
        )  # fmt: skip
        super().__init__(rows, image_roots=roots)

    def convert(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        image, captions = self._image_and_captions(row)
        order = sorted(
            range(len(captions)),
            key=lambda i: hashlib.sha256(f"{self._subset} {row.number} {i}".encode()).digest(),
        )
        choices = [captions[i] for i in order]
        right = order.index(0)
        lines = "\n".join(f"{chr(ord('A') + i)}. {text}" for i, text in enumerate(choices))
        return [image], {
            "id": f"whats_up-{self._subset}-{row.number}",
            "question": f"Which caption fits the picture?\n{lines}",
            "answer": f"{chr(ord('A') + right)}. {captions[0]}",
            "caption": captions[0],
            "choices": choices,
            "answer_index": right,
            "group": _preposition(captions[0]),
        }

    def _image_and_captions(self, row: Row) -> tuple[str, list[str]]:
        if isinstance(row.data, list):
            number, *captions = row.data or [""]
            width = 12 if self._subset.startswith("coco") else 0
            image = f"{str(number).zfill(width)}.jpg"
        else:
            captions = row.data.get("caption_options")
            image = row.text("image_path")
            # written from the folder above "data"; here only the last folder counts
            image = "/".join(Path(image).parts[-2:])
        is_right = isinstance(captions, list) and len(captions) >= 2
        if is_right and all(isinstance(caption, str) for caption in captions):
            return image, captions
        raise DataError(
            f"{row.source}: the captions are {captions!r}. At least two texts were expected, the "
            "right one first, because the model chooses among them: correct the row."
        )

    def _objects(self, row: Row) -> str:
        """The objects in the picture: a, b name them in the file; else the picture itself."""
        image, _ = self._image_and_captions(row)
        words = Path(image).stem.split("_")
        return " ".join((words[0], words[-1]))


def _preposition(caption: str) -> str:
    words = caption.lower().replace("-", " ").split()
    known = ("left", "right", "front", "behind", "under", "above", "below", "top", "bottom", "on")
    return next((word for word in known if word in words), "other")


class RotateQA(RowsDataset):
    """Questions about pictures that may be rotated: directions, clock positions, angles.

    A `.json` list or `.jsonl` file of {"image": "a.jpg", "rotation": 90, "question": "Where is the
    cup?", "answer": "left"}; rotation is in degrees clockwise. An answer is a direction ("upper
    left"), a clock position ("3 o'clock"), an angle ("90") or, with "options": ["left", "right"],
    one of these ("B", "(B)" or its text). "task" names a group of the report. dataset_path is the
    file, or a folder with `rotate_qa.json` (`.jsonl`) or one file a split, `train.json`.

    Args:
        test_size: held-out rows where there is one file; a picture is on one side only.
        rotate_images: the files are upright: rotate the pictures when they are opened. This
            decodes them on every rank; better store them rotated.
        image_path: folder of the pictures; by default `images` beside the file, or its folder.
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
    ) -> None:
        path = dataset_folder(dataset_path, name=self._name)
        self._rotate_images = rotate_images
        check_split(split)
        if path.is_dir() and any((path / f"{split}.{end}").is_file() for end in ("json", "jsonl")):
            rows = read_rows(find_file(path, (f"{split}.json", f"{split}.jsonl")))
        else:
            names = (f"{self._name}.json", f"{self._name}.jsonl")
            file = path if path.is_file() else find_file(path, names)
            rows = split_rows(
                read_rows(file), split=split, test_size=test_size, key=lambda row: row.text("image")
            )
        folder = path if path.is_dir() else path.parent
        super().__init__(rows, image_roots=_image_roots(folder, image_path, "images"))

    def convert(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        rotation = _rotation(row)
        sample: dict[str, Any] = {
            "id": f"{self._name}-{row.data.get('id', row.number)}",
            "question": row.text("question"),
            "answer": str(row.data["answer"]) if "answer" in row.data else row.text("answer"),
            "rotation": rotation,
            "group": str(row.data.get("task") or f"{rotation} degrees"),
        }
        options = row.data.get("options")
        if isinstance(options, list) and options:
            sample["choices"] = [str(option) for option in options]
        return [row.text("image")], sample

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
    """

    _name = "rotate_caption"

    def convert(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        rotation = _rotation(row)
        caption = row.text("caption")
        return [row.text("image")], {
            "id": f"{self._name}-{row.data.get('id', row.number)}",
            "question": "Describe the picture.",
            "caption": caption,
            "answer": caption,
            "rotation": rotation,
            "group": str(row.data.get("task") or f"{rotation} degrees"),
        }


def _rotation(row: Row) -> int | float:
    rotation = row.data.get("rotation", 0)
    if isinstance(rotation, int | float) and not isinstance(rotation, bool):
        return rotation
    raise DataError(
        f"{row.source}: the rotation is {rotation!r}. Degrees clockwise were expected, as a "
        "number, because figures are given by it: correct the row."
    )


def _image_roots(folder: Path, image_path: str | None, *names: str) -> list[Path]:
    if image_path:
        return [Path(image_path)]
    folder = folder if folder.is_dir() else folder.parent
    return [folder, *(folder / name for name in names), folder.parent]
