"""Measures the pictures by their pixels alone: background, colour, shape and size are as asked."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import assembly
import torch
from PIL import Image
from progress import say
from shapes import BACKGROUNDS, COLOURS, SHAPES, SIDE, Rgb, Sight, cover

STEPS, GUIDANCE = 20, 3.0
UNSEEN = 1_000_003  # far from the seeds that people try first
APART = 60.0  # a pixel farther than this from the background shows the shape's colour
NEAR = 60.0  # a colour farther than this from the named one is wrong, though none is nearer
FIT = 0.75  # least overlap with the ideal shape, as intersection over union
SMALL, BIG = 12.0, 20.5  # half of the extent in pixels: below, above
SHEET = (
    Sight("red", "circle", "white"),
    Sight("blue", "square", "black"),
    Sight("yellow", "star", "black"),
    Sight("green", "triangle", "white"),
    Sight("purple", "circle", "grey", "small"),
    Sight("orange", "star", "white", "big"),
    Sight("cyan", "triangle", "black"),
    Sight("pink", "square", "grey", "big"),
)


@dataclass(frozen=True)
class Seen:
    """What the pixels show.

    Attributes:
        background: the nearest background, or `?` when none is near.
        colour: the nearest colour, or `?` when none is near or there is no shape.
        shape: the shape that overlaps best, or `?` when none overlaps well.
        size: a key of SIZES, by the extent.
    """

    background: str
    colour: str
    shape: str
    size: str


def nearest(colour: torch.Tensor, table: dict[str, Rgb]) -> str:
    """Returns the name of the nearest colour, by the distance of red, green and blue."""
    distances = {name: (colour - torch.tensor(rgb)).norm().item() for name, rgb in table.items()}
    best = min(distances, key=lambda name: distances[name])
    return best if distances[best] <= NEAR else "?"


def look(image: Image.Image) -> Seen:
    """Finds the background along the edges, then the one shape on it."""
    pixels = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    pixels = pixels.view(SIDE, SIDE, 3).float()
    edge = torch.ones(SIDE, SIDE, dtype=torch.bool)
    edge[2:-2, 2:-2] = False
    ground = pixels[edge].median(dim=0).values
    apart = (pixels - ground).norm(dim=-1)
    if (apart > APART).sum() < 20:
        return Seen(nearest(ground, BACKGROUNDS), "?", "?", "?")
    colour = pixels[apart > APART].median(dim=0).values
    shape, reach = best_shape(apart > (colour - ground).norm() / 2)
    size = "small" if reach < SMALL else "big" if reach > BIG else ""
    return Seen(nearest(ground, BACKGROUNDS), nearest(colour, COLOURS), shape, size)


def best_shape(thing: torch.Tensor) -> tuple[str, float]:
    """Stretches each ideal shape to the bounding box; returns the best one, and half a side."""
    rows, columns = (torch.nonzero(thing.any(dim=axis)).flatten().tolist() for axis in (1, 0))
    high, wide = rows[-1] + 1 - rows[0], columns[-1] + 1 - columns[0]
    box = thing[rows[0] : rows[0] + high, columns[0] : columns[0] + wide]
    fits = {}
    for shape, ideal in ideals().items():
        image = ideal.resize((wide, high), Image.Resampling.BOX)
        same = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) > 127
        same = same.view(high, wide)
        fits[shape] = (same & box).sum().item() / (same | box).sum().item()
    best = max(fits, key=lambda name: fits[name])
    good = fits[best] >= FIT and max(high, wide) <= 1.35 * min(high, wide)
    return (best if good else "?"), (high + wide) / 4


@cache
def ideals() -> dict[str, Image.Image]:
    """Each shape, cut out along its edges."""
    drawn = {}
    for shape in SHAPES:
        covers = (cover(shape, SIDE / 2, SIDE / 2, 28.0) * 255).byte()
        image = Image.fromarray(covers.numpy())
        drawn[shape] = image.crop(image.point(lambda level: 255 * (level > 127)).getbbox())
    return drawn


def questions() -> list[Sight]:
    """Every colour, shape and background once, and every colour and shape in both other sizes."""
    plain = [Sight(c, s, g) for c in COLOURS for s in SHAPES for g in BACKGROUNDS]
    grounds = list(BACKGROUNDS)
    pairs = [(c, s) for c in COLOURS for s in SHAPES]
    sized = [
        Sight(c, s, grounds[(at + turn) % 3], size)
        for turn, size in enumerate(("small", "big"))
        for at, (c, s) in enumerate(pairs)
    ]
    return plain + sized


def measure(pipe: Any, seeds: int) -> float:
    """Draws all questions with `seeds` seeds each, prints percentages; returns the share right."""
    sights = [sight for sight in questions() for _ in range(seeds)]
    numbers = [UNSEEN + at for at in range(len(sights))]
    prompts = [sight.prompt for sight in sights]
    images = assembly.draw(pipe, prompts, numbers, STEPS, GUIDANCE)
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for sight, image in zip(sights, images, strict=True):
        seen = look(image)
        for part in ("background", "colour", "shape", "size"):
            told, found = getattr(sight, part), getattr(seen, part)
            for key in (part, f"  {told or 'plain'}"):
                total[key] += 1
                right[key] += told == found
            if told != found:
                wrong[f"{told or 'plain'} drawn as {found or 'plain'}"] += 1
        total["all of it"] += 1
        right["all of it"] += seen == Seen(sight.background, sight.colour, sight.shape, sight.size)
    say(f"{len(sights)} pictures, {STEPS} steps, guidance {GUIDANCE}")
    for key, count in sorted(total.items(), key=lambda item: item[0].startswith(" ")):
        say(f"{key:14s} {right[key]:4d} of {count:4d}  {100 * right[key] / count:5.1f} %")
    say("most frequent mistakes: " + "; ".join(f"{k}: {n}" for k, n in wrong.most_common(8)))
    return right["all of it"] / total["all of it"]


def sheet(pipe: Any, path: Path, larger: int = 3) -> None:
    """Writes eight drawings in a row, enlarged, with a thin line between them."""
    images = assembly.draw(pipe, [sight.prompt for sight in SHEET], [1] * 8, STEPS, GUIDANCE)
    side, line = SIDE * larger, 4
    row = Image.new("RGB", (len(images) * (side + line) - line, side), (160, 160, 160))
    for at, image in enumerate(images):
        row.paste(image.resize((side, side), Image.Resampling.NEAREST), (at * (side + line), 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    row.save(path, optimize=True)
