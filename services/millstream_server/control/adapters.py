"""LoRA adapters of a running engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A loaded LoRA adapter."""

    name: str
    rank: int = 0
    """0: not known."""
    path: Path | None = None
    """Its directory; None: it is another process's."""


class AdapterControl(Protocol):
    """All calls come from one event loop, one at a time. Requests may run."""

    async def load_adapter(self, name: str, path: Path) -> LoraAdapter:
        """Load an adapter; no adapter of that name is loaded.

        Raises:
            InvalidWeightsError: its files are missing, incomplete, or don't fit to the model.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Remove a loaded adapter; waits for the requests that use it. No new ones come."""
        ...
