"""Shows the progress of a start: live lines on a terminal, plain ones elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from millstream_server.cli.suite.process import Child


class Progress(Protocol):
    """Shows the processes while they start; a context manager."""

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End; the last lines stay."""

    def show(self, children: Sequence[Child]) -> None:
        """Show each process's current phase."""


def progress(console: Console) -> Progress:
    """Make the display for this kind of output."""
    return _Live(console) if console.is_terminal else _Plain(console)


class _Live:
    """One line per process: spinner, name, phase, seconds."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=10)
        self._spinner = Spinner("dots")
        self._served_s: dict[Child, float] = {}

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, children: Sequence[Child]) -> None:
        grid = Table.grid(padding=(0, 2))
        for child in children:
            grid.add_row(
                self._mark(child),
                child.service.name,
                Text("serving" if child.serving else child.phase),
                f"{self._seconds(child):.0f} s",
            )
        self._live.update(grid)

    def _seconds(self, child: Child) -> float:
        now = time.monotonic()
        if child.serving:
            now = self._served_s.setdefault(child, now)
        return now - child.started_s

    def _mark(self, child: Child) -> Spinner | Text:
        if child.serving:
            return Text("✓", style="green")
        return self._spinner if child.running else Text("✗", style="red")


class _Plain:
    """One line per change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[Child, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def show(self, children: Sequence[Child]) -> None:
        for child in children:
            phase = "serving" if child.serving else child.phase
            if self._shown.get(child) == phase:
                continue
            self._shown[child] = phase
            seconds = time.monotonic() - child.started_s
            self._console.print(
                f"{child.service.name}: {phase} ({seconds:.0f} s)", markup=False, soft_wrap=True
            )
