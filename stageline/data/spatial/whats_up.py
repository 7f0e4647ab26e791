"""What'sUp: which of some captions, that differ in a preposition, fits a picture."""

import hashlib
from pathlib import Path
from typing import Any, Literal

from stageline.data.readers import Row, dataset_folder, find_file, read_rows, split_rows
from stageline.data.spatial.relations import PAIRS, PREPOSITIONS
from stageline.data.spatial.rows import Named, Others, SpatialRows, check_options, image_roots


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
            more=", or allow others with --dataset.other_relations allow",
        )

    def _objects(self, row: Row) -> str:
        """The objects in the picture: a, b name them in the file; else the picture itself."""
        return _objects(self._image_and_captions(Named(row, self.sample_id(row)))[0])


def _objects(image: str) -> str:
    words = Path(image).stem.split("_")
    return " ".join((words[0], words[-1]))


def _draw(subset: str, number: int, option: int) -> bytes:
    return hashlib.sha256(f"{subset} {number} {option}".encode()).digest()
