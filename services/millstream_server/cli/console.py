"""Where tables and notices are printed."""

from __future__ import annotations

from rich.console import Console

_UNSEEN_WIDTH = 160


def open_console() -> Console:
    """Write to stdout; into a file or a pipe with long lines, so that paths aren't folded."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNSEEN_WIDTH)
