"""What a generating engine takes besides text, read from its model's files."""

from __future__ import annotations

from pathlib import Path

from millstream_server.generation.generator import MediaModel
from millstream_server.media import families


def read_media_model(directory: Path, *, takes_pixels: bool) -> MediaModel | None:
    """Return what the model in ``directory`` takes besides text; None: nothing.

    ``takes_pixels`` says whether the engine runs the vision tower itself.

    Raises:
        UnusableFamilyError: the model has a vision tower, but isn't supported or not complete.
    """
    family = families.load(directory)
    if family is None:
        return None
    return MediaModel(
        modalities=family.modalities,
        family=family.name,
        embedding_width=family.embedding_width,
        soft_tokens={modality: family.soft_token(modality) for modality in family.modalities},
        takes_pixels=takes_pixels,
        pixel_shape=family.pixel_shape,
        positions_per_second=family.positions_per_second,
        rules=family,
    )
