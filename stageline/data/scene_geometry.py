"""A scene seen from above: something that faces somewhere, and things around it. Pure numbers.

Angles are degrees, clockwise. A bearing or heading of 0 points to the top of the picture; a
relative angle of 0 points to where the reference faces.
"""

import math
from dataclasses import dataclass, replace

DIRECTIONS = ("front", "right", "back", "left")
WAYS = (
    *("up", "upper right", "right", "lower right"),
    *("down", "lower left", "left", "upper left"),
)
# how far from the middle of a sector a thing may lie; beyond it, people would disagree
DIRECTION_REACH = 30.0  # of 45
WAY_REACH = 15.0  # of 22.5
CLOCK_REACH = 7.5  # of 15
SIDE_LEAST = 0.35  # sine of the bearing: 20 degrees from straight above or below
LEAST_ANGLE = 40.0  # between two things
LEAST_DISTANCE = 0.33  # in the picture, in half widths; twice the radius of a thing
OBLIQUE = 0.6  # what is left of the depth when the camera looks down at a slant


@dataclass(frozen=True)
class Thing:
    """An object beside the reference; its distance is in half widths of the picture."""

    shape: str
    color: str
    bearing: float
    distance: float

    @property
    def name(self) -> str:
        """As a question calls it."""
        return f"{self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """What is to be drawn.

    Attributes:
        reference: what faces somewhere, "car".
        heading: where it faces in the picture, seen from above.
        offset: of the reference from the middle, in half widths; y grows downwards.
        is_oblique: the camera looks down at a slant, so that depth is shorter.
    """

    reference: str
    heading: int
    things: tuple[Thing, ...]
    offset: tuple[float, float] = (0.0, 0.0)
    is_oblique: bool = False

    def relative(self, index: int) -> float:
        """Where a thing lies as the reference sees it, 0 to 360."""
        return (self.things[index].bearing - self.heading) % 360

    def rotated(self, angle: int) -> "Scene":
        """The reference and all around it turned together: it sees the same as before."""
        things = tuple(
            replace(thing, bearing=(thing.bearing + angle) % 360) for thing in self.things
        )
        return replace(self, heading=(self.heading + angle) % 360, things=things)

    def facing(self, heading: int) -> "Scene":
        """Only the reference turns."""
        return replace(self, heading=heading % 360)

    def moved(self, index: int, bearing: float) -> "Scene":
        """One thing goes around the reference, at the same distance."""
        things = list(self.things)
        things[index] = replace(things[index], bearing=bearing % 360)
        return replace(self, things=tuple(things))

    def is_crowded(self) -> bool:
        """Whether two things lie in nearly the same direction, or hide each other."""
        places = [self.place(self.position(index)) for index in range(len(self.things))]
        return any(
            angle_between(self.things[i].bearing, self.things[j].bearing) < LEAST_ANGLE
            or math.dist(places[i], places[j]) < LEAST_DISTANCE
            for i in range(len(places))
            for j in range(i)
        )

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        """Where a point of the ground lies in the picture, both in half widths."""
        x, y = point
        return x, y * (OBLIQUE if self.is_oblique else 1.0)

    def position(self, index: int) -> tuple[float, float]:
        """Where a thing stands on the ground."""
        thing = self.things[index]
        angle = math.radians(thing.bearing)
        x = self.offset[0] + thing.distance * math.sin(angle)
        return x, self.offset[1] - thing.distance * math.cos(angle)


def angle_between(first: float, second: float) -> float:
    """The smaller angle between two directions, 0 to 180."""
    return abs((first - second + 180) % 360 - 180)


def direction_of(relative: float) -> str | None:
    """front, right, back or left; None near the border of two."""
    sector = round(relative / 90) % 4
    is_clear = angle_between(relative, 90 * sector) <= DIRECTION_REACH
    return DIRECTIONS[sector] if is_clear else None


def clock_of(relative: float) -> str | None:
    """The clock position, 12 is straight ahead; None near the border of two."""
    hour = round(relative / 30) % 12
    is_clear = angle_between(relative, 30 * hour) <= CLOCK_REACH
    return f"{hour or 12} o'clock" if is_clear else None


def side_of(bearing: float) -> str | None:
    """left or right in the picture; None nearly straight above or below."""
    sine = math.sin(math.radians(bearing))
    if abs(sine) < SIDE_LEAST:
        return None
    return "right" if sine > 0 else "left"


def way_of(heading: float) -> str | None:
    """Where something faces in the picture; None near the border of two."""
    sector = round(heading / 45) % 8
    return WAYS[sector] if angle_between(heading, 45 * sector) <= WAY_REACH else None
