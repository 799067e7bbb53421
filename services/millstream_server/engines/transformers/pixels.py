"""No tower: preprocessed pixels, for an engine that runs the vision tower itself."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from millstream_server.encoding.encoder import Prepared
from millstream_server.engines.transformers.tower import TowerConfig, TowerFacts
from millstream_server.engines.transformers.vision import resolved_device, resolved_dtype
from millstream_server.media.families.family import Family
from millstream_server.media.items import Content, Modality


class NoTower:
    """Satisfies `Tower`; its results are the processor's tensors."""

    content = Content.PIXELS

    def __init__(self, config: TowerConfig) -> None:
        """Load nothing yet."""
        self._config = config
        self._dtype: Any = None

    def supports(self, family: Family) -> str | None:
        """It supports every family of `media.families`."""
        return None

    def load(self, family: Family) -> TowerFacts:
        """Choose the type of the pixels: the engine converts them to that of its tower anyway."""
        torch: Any = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        self._dtype = resolved_dtype(self._config, torch, resolved_device(self._config, torch))
        return TowerFacts(
            engine="transformers",
            version=str(transformers.__version__),
            kind=f"pixels {transformers.__version__} {self._dtype}",
        )

    def run(self, modality: Modality, batch: Sequence[Prepared]) -> Sequence[Any]:
        """Return each item's pixels."""
        return [item.inputs.pixels.to(self._dtype) for item in batch]

    def close(self) -> None:
        """There is nothing to release."""
