"""What `millstream up` shows while its services start."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.console import Console

from millstream_server.cli.suite.display import progress


class _Child:
    ended = False

    def __init__(self, name: str, phase: str, *, serving: bool = False) -> None:
        self.service = self
        self.name = name
        self.phase = phase
        self.serving = serving
        self.started_s = time.monotonic()


def test_each_service_has_a_line_with_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    children: Any = [
        _Child("prefill-1", "loading the model: 1 of 2 GiB, 3 s"),
        _Child("decode-1", "warming up"),
        _Child("processor", "waiting for workers", serving=True),
    ]
    with progress(console) as show:
        show(children)
    last = out.getvalue().replace("\x1b[?25h", "").splitlines()[-3:]
    assert [line.count("━") for line in last] == [4, 8, 12]
    shown = (("prefill-1", "1 of 2 GiB"), ("decode-1", "warming up"), ("processor", "serving"))
    assert all(
        name in line and phase in line for (name, phase), line in zip(shown, last, strict=True)
    )
