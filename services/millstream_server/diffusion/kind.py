"""What a diffusion worker makes: the setting that decides which other settings there are."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from millstream_server.runtime.settings import setting


class DiffusionKind(enum.Enum):
    """What a worker makes."""

    IMAGE = "image"
    VIDEO = "video"
    TEXT = "text"
    """By a diffusion language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSettings:
    """Read before all others."""

    kind: DiffusionKind = setting(
        DiffusionKind.IMAGE,
        help="what the model makes: image, video or text; text has settings of its own, which "
        "--kind text --help lists",
    )
