"""How far an engine has loaded its model, and the Protocol of an engine that knows."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class LoadStage(enum.IntEnum):
    """A part of a worker's start; later ones are greater. The names are the contract's."""

    STARTING = 1
    """The engine's processes start."""
    LOADING_WEIGHTS = 2
    PREPARING = 3
    """Weights are read; the engine allocates its KV cache and prepares kernels."""
    WARMING_UP = 4
    """The first request runs. Known to the worker's host; an engine never says this."""
    READY = 5
    """The worker accepts requests. Known to the worker's host, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far a model is loaded."""

    stage: LoadStage = LoadStage.STARTING
    files_done: int = 0
    """Weight files read whole."""
    files_total: int = 0
    """Weight files in all; 0: not known."""
    bytes_done: int = 0
    """Bytes of weights read, as far as it can be seen."""
    bytes_total: int = 0
    """Bytes of weights in all; 0: not known."""


@runtime_checkable
class LoadObserved(Protocol):
    """An engine whose loading can be watched; optional."""

    def load_progress(self) -> LoadProgress:
        """Return how far it is: STARTING, LOADING_WEIGHTS or PREPARING, with the numbers.

        Called from the event loop at any time, four times a second while the model loads; takes at
        most 5 ms. Numbers may fall: the worker's host reports the greatest so far.
        """
        ...
