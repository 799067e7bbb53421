"""How each model family writes images and videos into a prompt: one small file per family."""

from __future__ import annotations

from millstream_server.media.families.loading import load
from millstream_server.media.families.model_config import UnusableFamilyError

__all__ = ["UnusableFamilyError", "load"]
