"""Scenes with questions, drawn when they are asked for: no file, no download, exact answers."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Literal

from PIL import Image

from stageline.data.scene_drawing import COLORS, REFERENCES, SHAPES, draw_scene
from stageline.data.scene_questions import (
    TASKS,
    Question,
    SceneRules,
    Task,
    draw_anchor,
    draw_negative,
    draw_positive,
    pick,
)
from stageline.errors import UserError

SPLITS = ("train", "validation", "test")
# thirds of the grid of distances: no scene of one split can occur in another
_DISTANCES = {
    split: tuple(round(0.5 + 0.02 * (3 * step + place), 2) for step in range(5))
    for place, split in enumerate(SPLITS)
}


class Scenes:
    """Where is the red ball from the car's point of view? Pictures drawn by the project itself.

    Something with a front (car, person, arrow) stands among coloured things. Tasks: `direction`
    (left, right, front, back), `clock` (12 o'clock is straight ahead), `picture` (left or right
    in the picture) and `statement` (yes or no). All answers of a task are as frequent. A sample
    follows from seed, split and index alone. Of validation and test, every other sample asks
    about a shape in a colour at a heading that training never has.

    Args:
        dataset_path: not used; nothing is read.
        seed: of all scenes.
        num_train: samples to train; groups count once.
        num_test: held-out samples, of validation and test each.
        negatives: gives groups of 2 + so many neighbouring samples: an anchor, a positive (other
            picture, same answer) and negatives (a small change, other answer).
        tasks: which are asked, in turn.
        references: what faces somewhere.
        num_shapes, num_colors: how many there are, at most four and six.
        num_things: around the reference, at most five.
        headings: how many the reference has: 4, 8 or 12 ...
        oblique: share of pictures that are seen at a slant instead of from above.
        image_size: width and height of the pictures.
    """

    def __init__(
        self,
        *,
        dataset_path: str | None = None,
        split: Literal["train", "validation", "test"] = "train",
        seed: int = 0,
        num_train: int = 6000,
        num_test: int = 800,
        negatives: int | None = None,
        tasks: Sequence[Task] = TASKS,
        references: Sequence[str] = REFERENCES,
        num_shapes: int = 4,
        num_colors: int = 6,
        num_things: int = 3,
        headings: int = 8,
        oblique: float = 0.0,
        image_size: int = 48,
    ) -> None:
        self._split, self._seed = split, seed
        self._tasks = tuple(tasks)
        self._negatives = negatives
        if negatives is not None:
            self.group_size = 2 + negatives
        self._count = num_train if split == "train" else num_test
        self._image_size = image_size
        common = {
            "references": tuple(references),
            "shapes": SHAPES[:num_shapes],
            "colors": tuple(COLORS)[:num_colors],
            "headings": headings,
            "num_things": num_things,
            "distances": _DISTANCES[split],
            "oblique": oblique,
        }
        self._rules = (SceneRules(**common), SceneRules(**common, holds_new=True))

    def __len__(self) -> int:
        return self._count * (1 if self._negatives is None else 2 + self._negatives)

    def __getitem__(self, index: int) -> tuple[list[Image.Image], dict[str, Any]]:
        question, role, group = self.question(index)
        task = question.task
        is_new = self._is_new(group)
        sample: dict[str, Any] = {
            "id": f"scenes-{self._split}-{index}",
            "question": question.text,
            "answer": question.answer,
            "rotation": question.scene.heading,
            "task": task,
            "group": f"{task}, new" if is_new else task,
        }
        if self._negatives is not None:
            sample |= {"contrast_group": f"scenes-{self._split}-{group}", "role": role}
        return [draw_scene(question.scene, self._image_size)], sample

    def question(self, index: int) -> tuple[Question, str, int]:
        """Question, role and number of the group of a sample, without its picture."""
        size = 1 if self._negatives is None else 2 + self._negatives
        group, place = divmod(index, size)
        rules = self._rules[self._is_new(group)]
        random = self._random(group, 0)
        anchor = draw_anchor(random, rules, self._tasks[group % len(self._tasks)])
        if place == 0:
            return anchor, "anchor", group
        random = self._random(group, place)
        if place == 1:
            return draw_positive(random, rules, anchor), "positive", group
        return draw_negative(random, rules, anchor, group + place), "negative", group

    def _is_new(self, group: int) -> bool:
        """Held-out samples take turns, whatever the number of tasks is."""
        return self._split != "train" and group // len(self._tasks) % 2 == 1

    def _random(self, group: int, place: int) -> Random:
        return Random(f"scenes {self._seed} {self._split} {group} {place}")

    def describe(self, index: int) -> str:
        return f"scenes {self._split} {index} (seed {self._seed})"
