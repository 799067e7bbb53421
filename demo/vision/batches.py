"""Turns drawn pictures, conversations and old dialogues into tensors."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pictures import COLOURS, SHAPES, Picture, draw
from PIL import Image
from questions import Message, Talk, talk, talk_without_picture
from tower import Cells, Grid, patches_of
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

sys.path.append(str(Path(__file__).resolve().parent.parent))
from dialogues import Dialogue, Practice
from held_out import FRESH, GUIDING
from reading import plain_form, read_corpus

CELL = 28  # pixels
CORPUS = Path(__file__).resolve().parent.parent / "corpus"
IGNORE, PAD = -100, 3
IMAGE_PAD = "<|image_pad|>"
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)


@dataclass
class Batch:
    """Conversations as tensors.

    Attributes:
        ids: `[rows, length]`.
        labels: the same, with IGNORE wherever the assistant is not speaking.
        positions: M-RoPE's time, row and column of every token, `[3, rows, length]`.
        looks: patches and truth of all pictures, by grid.
        order: which picture is which, in the order of their marks in `ids`.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    looks: dict[Grid, tuple[torch.Tensor, Cells]] = field(default_factory=dict)
    order: list[tuple[Grid, int]] = field(default_factory=list)


# --- pictures ------------------------------------------------------------------------------------


def pixels_of(picture: Picture, grid: Grid) -> torch.Tensor:
    """Resizes and normalizes as the preprocessor does, `[3, height, width]`."""
    size = grid[1] * CELL, grid[0] * CELL
    image = picture.image.resize(size, Image.Resampling.BICUBIC)
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return (values.view(size[1], size[0], 3).permute(2, 0, 1).float() / 255 - MEAN) / STD


def truth_of(picture: Picture, grid: Grid) -> Cells:
    """What stands in each cell, `[cells]` each; 0 is nothing."""
    rows, columns = grid
    y = ((torch.arange(rows) + 0.5) / rows).view(-1, 1)
    x = ((torch.arange(columns) + 0.5) / columns).view(1, -1)
    wide, high = (side / min(picture.image.size) for side in picture.image.size)
    cells = {name: torch.zeros(rows, columns, dtype=torch.long) for name in ("shape", "colour")}
    cells["centre"] = torch.zeros(rows, columns, dtype=torch.long)
    for thing in picture.things:
        covered = ((x - thing.x) * wide) ** 2 + ((y - thing.y) * high) ** 2 < thing.reach**2
        middle = int(thing.y * rows), int(thing.x * columns)
        covered[middle] = True
        cells["shape"][covered] = 1 + list(SHAPES).index(thing.shape)
        cells["colour"][covered] = 1 + list(COLOURS).index(thing.colour)
        cells["centre"][middle] = 1
    return {name: value.flatten() for name, value in cells.items()}


class PictureSource:
    """Draws batches of pictures, alone or with conversations about them."""

    def __init__(self, tokenizer: Any, seed: int, most: int, fewest: int) -> None:
        """Prepares the draw; pictures become `fewest` to `most` tokens each."""
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._limits = {"min_pixels": fewest * CELL**2, "max_pixels": most * CELL**2}

    def _grid(self) -> Grid:
        """Draws the size of a picture as people send them; returns the grid it becomes."""
        rng = self._random
        long = rng.choice((400, rng.randint(64, 200)))
        aspect = rng.choice((1.0, 1.0, 1.0, 4 / 3, 4 / 3, 3 / 2, 16 / 9, rng.uniform(1, 2)))
        sides = [long, round(long / aspect)]
        rng.shuffle(sides)
        height, width = smart_resize(*sides, factor=CELL, **self._limits)
        return height // CELL, width // CELL

    def _picture(self, grid: Grid, count: int) -> Picture:
        """Draws a picture of any size that becomes this grid, a little stretched."""
        rng = self._random
        scale = rng.choice((1.0, rng.uniform(0.5, 2.0)))
        width = grid[1] * CELL * scale * rng.uniform(0.92, 1.08)
        height = grid[0] * CELL * scale * rng.uniform(0.92, 1.08)
        return draw(count, round(width), round(height), rng)

    def _tensors(self, pictures: list[Picture], grid: Grid) -> tuple[torch.Tensor, Cells]:
        pixels = torch.stack([pixels_of(picture, grid) for picture in pictures])
        if self._random.random() < 0.3:
            pixels = pixels + torch.randn_like(pixels) * self._random.uniform(0, 0.12)
        truths = [truth_of(picture, grid) for picture in pictures]
        cells = {name: torch.stack([truth[name] for truth in truths]) for name in truths[0]}
        return patches_of(pixels, grid), cells

    def looks(self, count: int) -> tuple[Grid, torch.Tensor, Cells]:
        """Returns `count` pictures of one grid as patches, and the truth about them."""
        grid, rng = self._grid(), self._random
        numbers = rng.choices((0, 1, 2, 3, 4), (1, 35, 30, 18, 16), k=count)
        pictures = [self._picture(grid, number) for number in numbers]
        return (grid, *self._tensors(pictures, grid))

    def talks(self, count: int) -> Batch:
        """Returns `count` conversations about pictures of two grids, about one or two each."""
        rng = self._random
        grids = self._grid(), self._grid()
        by_grid: dict[Grid, list[Picture]] = {grid: [] for grid in grids}
        order: list[tuple[Grid, int]] = []
        rows = []
        for _ in range(count):
            if rng.random() < 0.03:
                rows.append(encode(talk_without_picture(rng).messages, self._tokenizer, []))
                continue
            alone = rng.random() < 0.75
            chosen = [rng.choice(grids) for _ in range(1 if alone else 2)]
            if not alone and rng.random() < 0.6:
                chosen[1] = chosen[0]
            weights = (2, 42, 32, 13, 11) if alone else (1, 60, 32, 5, 2)
            numbers = rng.choices((0, 1, 2, 3, 4), weights, k=len(chosen))
            pictures = [self._picture(*pair) for pair in zip(chosen, numbers, strict=True)]
            for grid, picture in zip(chosen, pictures, strict=True):
                order.append((grid, len(by_grid[grid])))
                by_grid[grid].append(picture)
            rows.append(encode(_framed(talk(pictures, rng), rng), self._tokenizer, chosen))
        batch = padded(rows)
        batch.looks = {grid: self._tensors(found, grid) for grid, found in by_grid.items() if found}
        batch.order = order
        return batch


def _framed(conversation: Talk, rng: random.Random) -> list[Message]:
    """Sometimes puts a system message in front."""
    if rng.random() < 0.85:
        return conversation.messages
    words = ("You are a helpful assistant.", "You are a helpful assistant", "Answer briefly.")
    return [{"role": "system", "content": rng.choice(words)}, *conversation.messages]


# --- text ----------------------------------------------------------------------------------------

Row = tuple[list[int], list[int], torch.Tensor]


def encode(messages: list[Message], tokenizer: Any, grids: list[Grid], tools: Any = None) -> Row:
    """Turns a conversation into ids, labels and positions `[3, length]`.

    The text comes from the chat template alone, so practice and service can not drift apart.
    """
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    sizes = iter(grids)

    def widen(_: re.Match[str]) -> str:
        rows, columns = next(sizes)
        return IMAGE_PAD * (rows * columns)

    text = re.sub(re.escape(IMAGE_PAD), widen, text)
    ids: list[int] = []
    labels: list[int] = []
    pieces = re.split(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", text, flags=re.DOTALL)
    for index, piece in enumerate(pieces):
        tokens = tokenizer.encode(piece, add_special_tokens=False)
        ids += tokens
        labels += tokens if index % 2 else [IGNORE] * len(tokens)
    return ids, labels, places(ids, tokenizer.convert_tokens_to_ids(IMAGE_PAD), grids)


def places(ids: list[int], image_pad: int, grids: list[Grid]) -> torch.Tensor:
    """M-RoPE's positions: a picture's tokens share a time and have a row and a column each."""
    columns: list[torch.Tensor] = []
    sizes = iter(grids)
    at = now = 0
    while at < len(ids):
        if ids[at] == image_pad:
            grid = next(sizes)
            y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
            flat = torch.stack([torch.zeros_like(y), y, x]).flatten(1)
            columns.append(flat + now)
            at, now = at + flat.shape[1], now + max(grid)
        else:
            end = next((i for i in range(at, len(ids)) if ids[i] == image_pad), len(ids))
            columns.append(torch.arange(now, now + end - at).expand(3, -1))
            at, now = end, now + end - at
    return torch.cat(columns, dim=1)


def padded(rows: list[Row]) -> Batch:
    """Joins rows of different lengths."""
    longest = max(len(row[0]) for row in rows)
    ids = torch.full((len(rows), longest), PAD)
    labels = torch.full((len(rows), longest), IGNORE)
    positions = torch.zeros(3, len(rows), longest, dtype=torch.long)
    for at, (tokens, targets, where) in enumerate(rows):
        ids[at, : len(tokens)] = torch.tensor(tokens)
        labels[at, : len(tokens)] = torch.tensor(targets)
        positions[:, at, : len(tokens)] = where
    return Batch(ids, labels, positions)


class TextSource:
    """Draws batches of the text model's dialogues, so that nothing of it is forgotten."""

    def __init__(self, tokenizer: Any, seed: int, hurry: float) -> None:
        """Prepares the draw; a share `hurry` of the dialogues ends early, see `_hurried`."""
        self._tokenizer, self._hurry = tokenizer, hurry
        self._random = random.Random(seed)
        forbidden = {plain_form(probe.questions[-1]) for probe in GUIDING + FRESH}
        self._practice = Practice(read_corpus(CORPUS), seed, forbidden)
        self._waiting: list[Row] = []

    def _row(self) -> Row:
        dialogue: Dialogue = self._practice.dialogue()
        row = encode(dialogue.messages, self._tokenizer, [], dialogue.tools)
        return _hurried(row) if self._random.random() < self._hurry else row

    def batch(self, tokens: int) -> Batch:
        """Returns dialogues of similar length, about `tokens` tokens in all."""
        if not self._waiting:
            rows = (self._row() for _ in range(128))
            self._waiting = sorted((row for row in rows if len(row[0]) <= 1024), key=_length)
        start = self._random.randrange(len(self._waiting))
        taken = [self._waiting.pop(start)]
        while start < len(self._waiting):
            if (len(taken) + 1) * _length(self._waiting[start]) > tokens:
                break
            taken.append(self._waiting.pop(start))
        return padded(taken)


def _length(row: Row) -> int:
    return len(row[0])


def _hurried(row: Row) -> Row:
    """Cuts the last answer after eight tokens: the first words decide which answer it will be."""
    ids, labels, where = row
    start = max(
        at for at in range(1, len(ids)) if labels[at] != IGNORE and labels[at - 1] == IGNORE
    )
    return ids[: start + 8], labels[: start + 8], where[:, : start + 8]
