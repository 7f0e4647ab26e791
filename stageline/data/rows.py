"""Reads the rows of a dataset, each with random numbers of its own, and knows their lengths.

What a dataset part gives is looked at here: a row that is no (images, sample) is refused by name.
"""

from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Subset

from stageline.contracts import broken, call, shown
from stageline.data.sampler import has_sampler, is_stream
from stageline.errors import DataError, UserError
from stageline.seeds import HostState, derive_seed, seed_host

Item = tuple[Any, Any]  # images, sample


def make_dataset(part: Callable[..., Any], *, dataset_path: str | None, **given: Any) -> Any:
    """Calls a dataset part.

    Args:
        given: what else it gets, such as the split.

    Raises:
        ContractError: it takes other arguments, fails where no path came, or is no dataset.
    """
    try:
        dataset = call("dataset", part, dataset_path=dataset_path, **given)
    except (TypeError, AttributeError, OSError) as error:
        if dataset_path is not None or isinstance(error, UserError):
            raise
        raise broken(
            "dataset",
            part,
            f"failed without --dataset-path ({type(error).__name__}: {error})",
            why="A path was expected, because dataset_path is None without the option",
            cure="give --dataset-path, or let the part do without: dataset_path=None",
        ) from error
    lacks = "__len__" if not isinstance(dataset, Sized) else "__getitem__"
    if lacks == "__len__" or not hasattr(dataset, lacks):
        raise broken(
            "dataset",
            part if dataset is None else dataset,
            f"returned {shown(None)}" if dataset is None else f"has no {lacks}",
            why="Rows with numbers were expected, because each rank takes its rows by number",
            cure="give it __len__(self) and __getitem__(self, index)",
        )
    return dataset


def read_row(dataset: Any, row: int) -> Item:
    """The (images, sample) of a row.

    Raises:
        DataError: the row is something else; part, row and what came are named.
    """
    item = dataset[row]
    problem = _problem_of(item)
    if problem is None:
        images, sample = item
        return images, sample
    came, cure = problem
    while isinstance(dataset, Subset):
        dataset, row = dataset.dataset, dataset.indices[row]
    raise broken(
        "dataset",
        dataset,
        f"gave for row {row} {came}",
        why="A pair (images, sample) was expected, because images and text go different ways",
        cure=cure,
        kind=DataError,
    )


def _problem_of(item: object) -> tuple[str, str] | None:
    """What is wrong with a row, and the cure."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        cure = "return (None, sample) for a row of text, (images, sample) for one with images"
        return shown(item), cure
    images, sample = item
    if not isinstance(sample, Mapping):
        if isinstance(images, Mapping):
            return "the sample before the images", "return (images, sample), the dict second"
        cure = "put the fields of the row into a dict, {'question': ..., 'answer': ...}"
        return f"{shown(sample)} as its sample", cure
    if images is None:
        return None
    if hasattr(images, "convert"):
        return f"one image ({type(images).__name__}) in the place of a list", "return [image]"
    if isinstance(images, str | bytes | Mapping | torch.Tensor) or not hasattr(images, "__len__"):
        cure = "return a list of PIL images, [Image.open(path)], or None"
        return f"{shown(images)} as its images", cure
    for place, image in enumerate(images):
        if not (hasattr(image, "convert") and hasattr(image, "size")):
            what = f"{shown(image)} as image {place} of its images"
            return what, "return PIL images, Image.open(path); the processor makes tensors of them"
    return None


class Rows:
    """The rows of a dataset, as steps ask for them.

    What a row draws (an augmentation) follows from seed, step and its place in the step: not from
    the worker that reads it, the number of replicas, or what was read before. A dataset with a
    true `is_fixed` says that its rows draw nothing, and is read without seeding.

    Args:
        length_of: (images, sample) -> tokens.
    """

    def __init__(self, dataset: Any, length_of: Callable[..., int] | None, *, seed: int) -> None:
        self._dataset = dataset
        self._length_of = length_of
        self._seed = seed
        # no position of a stream comes again, and what has a sampler may have a billion rows
        self._forgets = is_stream(dataset) or has_sampler(dataset)
        self._is_fixed = getattr(dataset, "is_fixed", False)
        self._known: dict[int, int] = {}
        self._drawing: set[int] = set()

    def read(self, row: int, step: int, place: int) -> Item:
        """A row.

        Args:
            place: in the step, over all replicas.
        """
        if self._is_fixed:
            return self._dataset[row]
        seed_host(derive_seed(self._seed, "row", step, place))
        before = HostState()
        item = self._dataset[row]
        if not before.is_current():
            self._drawing.add(row)
        return item

    def length(self, row: int, step: int, place: int, item: Item | None = None) -> int:
        """The length of a row: computed once, unless the row draws and may come out otherwise.

        Args:
            item: the row, where it was read already.
        """
        if row in self._known:
            return self._known[row]
        images, sample = self.read(row, step, place) if item is None else item
        length = self._length_of(images, sample)
        if row not in self._drawing and not self._forgets:
            self._known[row] = length
        return length
