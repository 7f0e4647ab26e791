"""Solved samples that stand before a question: which ones. A prompt_fn part writes them."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from stageline.errors import UserError

# what makes a sample the question that it is, whatever its id
_QUESTION = ("question", "messages", "caption", "text", "choices")


class FewShot:
    """Draws examples for samples.

    Args:
        dataset: what they are drawn from.
        count: of each sample.
        per_sample: each sample has a draw of its own, by seed and id; else all have the same, but
            for one that would be its own example.
    """

    def __init__(self, dataset: Any, *, count: int, seed: int, per_sample: bool) -> None:
        self.dataset, self.count = dataset, count
        self.seed, self.per_sample = seed, per_sample

    def of(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The examples of one sample, in the order in which they are shown.

        Raises:
            UserError: there are too few, or they have pictures.
        """
        found: list[dict[str, Any]] = []
        for row in self._order(sample):
            if len(found) == self.count:
                break
            images, example = self.dataset[row]
            if images:
                raise UserError(
                    f"--num-fewshot {self.count} came with samples that have pictures. Text alone "
                    "was expected in examples, because a template has places for the pictures of "
                    "one sample: leave --num-fewshot out."
                )
            if not _is_same(example, sample):
                found.append(example)
        if len(found) < self.count:
            raise UserError(
                f"--num-fewshot {self.count} came, and {len(found)} samples can stand before "
                f"sample {sample.get('id')}. As many were expected, because each prompt shows as "
                "many: lower it, or choose another --fewshot-split."
            )
        return found

    def _order(self, sample: Mapping[str, Any]) -> Iterator[int]:
        """Rows in the order of the draw, each once."""
        own = f"/{sample.get('id')}" if self.per_sample else ""
        draw = random.Random(f"{self.seed}{own}")
        seen: set[int] = set()
        while len(seen) < len(self.dataset):
            row = draw.randrange(len(self.dataset))
            if row not in seen:
                seen.add(row)
                yield row


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if str(one.get("id")) == str(other.get("id")):
        return True
    known = [name for name in _QUESTION if one.get(name) is not None or other.get(name) is not None]
    return bool(known) and all(one.get(name) == other.get(name) for name in known)
