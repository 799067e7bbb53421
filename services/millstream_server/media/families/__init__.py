"""How each model family writes images and videos into a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream_server.media.families.family import Family, ModelConfig, UnusableFamilyError
from millstream_server.media.families.gemma3 import Gemma3
from millstream_server.media.families.qwen import Qwen3Vl, Qwen25Vl

__all__ = ["UnusableFamilyError", "load"]

_FAMILIES: dict[str, Callable[[ModelConfig], Family]] = {
    "qwen2_5_vl": Qwen25Vl.read,
    "qwen3_vl": Qwen3Vl.read,
    "gemma3": Gemma3.read,
}


def load(directory: Path) -> Family | None:
    """Return the family of the model in ``directory``; None if it reads text only.

    Raises:
        UnusableFamilyError: the model has a vision tower of a family that isn't known here, or one
        of its files is missing or wrong.
    """
    config = ModelConfig(directory)
    content = config.file("config.json")
    read = _FAMILIES.get(content.get("model_type", ""))
    if read is not None:
        return read(config)
    if "vision_config" in content:
        raise UnusableFamilyError(
            f"{directory / 'config.json'}: images of the model type "
            f"{content.get('model_type')!r} are not supported; supported are "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    return None
