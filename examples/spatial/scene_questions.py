"""Questions about scenes with exact answers, and groups of scenes that differ in one thing.

A group is an anchor, a positive (another picture, same question and answer) and negatives (the
least change that makes the answer another one). All follows from one random generator.

A scene is something that faces somewhere, and things around it, seen from above. Angles are
degrees, clockwise. A bearing or heading of 0 points to the top of the picture; a relative angle of
0 points to where the reference faces.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, TypeVar

from stageline.errors import UserError

DIRECTIONS = ("front", "right", "back", "left")
WAYS = (
    *("up", "upper right", "right", "lower right"),
    *("down", "lower left", "left", "upper left"),
)
# the most degrees from the middle of a sector; beyond it, people would disagree
DIRECTION_REACH = 30.0  # a sector reaches 45 degrees to each side
WAY_REACH = 15.0  # a sector reaches 22.5 degrees to each side
CLOCK_REACH = 7.5  # a sector reaches 15 degrees to each side
SIDE_LEAST = 0.35  # sine of the bearing: 20 degrees from straight above or below
LEAST_ANGLE = 40.0  # between two things
LEAST_DISTANCE = 0.33  # in the picture, in half widths; twice the radius of a thing
OBLIQUE = 0.6  # the share of the depth that is left when the camera looks down at a slant
Task = Literal["direction", "clock", "statement", "picture", "facing"]
TASKS: tuple[Task, ...] = ("direction", "clock", "statement", "picture", "facing")
CLOCK = tuple(f"{hour} o'clock" for hour in (12, *range(1, 12)))
SIDES = ("left", "right")
TRUTHS = ("yes", "no")
ANSWERS: dict[Task, tuple[str, ...]] = {
    "direction": DIRECTIONS,
    "clock": CLOCK,
    "statement": TRUTHS,
    "picture": SIDES,
    "facing": WAYS,
}
_SAID = {"front": "in front", "right": "on the right", "back": "at the back", "left": "on the left"}
_TRIES = 20
_MOST_TRIES = 20_000  # crowded scenes take about a hundred
Item = TypeVar("Item")


@dataclass(frozen=True)
class Thing:
    """An object around the reference; its distance is in half widths of the picture."""

    shape: str
    color: str
    bearing: float
    distance: float

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A scene to draw."""

    reference: str  # the thing that faces somewhere, "car"
    heading: int  # where it faces in the picture, seen from above
    things: tuple[Thing, ...]
    # the reference's offset from the middle; y grows downwards
    offset: tuple[float, float] = (0.0, 0.0)
    is_oblique: bool = False  # the camera looks down at a slant, so that depth is shorter

    def relative(self, index: int) -> float:
        """Return the bearing of a thing as the reference sees it, 0 to 360."""
        return (self.things[index].bearing - self.heading) % 360

    def rotated(self, angle: int) -> "Scene":
        """Turn the reference and all around it together: it sees the same as before."""
        things = tuple(
            replace(thing, bearing=(thing.bearing + angle) % 360) for thing in self.things
        )
        return replace(self, heading=(self.heading + angle) % 360, things=things)

    def mirrored(self) -> "Scene":
        """Return the mirror image: left and right change places, also for the reference."""
        things = tuple(replace(thing, bearing=-thing.bearing % 360) for thing in self.things)
        heading, (x, y) = -self.heading % 360, self.offset
        return replace(self, heading=heading, things=things, offset=(-x, y))

    def facing(self, heading: int) -> "Scene":
        return replace(self, heading=heading % 360)

    def moved(self, index: int, bearing: float) -> "Scene":
        """Move one thing around the reference, at the same distance."""
        things = list(self.things)
        things[index] = replace(things[index], bearing=bearing % 360)
        return replace(self, things=tuple(things))

    def is_crowded(self) -> bool:
        """Return whether two things are in nearly the same direction, or hide each other."""
        places = [self.place(self.position(index)) for index in range(len(self.things))]
        return any(
            angle_between(self.things[i].bearing, self.things[j].bearing) < LEAST_ANGLE
            or math.dist(places[i], places[j]) < LEAST_DISTANCE
            for i in range(len(places))
            for j in range(i)
        )

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        """Return where a point of the ground is in the picture, both in half widths."""
        x, y = point
        return x, y * (OBLIQUE if self.is_oblique else 1.0)

    def position(self, index: int) -> tuple[float, float]:
        """Return where a thing stands on the ground."""
        thing = self.things[index]
        angle = math.radians(thing.bearing)
        x = self.offset[0] + thing.distance * math.sin(angle)
        return x, self.offset[1] - thing.distance * math.cos(angle)


def angle_between(first: float, second: float) -> float:
    """Return the smaller angle between two directions, 0 to 180."""
    return abs((first - second + 180) % 360 - 180)


def _sector_of(angle: float, names: Sequence[str], reach: float) -> str | None:
    """Return the name of the sector of a circle; None further than `reach` from its middle."""
    step = 360 / len(names)
    sector = round(angle / step) % len(names)
    return names[sector] if angle_between(angle, step * sector) <= reach else None


def direction_of(relative: float) -> str | None:
    """front, right, back or left; None near the border of two."""
    return _sector_of(relative, DIRECTIONS, DIRECTION_REACH)


def clock_of(relative: float) -> str | None:
    """Return the clock position, 12 is straight ahead; None near the border of two."""
    return _sector_of(relative, CLOCK, CLOCK_REACH)


def side_of(bearing: float) -> str | None:
    """left or right in the picture; None nearly straight above or below."""
    sine = math.sin(math.radians(bearing))
    if abs(sine) < SIDE_LEAST:
        return None
    return "right" if sine > 0 else "left"


def way_of(heading: float) -> str | None:
    """Return the way that something faces in the picture; None near the limit of two ways."""
    return _sector_of(heading, WAYS, WAY_REACH)


@dataclass(frozen=True)
class Question:
    """A question about one thing of a scene."""

    scene: Scene
    task: Task
    asked: int = 0  # index of the thing
    stated: str = ""  # the direction that a statement claims

    @property
    def text(self) -> str:
        reference, name = self.scene.reference, self.scene.things[self.asked].name
        if self.task == "picture":
            return f"In the picture, is the {name} left or right of the {reference}?"
        if self.task == "facing":
            return f"In the picture, which way does the {reference} face?"
        start = f"From the {reference}'s point of view,"
        if self.task == "direction":
            return f"{start} where is the {name}?"
        if self.task == "clock":
            return f"{start} at which clock position is the {name}?"
        return f"{start} is the {name} {_SAID[self.stated]}?"

    @property
    def answer(self) -> str | None:
        """The right answer by the places; None where people would disagree."""
        if self.task == "picture":
            return side_of(self.scene.things[self.asked].bearing)
        if self.task == "facing":
            return way_of(self.scene.heading)
        relative = self.scene.relative(self.asked)
        if self.task == "clock":
            return clock_of(relative)
        direction = direction_of(relative)
        if self.task == "direction" or direction is None:
            return direction
        return "yes" if direction == self.stated else "no"


def pick(random: Random, items: Sequence[Item]) -> Item:
    """Return one of the items; `random.choice` may differ between versions of Python."""
    return items[int(random.random() * len(items))]


@dataclass(frozen=True)
class SceneRules:
    """The rules that scenes follow."""

    references: tuple[str, ...]
    shapes: tuple[str, ...]
    colors: tuple[str, ...]
    headings: int  # how many the reference may have, from the top on in equal steps
    num_things: int
    distances: tuple[float, ...]  # train and test have none in common
    oblique: float = 0.0  # share of scenes that the camera sees at a slant
    holds_new: bool = False  # whether the asked thing is of a combination that was held out

    def answers(self, task: Task) -> tuple[str, ...]:
        """Return possible answers: with few headings or things, some ways to face are missing."""
        if task != "facing":
            return ANSWERS[task]
        headings = [360 * step // self.headings for step in range(self.headings)]
        things = [Thing(shape, color, 0, 0) for shape in self.shapes for color in self.colors]
        ways = {
            way_of(heading)
            for heading in headings
            if any(self.is_held_out(thing, heading) == self.holds_new for thing in things)
        }
        return tuple(way for way in WAYS if way in ways)

    def is_held_out(self, thing: Thing, heading: int) -> bool:
        """Return whether a shape, colour and heading is held out of training: one in five."""
        step = heading * self.headings // 360
        place = self.shapes.index(thing.shape) + 2 * self.colors.index(thing.color) + step
        return place % 5 == 0

    def allow(self, question: Question) -> bool:
        """Return whether the answer is clear, nothing is hidden, and all fits the split."""
        scene = question.scene
        if question.answer is None or scene.is_crowded():
            return False
        held_out = [self.is_held_out(thing, scene.heading) for thing in scene.things]
        return held_out[question.asked] if self.holds_new else not any(held_out)


def draw_anchor(random: Random, rules: SceneRules, task: Task) -> Question:
    """Draw an answer first, so that all are equally frequent, and then its question."""
    answer = pick(random, rules.answers(task))
    stated = pick(random, DIRECTIONS) if task == "statement" else ""
    for _ in range(_MOST_TRIES):
        scene = _draw_scene(random, rules)
        question = Question(scene, task, 0, stated)
        bearing = _draw_bearing(random, question, answer)
        question = replace(question, scene=scene.moved(0, bearing))
        if question.answer == answer and rules.allow(question):
            return question
    raise _none_found(rules)


def _none_found(rules: SceneRules) -> UserError:
    return UserError(
        f"no scene was found with {rules.num_things} things of {len(rules.shapes)} shapes and "
        f"{len(rules.colors)} colours and {rules.headings} headings; one in five combinations of "
        "the three is held out for the test. Give more shapes, colours or headings, or fewer "
        "things (`dataset.num_shapes` ...)."
    )


def draw_group(random: Random, rules: SceneRules, task: Task, num_negatives: int) -> list[Question]:
    """Anchor, positive, negatives. An anchor that has no such neighbours is drawn again."""
    while True:
        anchor = draw_anchor(random, rules, task)
        positive = draw_positive(random, rules, anchor)
        first = int(3 * random.random())
        group = [anchor]
        for kind in range(first, first + num_negatives):
            negative = draw_negative(random, rules, anchor, kind, taken=group)
            group += [negative] if negative else []
        if positive and len(group) == 1 + num_negatives:
            return [anchor, positive, *group[1:]]


def draw_mirrored(random: Random, rules: SceneRules, task: Task) -> list[Question]:
    """Draw a question and the same one of the scene's mirror image, which has another answer.

    Front is front in a mirror too: who always said so would be right about both images.
    """
    for _ in range(_TRIES**2):
        anchor = draw_anchor(random, rules, task)
        other = replace(anchor, scene=anchor.scene.mirrored())
        if rules.allow(other) and other.answer != anchor.answer:
            return [anchor, other]
    raise _none_found(rules)


def draw_positive(random: Random, rules: SceneRules, anchor: Question) -> Question | None:
    """Draw the same question and answer in another picture: the whole scene is turned.

    Left and right in the picture would change with it: for that task only the reference turns, and
    for the task about the way this faces, the thing moves.
    """
    scene = anchor.scene
    for _ in range(_TRIES):
        angle = _draw_heading(random, rules) or 180
        if anchor.task == "picture":
            changed = scene.facing(scene.heading + angle)
        elif anchor.task == "facing":
            away = 60 + 240 * random.random()
            changed = scene.moved(anchor.asked, scene.things[anchor.asked].bearing + away)
        else:
            changed = scene.rotated(angle)
        question = replace(anchor, scene=changed)
        if question.answer == anchor.answer and rules.allow(question):
            return question
    return None


def draw_negative(
    random: Random,
    rules: SceneRules,
    anchor: Question,
    kind: int,
    *,
    taken: Sequence[Question] = (),
) -> Question | None:
    """Make the smallest change that gives another answer.

    Args:
        kind: 0, 1, 2 ... take turns: the asked thing moves, the reference turns, another thing
            is asked about (of a statement: another direction is claimed). Where one is not
            possible the next is tried.
        taken: not one of these, unless there is no other.
    """
    changes = (_move, _turn, _ask)
    spare = None
    for place in range(len(changes)):
        for _ in range(_TRIES):
            question = changes[(kind + place) % len(changes)](random, rules, anchor)
            if question.answer != anchor.answer and rules.allow(question):
                if question not in taken:
                    return question
                spare = question
    return spare


def _move(random: Random, rules: SceneRules, anchor: Question) -> Question:
    others = [answer for answer in rules.answers(anchor.task) if answer != anchor.answer]
    bearing = _draw_bearing(random, anchor, pick(random, others))
    return replace(anchor, scene=anchor.scene.moved(anchor.asked, bearing))


def _turn(random: Random, rules: SceneRules, anchor: Question) -> Question:
    return replace(anchor, scene=anchor.scene.facing(_draw_heading(random, rules)))


def _ask(random: Random, rules: SceneRules, anchor: Question) -> Question:
    if anchor.task == "statement":
        return replace(anchor, stated=pick(random, DIRECTIONS))
    return replace(anchor, asked=int(random.random() * len(anchor.scene.things)))


def _draw_heading(random: Random, rules: SceneRules) -> int:
    return int(random.random() * rules.headings) * 360 // rules.headings


def _draw_scene(random: Random, rules: SceneRules) -> Scene:
    names: list[tuple[str, str]] = []
    while len(names) < rules.num_things:
        name = (pick(random, rules.shapes), pick(random, rules.colors))
        if name not in names:
            names.append(name)
    things = tuple(
        Thing(shape, color, 360 * random.random(), pick(random, rules.distances))
        for shape, color in names
    )
    offset = (0.1 * random.random() - 0.05, 0.1 * random.random() - 0.05)
    return Scene(
        pick(random, rules.references),
        _draw_heading(random, rules),
        things,
        offset,
        random.random() < rules.oblique,
    )


def _draw_bearing(random: Random, question: Question, answer: str) -> float:
    """Draw a bearing of the asked thing that gives this answer, or nearly so."""
    if question.task == "facing":
        return 360 * random.random()
    if question.task == "picture":
        return (90 if answer == "right" else 270) + 140 * (random.random() - 0.5)
    if question.task == "clock":
        relative = 30 * CLOCK.index(answer) + CLOCK_REACH * (2 * random.random() - 1)
    else:
        direction = answer
        if question.task == "statement":
            others = [name for name in DIRECTIONS if name != question.stated]
            direction = question.stated if answer == "yes" else pick(random, others)
        sector = DIRECTIONS.index(direction)
        relative = 90 * sector + DIRECTION_REACH * (2 * random.random() - 1)
    return question.scene.heading + relative
