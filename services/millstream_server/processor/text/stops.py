"""Stop strings: end the text before the first one; no part of one is returned.

The matcher is an Aho-Corasick automaton (Aho and Corasick, 1975): each character is read once,
for any number of stops and any division of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from millstream_server.runtime.errors import FieldViolation

MAX_STOPS = 16
MAX_STOP_CHARS = 256
_KEPT = 4
"""Automata, each of up to 1 MiB: a request needs the same for each choice."""


def check_stops(stops: Sequence[str]) -> tuple[FieldViolation, ...]:
    """Return the violations in a request's stop strings."""
    if not stops:
        return ()
    if len(stops) > MAX_STOPS:
        return (FieldViolation("stop", f"at most {MAX_STOPS} stop strings, not {len(stops)}"),)
    return tuple(
        FieldViolation(
            f"stop[{index}]", f"must have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}"
        )
        for index, stop in enumerate(stops)
        if not 1 <= len(stop) <= MAX_STOP_CHARS
    )


class StopMatcher:
    """Searches one growing text for stop strings.

    The stop that is complete first wins, since generation can end there; of several that end at the
    same character the longest. So the result doesn't depend on how the text is divided.
    """

    __slots__ = ("_automaton", "_held", "_matched", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        """Prepare; the stops have passed `check_stops`."""
        self._automaton = _automaton_of(tuple(stops))
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to send, and the stop if one is complete now.

        Text after a stop is dropped, then and later.
        """
        if self._matched is not None:
            return "", self._matched
        end = self._advance(text)
        if self._matched is not None:
            safe = (self._held + text[:end])[: -len(self._matched)]
            self._held = ""
            return safe, self._matched
        seen = self._held + text
        split = len(seen) - self._automaton.depths[self._state]
        self._held = seen[split:]
        return seen[:split], None

    def flush(self) -> str:
        """Return the text held back: generation has ended, so no stop can complete."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _advance(self, text: str) -> int:
        """Read ``text`` up to its end or a stop's end; return that position."""
        automaton = self._automaton
        state, index, length = self._state, 0, len(text)
        while index < length:
            if state == 0:
                # Outside of a candidate, search for a stop's first character with a regex, which is
                # faster.
                candidate = automaton.first_char.search(text, index)
                if candidate is None:
                    index = length
                    break
                index = candidate.start()
            state = automaton.next_state(state, text[index])
            index += 1
            if (matched := automaton.matches[state]) is not None:
                self._matched = matched
                break
        self._state = state
        return index


class _Automaton:
    """States are prefixes of stops; 0 is the empty one."""

    __slots__ = ("_children", "_fallbacks", "depths", "first_char", "matches")

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        self.depths = [0]
        """Length of a state's prefix: the number of characters to hold back."""
        self.matches: list[str | None] = [None]
        """The longest stop that ends in a state."""
        for stop in stops:
            self._add(stop)
        self._link()
        self.first_char = re.compile(f"[{re.escape(''.join(self._children[0]))}]")

    def next_state(self, state: int, char: str) -> int:
        """Return the longest prefix of a stop that ends with this character."""
        while (child := self._children[state].get(char)) is None and state:
            state = self._fallbacks[state]
        return child or 0

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            child = self._children[state].setdefault(char, len(self._children))
            if child == len(self._children):
                self._children.append({})
                self._fallbacks.append(0)
                self.depths.append(self.depths[state] + 1)
                self.matches.append(None)
            state = child
        self.matches[state] = stop

    def _link(self) -> None:
        """Point each state, shortest first, to the longest other state that is its suffix."""
        queue = list(self._children[0].values())
        for state in queue:
            for char, child in self._children[state].items():
                self._fallbacks[child] = self.next_state(self._fallbacks[state], char)
                self.matches[child] = self.matches[child] or self.matches[self._fallbacks[child]]
                queue.append(child)


@lru_cache(maxsize=_KEPT)
def _automaton_of(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)
