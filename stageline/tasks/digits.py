"""scikit-learn's 1,797 real handwritten digits as pictures with a question and an answer."""

from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

import numpy
from PIL import Image

from stageline.data.rows.readers import check_split

QUESTIONS = (
    "Which digit is this?",
    "What digit do you see?",
    "Which number is written here?",
    "Read the digit in the picture.",
)
NUM_TEST = 360


class Digits:
    """Handwritten digits, 8x8 pixels enlarged; 1,437 to train, 360 held out.

    The split is fixed and keeps the share of each digit.

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
        check_split(split)
        self._pixels, self._labels, train, test = _load()
        self.rows = train if split == "train" else test
        self._image_size = image_size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[Image.Image], dict[str, Any]]:
        row = int(self.rows[index])
        small = Image.fromarray(self._pixels[row]).convert("RGB")
        size = (self._image_size, self._image_size)
        question, digit = QUESTIONS[row % len(QUESTIONS)], str(self._labels[row])
        sample = {"id": f"digits-{row}", "question": question, "answer": digit, "group": digit}
        return [small.resize(size, Image.Resampling.BICUBIC)], {**sample, "num_choices": 10}

    def describe(self, index: int) -> str:
        return f"digits row {self.rows[index]}"

    def fingerprint(self) -> str:
        """Return a SHA-256 of scikit-learn's pixels, the image size and the rows of this split."""
        digest = sha256(f"digits {self._image_size} ".encode())
        for array in (self._pixels, self._labels, self.rows):
            digest.update(array.tobytes())
        return digest.hexdigest()


@lru_cache(maxsize=1)
def _load() -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Return pixels [1797, 8, 8] as bytes, labels [1797], and the rows of both splits.

    A hash of the row's number draws the test rows of each digit: equal in every library version.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels, labels = (digits.images * (255 / 16)).round().astype(numpy.uint8), digits.target
    shares = numpy.bincount(labels) * NUM_TEST / len(labels)
    wanted = numpy.floor(shares).astype(int)
    largest_remainders = numpy.argsort(wanted - shares, kind="stable")
    wanted[largest_remainders[: NUM_TEST - wanted.sum()]] += 1
    chosen: list[int] = []
    for digit, number in enumerate(wanted):
        rows = numpy.flatnonzero(labels == digit).tolist()
        chosen += sorted(rows, key=lambda row: sha256(f"digits {row}".encode()).digest())[:number]
    test = numpy.sort(numpy.array(chosen))
    return pixels, labels, numpy.setdiff1d(numpy.arange(len(pixels)), test), test
