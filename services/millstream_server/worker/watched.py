"""A value with listeners for its changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Watched(Generic[T]):
    """Holds the latest value, None at first. All calls come from one event loop."""

    def __init__(self) -> None:
        """Start without a value."""
        self.value: T | None = None
        self._listeners: set[Callable[[], None]] = set()

    def set(self, value: T) -> None:
        """Replace the value; listeners are called if it differs."""
        if value != self.value:
            self.value = value
            for listener in tuple(self._listeners):
                listener()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after each change; return the function that removes it."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)
