"""The console for tables and notices."""

from __future__ import annotations

from rich.console import Console

_UNSEEN_WIDTH = 160


def open_console() -> Console:
    """Make a console on stdout; for a file or a pipe without line breaks inside paths."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNSEEN_WIDTH)
