"""Bounds the lines that a process logs, so that callers can't fill its disk."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import TracebackType

_MOST = 30
"""Lines of one cause a minute: enough for an operator to see what happens and to whom."""
_MOST_TRACEBACK_LINES = 60
"""Lines of all tracebacks of one cause a minute; the first is written whatever its length."""
_LONGEST_TRACEBACK = 150
"""Lines of a traceback: chains of vendors' errors have 100; recursions thousands."""
_LONGEST_LINE = 500
"""Characters of one line of a traceback: an error's text may have a caller's whole message."""
_WINDOW_S = 60.0
_MOST_CAUSES = 1000
_OTHERS = "other causes"
"""The one cause of all lines above so many causes."""


@dataclass(slots=True)
class _Cause:
    """One cause's lines in the current minute."""

    since_s: float
    logger: str
    event: str
    count: int = 0
    dropped: int = 0
    traceback_lines: int = 0
    tracebacks: set[Hashable] = field(default_factory=set)


class Repeats:
    """Drops lines that repeat too often, and shortens tracebacks.

    A cause is a place in the code: for our own events logger and sentence, for other lines the file
    and the line that logged; never the text, which a caller may choose. A record may have `cause`
    and `most`, which replace place and number. `bounded` says whether a record counts; without it,
    those of level INFO and above do.

    The last line before a drop has a field that announces it. The next line after the minute, of
    any cause, comes with one line per cause that says how many were dropped.
    """

    def __init__(
        self,
        write: Callable[[logging.LogRecord], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropping = False
        """Whether lines were dropped that are still to be reported: then it must see every line."""
        self._write = write
        self._clock = clock
        self._causes: dict[Hashable, _Cause] = {}
        self._due_s = clock() + _WINDOW_S

    def passes(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record; shorten its traceback."""
        now_s = self._clock()
        if now_s >= self._due_s:
            self._end_windows(now_s)
        if not getattr(record, "bounded", record.levelno >= logging.INFO):
            return True
        cause = self._cause(record, now_s)
        most = getattr(record, "most", _MOST)
        cause.count += 1
        if cause.count > most:
            cause.dropped += 1
            self.dropping = True
            return False
        if cause.count == most:
            add_fields(record, repeats="dropped for a minute")
        if record.exc_info:
            _shorten(record, cause)
        return True

    def _cause(self, record: logging.LogRecord, now_s: float) -> _Cause:
        event = str(record.msg)
        key: Hashable = getattr(record, "cause", None) or (
            (record.name, event) if record.lineno == 0 else (record.pathname, record.lineno)
        )
        if key not in self._causes and len(self._causes) >= _MOST_CAUSES:
            self._end_windows(now_s)
            if len(self._causes) >= _MOST_CAUSES:
                key = event = _OTHERS
        found = self._causes.get(key)
        if found is None or now_s - found.since_s >= _WINDOW_S:
            if found is not None:
                self._report(found)
            found = self._causes[key] = _Cause(now_s, record.name, event)
        return found

    def _end_windows(self, now_s: float) -> None:
        """Forget causes whose minute is over, and report what was dropped."""
        for key, cause in list(self._causes.items()):  # a copy: several threads log
            if now_s - cause.since_s >= _WINDOW_S:
                self._causes.pop(key, None)
                self._report(cause)
        self.dropping = any(cause.dropped for cause in list(self._causes.values()))
        self._due_s = now_s + _WINDOW_S / 10

    def _report(self, cause: _Cause) -> None:
        if not cause.dropped:
            return
        record = logging.LogRecord(
            cause.logger, logging.WARNING, "", 0, "lines were dropped", None, None
        )
        add_fields(record, event=cause.event, dropped=cause.dropped)
        self._write(record)


def add_fields(record: logging.LogRecord, **fields: object) -> None:
    """Add fields to a record."""
    record.__dict__["fields"] = {**record.__dict__.get("fields", {}), **fields}


def traceback_of(record: logging.LogRecord) -> str:
    """Return a record's traceback, shortened; empty: none is to be written."""
    if record.exc_text is None and record.exc_info and record.exc_info[0] is not None:
        record.exc_text = "\n".join(_lines(record.exc_info[1]))
    return record.exc_text or ""


def _shorten(record: logging.LogRecord, cause: _Cause) -> None:
    """Keep a traceback that the cause hasn't had in this minute, if there is room for it."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if error is None:
        return
    place = type(error), _last(error.__traceback__)
    if place not in cause.tracebacks:
        nlines = traceback_of(record).count("\n") + 1
        if not cause.tracebacks or cause.traceback_lines + nlines <= _MOST_TRACEBACK_LINES:
            cause.tracebacks.add(place)
            cause.traceback_lines += nlines
            return
    record.exc_text = ""
    add_fields(record, error=f"{type(error).__name__}: {error}"[:_LONGEST_LINE])


def _last(found: TracebackType | None) -> tuple[str, int] | None:
    while found is not None and found.tb_next is not None:
        found = found.tb_next
    return None if found is None else (found.tb_frame.f_code.co_filename, found.tb_lineno)


def _lines(error: BaseException | None) -> list[str]:
    if error is None:
        return []
    lines = [
        line[:_LONGEST_LINE]
        for part in traceback.format_exception(error)
        for line in part.splitlines()
    ]
    if len(lines) <= _LONGEST_TRACEBACK:
        return lines
    head, tail = _LONGEST_TRACEBACK // 3, _LONGEST_TRACEBACK - _LONGEST_TRACEBACK // 3
    return [*lines[:head], f"… {len(lines) - head - tail} lines …", *lines[-tail:]]
