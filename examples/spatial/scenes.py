"""Scenes with questions, drawn when they are asked for: no file, no download, exact answers."""

import math
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import Any, Literal

from PIL import Image, ImageDraw

from examples.spatial.scene_questions import (
    TASKS,
    Question,
    Scene,
    SceneRules,
    Task,
    draw_anchor,
    draw_group,
    draw_mirrored,
)
from stageline.data.batches.collate_part import ROLES
from stageline.errors import UserError

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 30),
    "purple": (150, 50, 180),
    "orange": (240, 130, 20),
}
SHAPES = ("ball", "box", "cone", "star")
REFERENCES = ("car", "person", "arrow")
GROUND = (236, 236, 230)
DARK = (40, 40, 48)
PALE = (250, 250, 250)
THING_RADIUS = 0.16  # half widths
REFERENCE_RADIUS = 0.26
_SMOOTH = 4  # drawn larger by this, then averaged

Point = tuple[float, float]
_VERSION = 1  # the version of the drawing for a seed; scores of other versions do not compare
# how the metric rotate_qa reads answers of a task
_READ_AS = {"clock": "clock", "statement": "yes_no"}
SPLITS = ("train", "validation", "test")
# thirds of the grid of distances: no scene of one split can occur in another
_DISTANCES = {
    split: tuple(round(0.5 + 0.02 * (3 * step + place), 2) for step in range(5))
    for place, split in enumerate(SPLITS)
}

# outlines that face the top, in radii of the reference; y grows downwards
_CAR_BODY = ((-0.5, -0.7), (-0.3, -1.0), (0.3, -1.0), (0.5, -0.7), (0.5, 1.0), (-0.5, 1.0))
_CAR_WINDOW = ((-0.4, -0.45), (0.4, -0.45), (0.3, 0.0), (-0.3, 0.0))
_SHOULDERS = ((-1.0, 0.25), (-0.7, -0.05), (0.7, -0.05), (1.0, 0.25), (0.7, 0.55), (-0.7, 0.55))
_NOSE = ((-0.38, -0.3), (0.0, -1.0), (0.38, -0.3))
_ARROW = (
    *((0.0, -1.0), (0.8, -0.1), (0.3, -0.1), (0.3, 1.0)),
    *((-0.3, 1.0), (-0.3, -0.1), (-0.8, -0.1)),
)
# one closed outline each, in radii of the thing
_BOX = ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))
_CONE = ((0.0, -1.0), (1.0, 0.85), (-1.0, 0.85))
_STAR = tuple(
    (
        math.sin(math.pi * step / 5) * (1.1 if step % 2 == 0 else 0.45),
        -math.cos(math.pi * step / 5) * (1.1 if step % 2 == 0 else 0.45),
    )
    for step in range(10)
)


def draw_scene(scene: Scene, size: int) -> Image.Image:
    """Draw a square picture of `size` pixels, with smooth edges, the same on each machine."""
    image = Image.new("RGB", (size * _SMOOTH, size * _SMOOTH), GROUND)
    pen = _Pen(ImageDraw.Draw(image), scene, size * _SMOOTH / 2)
    pen.reference()
    # nearer things cover those that are behind them
    for index in sorted(range(len(scene.things)), key=lambda index: scene.position(index)[1]):
        pen.thing(index)
    return image.reduce(_SMOOTH)


class _Pen:
    """Puts the shapes of one scene onto a canvas."""

    def __init__(self, draw: ImageDraw.ImageDraw, scene: Scene, half: float) -> None:
        self._draw = draw
        self._scene = scene
        self._half = half

    def reference(self) -> None:
        kind = self._scene.reference
        if kind == "car":
            self._turned(_CAR_BODY, DARK)
            self._turned(_CAR_WINDOW, PALE)
        elif kind == "person":
            self._turned(_NOSE, (190, 130, 90))
            self._turned(_SHOULDERS, DARK)
            self._disc(self._scene.offset, 0.45 * REFERENCE_RADIUS, (120, 80, 50))
        else:
            assert kind == "arrow", kind
            self._turned(_ARROW, DARK)

    def thing(self, index: int) -> None:
        thing, (x, y) = self._scene.things[index], self._scene.position(index)
        color = COLORS[thing.color]
        if thing.shape == "ball":
            self._disc((x, y), THING_RADIUS, color)
            return
        outline = {"box": _BOX, "cone": _CONE, "star": _STAR}[thing.shape]
        center = self._pixel((x, y))
        radius = THING_RADIUS * self._half
        # things stand upright whatever the camera does
        self._draw.polygon(
            [(center[0] + radius * u, center[1] + radius * v) for u, v in outline], fill=color
        )

    def _disc(self, center: Point, radius: float, color: tuple[int, int, int]) -> None:
        x, y = self._pixel(center)
        reach = radius * self._half
        self._draw.ellipse((x - reach, y - reach, x + reach, y + reach), fill=color)

    def _turned(self, outline: tuple[Point, ...], color: tuple[int, int, int]) -> None:
        """An outline of the reference, turned to its heading and laid on the ground."""
        angle = math.radians(self._scene.heading)
        sine, cosine = math.sin(angle), math.cos(angle)
        left, top = self._scene.offset
        points = [
            self._pixel(
                (
                    left + REFERENCE_RADIUS * (u * cosine - v * sine),
                    top + REFERENCE_RADIUS * (u * sine + v * cosine),
                )
            )
            for u, v in outline
        ]
        self._draw.polygon(points, fill=color)

    def _pixel(self, point: Point) -> Point:
        x, y = self._scene.place(point)
        return self._half * (1 + x), self._half * (1 + y)


class Scenes:
    """Questions about left, right, front and back in drawn scenes, seen by a car or person.

    Something with a front (car, person, arrow) stands among coloured things. Tasks: `direction`
    (left, right, front, back), `clock` (12 o'clock is straight ahead), `picture` (left or right
    in the picture) and `statement` (yes or no). All answers of a task are equally frequent. A
    sample depends only on seed, split and index. Every other sample of validation and test asks
    about a shape in a colour at a heading that training never has.

    Args:
        dataset_path: not used; nothing is read.
        seed: of all scenes.
        num_train: samples to train; groups count once.
        num_test: held-out samples, of validation and test each.
        negatives: gives groups of 2 + n neighbouring samples: an anchor, a positive (other
            picture, same answer) and negatives (a small change, other answer).
        mirrored: gives pairs of neighbouring samples: a scene and its mirror image, where left and
            right change places and so another answer is right. Without `negatives`.
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
        num_train: int = 4000,
        num_test: int = 800,
        negatives: int | None = None,
        mirrored: bool = False,
        tasks: list[Task] = list(TASKS),
        references: list[str] = list(REFERENCES),
        num_shapes: int = 4,
        num_colors: int = 6,
        num_things: int = 3,
        headings: int = 8,
        oblique: float = 0.0,
        image_size: int = 48,
    ) -> None:
        _check_options(locals())
        self._split, self._seed = split, seed
        self._tasks = tuple(tasks)
        self._num_negatives = negatives or 0
        self._is_mirrored = mirrored
        self.group_size = 2 if mirrored else 1 if negatives is None else 2 + negatives
        self._num_groups = num_train if split == "train" else num_test
        self._image_size = image_size
        trained = SceneRules(
            references=tuple(references),
            shapes=SHAPES[:num_shapes],
            colors=tuple(COLORS)[:num_colors],
            headings=headings,
            num_things=num_things,
            distances=_DISTANCES[split],
            oblique=oblique,
        )
        self._rules = (trained, replace(trained, holds_new=True))
        self._last: tuple[int, list[Question]] = (-1, [])

    def __len__(self) -> int:
        return self._num_groups * self.group_size

    def __getitem__(self, index: int) -> tuple[list[Image.Image], dict[str, Any]]:
        question, (group, place) = self.question(index), divmod(index, self.group_size)
        task, is_new = question.task, self._is_new(group)
        rotation = question.scene.heading
        sample: dict[str, Any] = {
            "id": f"scenes-{self._split}-{index}",
            "question": question.text,
            "answer": question.answer,
            "rotation": rotation,
            "task": _READ_AS.get(task, "direction"),
            "group": f"{task}, new" if is_new else task,
            "groups": {
                "task": task,
                "combination": "new" if is_new else "trained",
                "rotation": f"{rotation} degrees",
            },
        }
        if self.group_size > 1:
            # views of a scene fail together: intervals draw scenes
            sample["contrast_group"] = sample["cluster"] = f"scenes-{self._split}-{group}"
        if self.group_size > 1 and not self._is_mirrored:
            sample["role"] = ROLES[min(place, 2)]
        return [draw_scene(question.scene, self._image_size)], sample

    def question(self, index: int) -> Question:
        """Return the question of a sample, without its picture."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        group, place = divmod(index, self.group_size)
        if self._last[0] != group:
            self._last = group, self._draw(group)
        return self._last[1][place]

    def describe(self, index: int) -> str:
        return f"scenes {self._split} {index} (seed {self._seed})"

    def fingerprint(self) -> str:
        """Return a digest of everything that pictures and questions depend on."""
        facts = (_VERSION, self._split, self._seed, self._tasks, self.group_size, self._image_size)
        return sha256(repr((*facts, self._rules)).encode()).hexdigest()

    def _draw(self, group: int) -> list[Question]:
        random = Random(f"scenes {self._seed} {self._split} {group}")
        task, rules = self._tasks[group % len(self._tasks)], self._rules[self._is_new(group)]
        if self._is_mirrored:
            return draw_mirrored(random, rules, task)
        if self.group_size > 1:
            return draw_group(random, rules, task, self._num_negatives)
        return [draw_anchor(random, rules, task)]

    def _is_new(self, group: int) -> bool:
        """Whether a held-out group has a new combination: every second one, for any number of
        tasks.
        """
        return self._split != "train" and group // len(self._tasks) % 2 == 1


def _check_options(options: dict[str, Any]) -> None:
    """Refuse what cannot be drawn."""
    limits = {
        "num_train": (1, 10**8),
        "num_test": (1, 10**8),
        "num_shapes": (1, len(SHAPES)),
        "num_colors": (1, len(COLORS)),
        "num_things": (1, 5),
        "headings": (4, 360),
        "oblique": (0, 1),
        "image_size": (16, 4096),
    }
    if options["negatives"] is not None:
        limits["negatives"] = (1, 100)
        if options["mirrored"]:
            why = "a group has a mirror image or negatives, not both"
            raise _refusal("negatives", options, "none with `mirrored`", why)
    for name, (least, most) in limits.items():
        if not least <= options[name] <= most:
            raise _refusal(name, options, f"{least} to {most}", "it is out of range")
    for name, known in {"tasks": TASKS, "references": REFERENCES}.items():
        if not options[name] or not set(options[name]) <= set(known):
            wanted = f"some of {', '.join(known)}"
            raise _refusal(name, options, wanted, "it is empty or has an unknown name")
    if options["split"] not in SPLITS:
        raise _refusal("split", options, ", ".join(SPLITS), "it is not known")
    if 360 % options["headings"]:
        why = "all headings are equal steps of whole degrees"
        raise _refusal("headings", options, "a divisor of 360", why)
    if options["num_shapes"] * options["num_colors"] < options["num_things"]:
        why = "a question names a thing by shape and colour, so no two may be alike"
        raise _refusal("num_things", options, "no more than num_shapes x num_colors", why)


def _refusal(name: str, options: dict[str, Any], expected: str, why: str) -> UserError:
    given = f"`dataset`.{name} {options[name]}"
    return UserError(f"{given} cannot be drawn: {why}. Choose {expected}.")
