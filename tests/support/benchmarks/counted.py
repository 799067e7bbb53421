r"""Run a service and tell, on a signal, which of its files ran or what it holds.

    COUNTED_SERVICE=millstream_server.processor COUNTED_REPORT=FILE \
        python -m tests.support.benchmarks.counted --listen 127.0.0.1:50051

The arguments are the service's. Each signal is followed by a new report in FILE, as JSON:

- SIGUSR2 begins to note which files run, all threads included; the next one reports them.
- SIGUSR1 reports how many instances of each class of the server there are, after a garbage
  collection: by class, in "values" (frozen dataclasses, named tuples, enums) and in "stateful".
"""

from __future__ import annotations

import enum
import gc
import json
import os
import runpy
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_PACKAGE = "millstream_server"


class _Files:
    """Notes code that runs, between two signals."""

    def __init__(self) -> None:
        self._on = False
        self._seen: set[CodeType] = set()

    def note(self, frame: FrameType, _event: str, _argument: object) -> None:
        """Note one call, return or call of C: a profile function of `sys.setprofile`.

        Any event counts, as a thread's endless loop may never be called again.
        """
        if self._on:
            self._seen.add(frame.f_code)

    def toggle(self, *_: object) -> None:
        """Begin, or end and report."""
        self._on = not self._on
        sys.setprofile(self.note if self._on else None)
        seen, self._seen = self._seen.copy(), set()  # other threads still add
        _report({"files": sorted({code.co_filename for code in seen})})


def _count_objects(*_: object) -> None:
    gc.collect()
    kinds: dict[str, Counter[str]] = {"stateful": Counter(), "values": Counter()}
    for found in gc.get_objects():
        cls = type(found)
        if cls.__module__.startswith(_PACKAGE) and not issubclass(cls, type):
            name = f"{cls.__module__}.{cls.__qualname__}"
            kinds["values" if _is_value(cls) else "stateful"][name] += 1
    _report(kinds)


def _is_value(cls: type) -> bool:
    """Tell whether an instance never changes."""
    made = getattr(cls, "__dataclass_params__", None)
    frozen = made is not None and (made.frozen or made.unsafe_hash)  # see runtime/frozen.py
    return frozen or issubclass(cls, (tuple, enum.Enum))


def _report(content: Any) -> None:
    path = Path(os.environ["COUNTED_REPORT"])
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(content))
    whole.rename(path)


if __name__ == "__main__":
    files = _Files()
    threading.setprofile(files.note)  # for the threads of the service; the main one: see `toggle`
    signal.signal(signal.SIGUSR2, files.toggle)
    signal.signal(signal.SIGUSR1, _count_objects)
    runpy.run_module(os.environ["COUNTED_SERVICE"], run_name="__main__", alter_sys=True)
