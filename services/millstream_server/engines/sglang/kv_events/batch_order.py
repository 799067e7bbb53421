"""Numbered batches in their order, each once."""

from __future__ import annotations

MOST_HELD = 2_000


class BatchOrder:
    """Batches come doubled, late or not at all; those in order are returned, each once."""

    def __init__(self, most_held: int = MOST_HELD) -> None:
        """Expect number 0; hold at most ``most_held`` batches that wait for an earlier one."""
        self._next = 0
        self._held: dict[int, bytes] = {}
        self._most_held = most_held

    @property
    def next(self) -> int:
        """The number that is expected."""
        return self._next

    @property
    def incomplete(self) -> bool:
        """Whether batches are held that wait for an earlier one."""
        return bool(self._held)

    @property
    def full(self) -> bool:
        """Whether too many are held, so that the earlier one has to be given up."""
        return len(self._held) > self._most_held

    def take(self, number: int, payload: bytes) -> list[bytes]:
        """Take a batch; return those that are in order now."""
        if number >= self._next:
            self._held.setdefault(number, payload)
        return self._in_order()

    def give_up(self) -> list[bytes]:
        """Go on with the first batch that is held; return those that are in order then."""
        if self._held:
            self._next = min(self._held)
        return self._in_order()

    def _in_order(self) -> list[bytes]:
        ready = []
        while (payload := self._held.pop(self._next, None)) is not None:
            ready.append(payload)
            self._next += 1
        return ready
