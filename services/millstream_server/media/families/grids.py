"""A grid of patches and its tokens, for the families that have one."""

from __future__ import annotations

import math

from millstream_server.media.families.model_config import ModelConfig
from millstream_server.media.items import Geometry


def check_grid(tokens: int, geometry: Geometry, merge: int) -> tuple[int, int, int]:
    """Return the grid, in which ``merge`` x ``merge`` patches make one token.

    Raises:
        ValueError: the tokens aren't those of the grid.
    """
    if geometry.grid is None:
        raise ValueError(f"the item has {tokens} tokens but no grid")
    _, height, width = geometry.grid
    if height % merge or width % merge:
        raise ValueError(
            f"the grid {list(geometry.grid)} must have a height and a width that {merge} divides"
        )
    found = math.prod(geometry.grid) // merge**2
    if found != tokens or tokens < 1:
        raise ValueError(
            f"the item has {tokens} tokens, but its grid {list(geometry.grid)} makes {found}"
        )
    return geometry.grid


def flat_patch(config: ModelConfig, patch_size: int) -> tuple[int]:
    """Return the shape of a patch's values; ``patch_size`` is the default of its side in pixels.

    Raises:
        UnusableFamilyError: a value is wrong.
    """
    section = "vision_config"
    channels = config.integer("in_chans", section=section, default=3)
    channels = config.integer("in_channels", section=section, default=channels)
    frames = config.integer("temporal_patch_size", section=section, default=2)
    side = config.integer("patch_size", section=section, default=patch_size)
    return (channels * frames * side**2,)
