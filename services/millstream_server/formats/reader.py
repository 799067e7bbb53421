"""What the parser and the readers of calls have in common."""

from __future__ import annotations

from typing import Protocol


class Sink(Protocol):
    """Takes what a reader finds; the parser."""

    def start_call(self, name: str, call_id: str) -> None:
        """Begin a call; an empty id: the format's rule makes one."""
        ...

    def arguments(self, fragment: str) -> None:
        """Add to the arguments of the call that has begun."""
        ...

    def end_call(self) -> None:
        """End the call, whose arguments are whole."""
        ...

    def cut_call(self) -> None:
        """End the call, whose arguments are not whole."""
        ...


class Reader(Protocol):
    """Reads one stretch of calls from the text behind the marker that opened it."""

    done: bool
    """It needs no more text."""
    rejected: str | None
    """When ``done``: what it has read is no call, but this text. None: it was one."""

    @property
    def in_json(self) -> bool:
        """Whether it is inside of JSON, where markers as text have no meaning."""
        ...

    def read(self, text: str, at: int, *, last: bool) -> int:
        """Read on from ``at``; return up to where.

        If it isn't ``done`` then, the rest of the text is to be given again with what follows.
        ``last``: nothing follows.
        """
        ...

    def finish(self) -> None:
        """End whatever is open: the answer is over. Not called when ``done``."""
        ...


class Body(Protocol):
    """Reads the arguments of one call: a transducer from the model's syntax to JSON."""

    done: bool
    broken: bool
    """When ``done``: the arguments are not whole."""

    def read(self, text: str, at: int, *, last: bool) -> int:
        """See `Reader.read`."""
        ...
