"""Draws the practice pictures: simple shapes in plain colours, as a person might draw them.

`draw` returns a picture and the list of what is on it. Colours, sizes, places, backgrounds,
outlines and the number of pixels vary; two shapes never overlap.
"""

from __future__ import annotations

import colorsys
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFilter

Point = tuple[float, float]
Rgb = tuple[int, int, int]
Outline = Callable[[random.Random], list[Point]]

# Hue in degrees, saturation and value in percent: (lowest, highest). The gaps between them are wide
# enough that people agree on the names.
COLOURS = {
    "red": ((-12, 8), (80, 100), (72, 100)),
    "orange": ((20, 40), (80, 100), (88, 100)),
    "yellow": ((48, 62), (65, 100), (88, 100)),
    "green": ((90, 155), (50, 100), (35, 100)),
    "blue": ((202, 246), (60, 100), (45, 100)),
    "purple": ((266, 302), (50, 100), (40, 85)),
    "pink": ((318, 350), (25, 65), (92, 100)),
    "brown": ((16, 32), (50, 90), (30, 62)),
    "black": ((0, 360), (0, 30), (0, 14)),
    "white": ((0, 360), (0, 4), (95, 100)),
}


@dataclass(frozen=True)
class Thing:
    """One shape of a picture.

    Attributes:
        shape: a key of SHAPES.
        colour: a key of COLOURS.
        x: centre, as a share of the width.
        y: centre, as a share of the height.
        reach: radius of the circle around it, as a share of the shorter side.
    """

    shape: str
    colour: str
    x: float
    y: float
    reach: float

    @property
    def name(self) -> str:
        """For example `red circle`."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Picture:
    """A picture, and the things on it from left to right."""

    image: Image.Image
    things: tuple[Thing, ...]


# --- shapes: points within the unit circle -------------------------------------------------------


def _regular(corners: int, first: float = -90.0) -> list[Point]:
    angles = [math.radians(first + 360 * at / corners) for at in range(corners)]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def _circle(rng: random.Random) -> list[Point]:
    """A circle with a slight dent, as drawn by hand."""
    dent, turn = rng.uniform(0, 0.05), rng.uniform(0, math.tau)
    return [
        (x * (1 + dent * math.sin(3 * at / 16 + turn)), y) for at, (x, y) in enumerate(_regular(48))
    ]


def _square(_: random.Random) -> list[Point]:
    return [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]


def _rectangle(rng: random.Random) -> list[Point]:
    long, short = 0.95, 0.95 / rng.uniform(1.75, 2.8)
    x, y = (long, short) if rng.random() < 0.65 else (short, long)
    return [(-x, -y), (x, -y), (x, y), (-x, y)]


def _triangle(rng: random.Random) -> list[Point]:
    height, lean = rng.uniform(1.2, 1.7), rng.choice((0.0, 0.0, rng.uniform(-0.85, 0.85)))
    points = [(lean, 0.75 - height), (0.9, 0.75), (-0.9, 0.75)]
    return [(x, -y) for x, y in points] if rng.random() < 0.2 else points


def _star(rng: random.Random) -> list[Point]:
    inner = rng.uniform(0.36, 0.52)
    return [(x * r, y * r) for (x, y), r in zip(_regular(10), (1, inner) * 5, strict=True)]


def _cross(rng: random.Random) -> list[Point]:
    arm = rng.uniform(0.2, 0.36)
    quarter = [(arm, -1.0), (arm, -arm), (1.0, -arm)]
    points = []
    for _ in range(4):
        points += quarter
        quarter = [(-y, x) for x, y in quarter]
    return _turned(points, 45) if rng.random() < 0.25 else points


def _heart(_: random.Random) -> list[Point]:
    points = []
    for at in range(48):
        t = math.tau * at / 48
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((16 * math.sin(t) ** 3 / 17, -(y + 2.5) / 16))
    return points


def _diamond(rng: random.Random) -> list[Point]:
    width = rng.uniform(0.55, 1.0)
    return [(0, -1), (width, 0), (0, 1), (-width, 0)]


SHAPES: dict[str, Outline] = {
    "circle": _circle,
    "square": _square,
    "rectangle": _rectangle,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "heart": _heart,
    "diamond": _diamond,
}


def _turned(points: list[Point], degrees: float) -> list[Point]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in points]


def _by_hand(points: list[Point], shape: str, rng: random.Random) -> list[Point]:
    """Turns, stretches and shakes a shape a little."""
    if rng.random() < 0.5:
        points = _turned(points, rng.uniform(-12, 12) if shape != "star" else rng.uniform(-36, 36))
    if rng.random() < 0.5:
        wide, high = rng.uniform(0.87, 1.0), rng.uniform(0.87, 1.0)
        points = [(x * wide, y * high) for x, y in points]
    if rng.random() < 0.35 and len(points) < 20:
        points = [(x + rng.gauss(0, 0.025), y + rng.gauss(0, 0.025)) for x, y in points]
    return points


# --- colours and backgrounds ---------------------------------------------------------------------


def _hsv(hue: float, saturation: float, value: float) -> Rgb:
    red, green, blue = colorsys.hsv_to_rgb(hue % 360 / 360, saturation / 100, value / 100)
    return round(red * 255), round(green * 255), round(blue * 255)


def shade(colour: str, rng: random.Random) -> Rgb:
    """Draws one shade that goes by the name of the colour."""
    hue, saturation, value = (rng.uniform(*span) for span in COLOURS[colour])
    return _hsv(hue, saturation, value)


def _background_shade(rng: random.Random) -> Rgb:
    roll = rng.random()
    if roll < 0.45:
        return 255, 255, 255
    if roll < 0.75:
        return _hsv(rng.uniform(0, 360), rng.uniform(0, 14), rng.uniform(88, 100))
    if roll < 0.88:
        return _hsv(rng.uniform(0, 360), rng.uniform(0, 12), rng.uniform(45, 88))
    return _hsv(rng.uniform(0, 360), rng.uniform(0, 20), rng.uniform(0, 20))


def _background(width: int, height: int, rng: random.Random) -> tuple[Image.Image, list[Rgb]]:
    """Returns an empty picture and the shades it is made of."""
    first = _background_shade(rng)
    if rng.random() < 0.8:
        return Image.new("RGB", (width, height), first), [first]
    second = (
        min(255, max(0, first[0] + rng.randint(-40, 40))),
        min(255, max(0, first[1] + rng.randint(-40, 40))),
        min(255, max(0, first[2] + rng.randint(-40, 40))),
    )
    ramp = Image.linear_gradient("L").rotate(rng.choice((0, 90))).resize((width, height))
    one, other = (Image.new("RGB", (width, height), tint) for tint in (first, second))
    return Image.composite(one, other, ramp), [first, second]


def _distance(one: Rgb, other: Rgb) -> float:
    return math.dist(one, other) / 255


# --- pictures ------------------------------------------------------------------------------------


def _places(count: int, width: int, height: int, rng: random.Random) -> list[tuple[Point, float]]:
    """Draws centres and radii in pixels, such that no two circles touch."""
    side = min(width, height)
    largest = {1: 0.47, 2: 0.28, 3: 0.22, 4: 0.2}[count]
    smallest = {1: 0.14, 2: 0.12, 3: 0.11, 4: 0.1}[count]
    while True:
        found: list[tuple[Point, float]] = []
        for _ in range(40):
            reach = side * rng.uniform(smallest, largest)
            edge = reach * 1.05
            centre = (rng.uniform(edge, width - edge), rng.uniform(edge, height - edge))
            if all(math.dist(centre, at) > 1.12 * (reach + far) for at, far in found):
                found.append((centre, reach))
                if len(found) == count:
                    return found
        largest = max(smallest, largest * 0.95)


def _kinds(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Draws (shape, colour) pairs; a few of them alike."""
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        pair = rng.choice(list(SHAPES)), rng.choice(list(COLOURS))
        if pairs and rng.random() < 0.2:
            pair = pairs[-1][0], pair[1]
        elif pairs and rng.random() < 0.15:
            pair = pair[0], pairs[-1][1]
        elif pairs and rng.random() < 0.12:
            pair = pairs[-1]
        elif pair in pairs:
            continue
        pairs.append(pair)
    return pairs


def draw(count: int, width: int, height: int, rng: random.Random) -> Picture:
    """Draws a picture of `width` times `height` pixels with `count` shapes, 0 to 4."""
    scale = 2 if rng.random() < 0.65 else 1  # drawn larger and shrunk: smooth edges
    wide, high = width * scale, height * scale
    while True:
        image, shades = _background(wide, high, rng)
        kinds = _kinds(count, rng)
        fills = [shade(colour, rng) for _, colour in kinds]
        if all(_distance(fill, back) > 0.3 for fill in fills for back in shades):
            break
    pen = ImageDraw.Draw(image)
    things = []
    places = _places(count, wide, high, rng) if count else []
    style = rng.random()
    for (shape, colour), fill, ((x, y), reach) in zip(kinds, fills, places, strict=True):
        outline = _by_hand(SHAPES[shape](rng), shape, rng)
        points = [(x + reach * a, y + reach * b) for a, b in outline]
        _paint(pen, points, fill, reach, style if rng.random() < 0.8 else rng.random())
        things.append(Thing(shape, colour, x / wide, y / high, reach / min(wide, high)))
    if scale > 1:
        image = image.resize((width, height), Image.Resampling.BOX)
    if rng.random() < 0.08:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.4, 1.0)))
    return Picture(image, tuple(sorted(things, key=lambda thing: thing.x)))


def _paint(
    pen: ImageDraw.ImageDraw, points: list[Point], fill: Rgb, reach: float, style: float
) -> None:
    """Paints one shape: filled, filled with a dark outline, or a thick outline alone."""
    closed = [*points, *points[:2]]
    if style < 0.12:
        stroke = max(2, round(reach * (0.1 + style)))
        pen.line(closed, fill, stroke, joint="curve")
        return
    pen.polygon(points, fill)
    if style > 0.85:
        dark = (0, 0, 0) if sum(fill) > 150 else (90, 90, 90)
        pen.line(closed, dark, max(1, round(reach * 0.06)), joint="curve")
