"""The vision tower on a batch of equal grids, and the heads that train it cell by cell.

`see` computes what transformers' Qwen2_5_VisionTransformerPretrainedModel computes, with the same
weights, but for many pictures at once. It needs full attention in every layer, as this model has.
"""

from __future__ import annotations

from typing import Any

import torch
from pictures import COLOURS, SHAPES
from torch.nn import functional

Grid = tuple[int, int]  # rows and columns of cells; a cell is one token, 28 times 28 pixels
Cells = dict[str, torch.Tensor]


def patch_places(grid: Grid) -> torch.Tensor:
    """Row and column of every patch, four patches of one cell after the other, `[patches, 2]`."""
    rows, columns = grid
    places = torch.stack(
        torch.meshgrid(torch.arange(2 * rows), torch.arange(2 * columns), indexing="ij"), dim=-1
    )
    return places.view(rows, 2, columns, 2, 2).transpose(1, 2).reshape(-1, 2)


def patches_of(pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Cuts pictures `[n, 3, height, width]` into `[n, patches, 3 * 14 * 14]`, in that order."""
    rows, columns = grid
    cut = pixels.view(len(pixels), 3, rows, 2, 14, columns, 2, 14)
    return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(pixels), rows * columns * 4, -1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def see(tower: Any, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Turns patches `[n, patches, 588]` into embeddings `[n, cells, hidden]`."""
    count, length, _ = patches.shape
    weight = tower.patch_embed.proj.weight.sum(2).flatten(1)  # both time slots see the same picture
    x = functional.linear(patches, weight).float()
    cos, sin = (part[:, None, :] for part in tower.rotary_pos_emb(x, patch_places(grid)))
    for block in tower.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(x)).view(count, length, 3, attention.num_heads, -1)
        q, k, v = qkv.unbind(2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        )
        x = x + attention.proj(mixed.transpose(1, 2).reshape(count, length, -1))
        x = x + block.mlp(block.norm2(x))
    merged: torch.Tensor = tower.merger(x.reshape(count * length, -1))
    return merged.view(count, length // 4, -1)


class Eye(torch.nn.Module):
    """Practice heads on the tower's embeddings; they are thrown away after training.

    For every cell they tell the shape and the colour that cover it, and whether the centre of a
    shape lies in it. So the language half finds each shape named in one cell.
    """

    def __init__(self, width: int) -> None:
        """Makes heads for embeddings of `width` numbers."""
        super().__init__()
        self.width = width
        self.heads = torch.nn.ModuleDict(
            {
                "shape": torch.nn.Linear(width, len(SHAPES) + 1),
                "colour": torch.nn.Linear(width, len(COLOURS) + 1),
                "centre": torch.nn.Linear(width, 2),
            }
        )

    def loss(self, seen: torch.Tensor, cells: Cells) -> tuple[torch.Tensor, dict[str, float]]:
        """Compares with the truth; also returns the share of covered cells that are wrong."""
        level = functional.rms_norm(seen.float(), (self.width,))
        total, parts = torch.zeros(()), {}
        for name, head in self.heads.items():
            scores, truth = head(level).float().flatten(0, 1), cells[name].flatten()
            each = functional.cross_entropy(scores, truth, reduction="none")
            full = truth > 0
            part = each[full].sum() / full.sum().clamp(min=1) + each[~full].mean()
            total = total + part
            parts[name] = (scores.argmax(-1) != truth)[full].float().mean().item()
        return total, parts
