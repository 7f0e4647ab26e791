"""scikit-learn's 1,797 real handwritten digits as pictures with a question and an answer."""

from functools import lru_cache
from typing import Any, Literal

import numpy
from PIL import Image

from stageline.errors import UserError

QUESTIONS = (
    "Which digit is this?",
    "What digit do you see?",
    "Which number is written here?",
    "Read the digit in the picture.",
)
NUM_TEST = 360


class Digits:
    """Handwritten digits, 8x8 pixels enlarged; 1,437 to train, 360 held out.

    The split is fixed and keeps the share of each digit. The wording of the question follows from
    the row, so it is the same in each epoch.

    Args:
        dataset_path: not used; the images come with scikit-learn.
        image_size: width and height of the pictures.
    """

    def __init__(
        self,
        *,
        dataset_path: str | None = None,
        split: Literal["train", "test"] = "train",
        image_size: int = 32,
    ) -> None:
        pixels, labels, train, test = _load()
        if split not in ("train", "test"):
            raise UserError(
                f"digits has the splits train and test, not {split!r}: use one of them."
            )
        self.rows = train if split == "train" else test
        self._pixels, self._labels = pixels, labels
        self._image_size = image_size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[Image.Image], dict[str, Any]]:
        row = int(self.rows[index])
        small = Image.fromarray(self._pixels[row]).convert("RGB")
        size = (self._image_size, self._image_size)
        digit = str(self._labels[row])
        sample = {
            "id": f"digits-{row}",
            "question": QUESTIONS[row % len(QUESTIONS)],
            "answer": digit,
            "group": digit,
        }
        return [small.resize(size, Image.Resampling.BICUBIC)], sample

    def describe(self, index: int) -> str:
        return f"digits row {self.rows[index]}"


@lru_cache(maxsize=1)
def _load() -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Pixels [1797, 8, 8] as bytes, labels [1797], rows of both splits."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise UserError(
            "--dataset digits needs scikit-learn, which holds the images, and it is not "
            "installed: pip install scikit-learn."
        ) from error
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(numpy.uint8)
    train, test = train_test_split(
        numpy.arange(len(pixels)), test_size=NUM_TEST, stratify=digits.target, random_state=0
    )
    return pixels, digits.target, numpy.sort(train), numpy.sort(test)
