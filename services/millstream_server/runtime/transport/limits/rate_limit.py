"""A bucket of permits that fills at a steady rate."""

from __future__ import annotations


class RateLimit:
    """Allows a burst, and a steady rate after it. Times are the event loop's."""

    __slots__ = ("_at_s", "_left", "_most", "_per_s")

    def __init__(self, most: float, per_s: float, now_s: float) -> None:
        """Start full, with ``most`` permits; ``per_s`` come back."""
        self._most = self._left = most
        self._per_s = per_s
        self._at_s = now_s

    def take(self, now_s: float) -> bool:
        """Take a permit; return whether there was one."""
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
