"""Draws the practice pictures and says in words what is on them.

A picture has 64 times 64 pixels: one shape of one plain colour on a plain background.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw

SIDE = 64
FINER = 4  # shapes are drawn this many times larger, then reduced, for smooth edges

Rgb = tuple[int, int, int]
Point = tuple[float, float]

COLOURS: dict[str, Rgb] = {
    "red": (220, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (245, 220, 50),
    "green": (30, 160, 60),
    "cyan": (40, 200, 220),
    "blue": (40, 75, 220),
    "purple": (130, 40, 170),
    "pink": (250, 130, 185),
}
BACKGROUNDS: dict[str, Rgb] = {
    "white": (250, 250, 250),
    "black": (15, 15, 15),
    "grey": (128, 128, 128),
}
SHAPES = ("circle", "square", "triangle", "star")
# Half of the shape's extent in pixels: (smallest, largest). "" is a caption without a word of size.
SIZES = {"": (13.0, 19.0), "small": (8.0, 11.0), "big": (22.0, 27.0)}
OTHER_WORDS = {
    "square": ("box",),
    "circle": ("disc", "ball"),
    "grey": ("gray",),
    "small": ("little", "tiny"),
    "big": ("large", "huge"),
}


@dataclass(frozen=True)
class Sight:
    """What a picture shows; each attribute is a key of the table of the same name above."""

    colour: str
    shape: str
    background: str
    size: str = ""

    @property
    def prompt(self) -> str:
        """The plain way to ask for it, for example `a small red circle on a white background`."""
        words = [self.size, self.colour, self.shape]
        thing = " ".join(word for word in words if word)
        return f"{article(thing)} {thing} on a {self.background} background"


def article(thing: str) -> str:
    """Returns `a` or `an`."""
    return "an" if thing[0] in "aeiou" else "a"


def caption(sight: Sight, rng: random.Random) -> str:
    """Says in one of many ways what is seen; a white background may go without saying."""

    def word(name: str) -> str:
        return rng.choice((name, name, *OTHER_WORDS.get(name, ())))

    parts = [word(sight.size) if sight.size else "", sight.colour, word(sight.shape)]
    if rng.random() < 0.05:
        parts.insert(0, "<unk>")
    thing = " ".join(part for part in parts if part)
    ground = word(sight.background)
    forms = [f"{article(thing)} {thing} on a {ground} background"] * 6
    forms += [f"{article(thing)} {thing} on {ground}"] * 3
    forms += [f"{thing} on {ground}", f"{thing} {ground} background", f"the {thing} on {ground}"]
    forms += [f"a {ground} background with {article(thing)} {thing}"]
    if sight.background == "white":
        forms += [f"{article(thing)} {thing}"] * 3 + [thing]
    openings = ["", "", "", "", "", "", "draw ", "please draw ", "a picture of ", "paint "]
    return rng.choice(openings) + rng.choice(forms)


def outline(shape: str, x: float, y: float, reach: float) -> list[Point]:
    """Returns the corners of a shape that fits the square of `2 * reach` around (x, y)."""
    if shape == "square":
        left, top, right, bottom = x - reach, y - reach, x + reach, y + reach
        return [(left, top), (right, top), (right, bottom), (left, bottom)]
    if shape == "triangle":
        return [(x, y - reach), (x + reach, y + reach), (x - reach, y + reach)]
    points = []
    for corner in range(10):
        radius = reach * (1.05 if corner % 2 == 0 else 0.46)
        angle = math.pi * corner / 5
        points.append((x + radius * math.sin(angle), y - radius * math.cos(angle) + 0.05 * reach))
    return points


def cover(shape: str, x: float, y: float, reach: float) -> torch.Tensor:
    """Returns how much of each pixel the shape covers, `[64, 64]` from 0 to 1."""
    image = Image.new("L", (SIDE * FINER, SIDE * FINER))
    pen = ImageDraw.Draw(image)
    x, y, reach = x * FINER, y * FINER, reach * FINER
    if shape == "circle":
        pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill=255)
    else:
        pen.polygon(outline(shape, x, y, reach), fill=255)
    small = image.resize((SIDE, SIDE), Image.Resampling.BOX)
    return torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(SIDE, SIDE) / 255.0


def any_cover(shape: str, size: str, rng: random.Random, roam: float = SIDE) -> torch.Tensor:
    """Draws the shape wholly inside the picture, at most `roam` pixels from its middle."""
    reach = rng.uniform(*SIZES[size])
    free = min(roam, SIDE / 2 - reach * 1.02 - 1)
    # Nearer to the middle more often than to the edges.
    x, y = (SIDE / 2 + free * (rng.random() - rng.random()) for _ in range(2))
    return cover(shape, x, y, reach)


def levels(colour: Rgb) -> torch.Tensor:
    """Returns a colour as `[3, 1, 1]`, from -1 to 1 as the networks want it."""
    return torch.tensor(colour).view(3, 1, 1) / 127.5 - 1


def paint(covers: torch.Tensor, shapes: torch.Tensor, grounds: torch.Tensor) -> torch.Tensor:
    """Paints covers `[n, 1, 64, 64]` in colours `[n, 3, 1, 1]` over backgrounds of either form."""
    return grounds + covers * (shapes - grounds)
