"""Finds markers in a text that grows, and holds back no more than may become one."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Finder:
    """Finds the first of some markers; of two at the same place the longer one.

    Newlines before a marker belong to it. Each character is looked at once for every piece of text
    that it comes in, and comes again only if it was held back.
    """

    __slots__ = ("_first", "_growing", "_whole")

    def __init__(self, markers: Iterable[str], *, newlines: int = 0) -> None:
        """Look for ``markers``, each with up to ``newlines`` newlines before it."""
        longest_first = sorted(set(markers), key=len, reverse=True)
        lead = f"\\n{{0,{newlines}}}" if newlines else ""
        whole = f"{lead}({'|'.join(map(re.escape, longest_first))})"
        begun = [f"{lead}(?:{'|'.join(map(_begun, longest_first))})\\Z"]
        if newlines:
            begun.append(f"\\n{{1,{newlines}}}\\Z")
        self._whole = re.compile(whole)
        self._growing = re.compile("|".join([*begun, whole]))
        firsts = {marker[0] for marker in longest_first} | ({"\n"} if newlines else set())
        first = f"[{re.escape(''.join(sorted(firsts)))}]"
        self._first = re.compile(first if longest_first else "(?!)")

    def find(self, text: str, at: int = 0, *, last: bool = False) -> re.Match[str] | None:
        """Return the first marker from ``at``: group 0 with its newlines, group 1 without.

        Group 1 is None if only the beginning of a marker is there, at the text's end: it is to be
        held back, and to be given again with what follows. ``last``: nothing follows.
        """
        pattern = self._whole if last else self._growing
        candidate = self._first.search(text, at)
        while candidate is not None:
            start = candidate.start()
            found = pattern.match(text, start)
            if found is not None:
                return found
            candidate = self._first.search(text, start + 1)
        return None


def _begun(marker: str) -> str:
    """Return a pattern of the marker's beginnings, without the whole of it."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(marker[0]) + pattern if len(marker) > 1 else "(?!)"
