"""Draws a scene with Pillow: flat colours, smooth edges, the same bytes on each machine."""

import math

from PIL import Image, ImageDraw

from stageline.data.scene_geometry import Scene

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
    """A square picture of `size` pixels."""
    image = Image.new("RGB", (size * _SMOOTH, size * _SMOOTH), GROUND)
    pen = _Pen(ImageDraw.Draw(image), scene, size * _SMOOTH / 2)
    pen.reference()
    # what is nearer to the camera covers what is behind it
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
