"""Block diffusion as SGLang runs it for SDAR: the practice, and the decoding.

Positions are cut into blocks of four from the very first token on. A token sees its own block
whole and all blocks before it, in the prompt as in the answer. The block in which the prompt ends
begins with the rest of the prompt. In a block, masked words are replaced in steps: all of which the
model is surer than the threshold, or else the surest one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 4
THRESHOLD = 0.95
IGNORE = -100  # the label that cross_entropy leaves out
LOOKS = 2  # masked copies of an answer per step: the prompt is then read once for both
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes ids `[rows, length]`, positions alike and who sees whom `[rows, length, length]`; returns
scores `[rows, length, vocabulary]`."""


@dataclass
class Batch:
    """Conversations as tensors: first the clean text, then masked copies of the last answer.

    Attributes:
        ids: `[rows, length]`.
        labels: the hidden word where there is a mask, else IGNORE, `[rows, length]`.
        positions: `[rows, length]`.
        sees: whether the token of the second index is visible to that of the first,
            `[rows, length, length]`.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    sees: torch.Tensor


@dataclass(frozen=True)
class Row:
    """One conversation laid out: ids, labels, positions, and the copy each token belongs to."""

    ids: list[int]
    labels: list[int]
    positions: list[int]
    copies: list[int]


def lay_out(prompt: list[int], answer: list[int], end: int, mask: int, rng: random.Random) -> Row:
    """Writes the clean text and masked copies of the answer's blocks one after the other.

    The last block is filled up with `end`. In each block of a copy a random number of the answer's
    words is masked, at least one.
    """
    text = prompt + answer
    text += [end] * (-len(text) % BLOCK)
    row = Row(list(text), [IGNORE] * len(text), list(range(len(text))), [0] * len(text))
    first = len(prompt) // BLOCK * BLOCK
    for copy in range(1, LOOKS + 1):
        for start in range(first, len(text), BLOCK):
            open_places = [at for at in range(start, start + BLOCK) if at >= len(prompt)]
            masked = set(rng.sample(open_places, rng.randint(1, len(open_places))))
            for at in range(start, start + BLOCK):
                row.ids.append(mask if at in masked else text[at])
                row.labels.append(text[at] if at in masked else IGNORE)
                row.positions.append(at)
                row.copies.append(copy)
    return row


def stack(rows: list[Row], pad: int) -> Batch:
    """Pads rows to one length and works out who sees whom."""
    ids, labels = _padded([x.ids for x in rows], pad), _padded([x.labels for x in rows], IGNORE)
    positions, copies = (
        _padded([x.positions for x in rows], 0),
        _padded([x.copies for x in rows], -1),
    )
    blocks = positions // BLOCK
    query, key = blocks.unsqueeze(2), blocks.unsqueeze(1)
    query_copy, key_copy = copies.unsqueeze(2), copies.unsqueeze(1)
    same_block = (query == key) & (query_copy == key_copy)
    sees = same_block | ((key < query) & (key_copy == 0))
    return Batch(ids, labels, positions, sees)


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=value
    )


def decode(forward: Forward, prompt: list[int], end: int, mask: int, most: int = 64) -> list[int]:
    """Writes an answer block by block, greedily, until `end` or about `most` tokens."""
    text = list(prompt)
    while len(text) < len(prompt) + most:
        start = len(text) // BLOCK * BLOCK
        text += [mask] * (start + BLOCK - len(text))
        while mask in text:
            ids = torch.tensor([text])
            positions = torch.arange(len(text)).unsqueeze(0)
            blocks = positions // BLOCK
            sees = blocks.unsqueeze(1) <= blocks.unsqueeze(2)
            scores = forward(ids, positions, sees)[0, start:].softmax(dim=-1)
            sure, word = scores.max(dim=-1)
            sure = sure.where(ids[0, start:] == mask, -1.0)
            chosen = [at for at in range(BLOCK) if sure[at] > THRESHOLD] or [int(sure.argmax())]
            for at in chosen:
                text[start + at] = int(word[at])
        if end in text[len(prompt) :]:
            return text[len(prompt) : text.index(end, len(prompt))]
    return text[len(prompt) :]
