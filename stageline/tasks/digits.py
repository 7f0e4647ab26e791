"""scikit-learn's 1,797 real handwritten digits as pictures with a question and an answer."""

from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

import numpy
from PIL import Image

from stageline.data.rows.readers import check_split
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
        digit = str(self._labels[row])
        sample = {
            "id": f"digits-{row}",
            "question": QUESTIONS[row % len(QUESTIONS)],
            "answer": digit,
            "group": digit,
            "num_choices": 10,
        }
        return [small.resize(size, Image.Resampling.BICUBIC)], sample

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
    """Return pixels [1797, 8, 8] as bytes, labels [1797], and the rows of both splits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "`dataset` digits needs scikit-learn, which holds the images: pip install scikit-learn."
        ) from error
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(numpy.uint8)
    test = _draw_test(digits.target)
    train = numpy.setdiff1d(numpy.arange(len(pixels)), test)
    return pixels, digits.target, train, test


def _draw_test(labels: numpy.ndarray) -> numpy.ndarray:
    """Return the sorted test rows: a share of each digit, drawn by a hash of the row's number.

    Written out, so that the split is the same with every version of every library.
    """
    counts = numpy.bincount(labels)
    shares = counts * NUM_TEST / len(labels)
    wanted = numpy.floor(shares).astype(int)
    largest_remainders = numpy.argsort(wanted - shares, kind="stable")
    wanted[largest_remainders[: NUM_TEST - wanted.sum()]] += 1
    chosen: list[int] = []
    for digit, number in enumerate(wanted):
        rows = numpy.flatnonzero(labels == digit).tolist()
        chosen += sorted(rows, key=lambda row: sha256(f"digits {row}".encode()).digest())[:number]
    return numpy.sort(numpy.array(chosen))
