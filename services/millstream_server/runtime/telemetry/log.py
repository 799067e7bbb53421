"""Logging: one line per event, to stderr, as text or JSON. No prompt text.

An event is a short constant sentence with fields: ``log.info("worker connected", worker=…)``. In
JSON each field is a key of the object; in text it is ``key=value`` after the sentence. A line
written while a span is current has its trace id.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from opentelemetry import trace

from millstream_server.runtime.telemetry.repeats import Repeats, traceback_of

# Not plain either: characters that look like a blank, '=' or '"' to a reader.
_plain = re.compile(r'[^\s"=\u115f\u1160\u2800\u3164\uffa0\ufe66\uff1d\uff02]+').fullmatch
_blank = re.compile(r"\s").search
_LONGEST = 4096
"""Characters of a value or a message: some quote a caller's whole request."""
_RESERVED = frozenset({"time", "level", "logger", "message", "exception"})
"""Keys of every JSON line; an underscore is added to a field with the same name."""
_STDERR = 2
# Read by other handlers, such as a test runner's.
_NOT_SHOWN: Mapping[str, Any] = {
    **dict.fromkeys(("pathname", "filename", "module"), ""),
    **dict.fromkeys(("exc_text", "stack_info", "funcName"), None),
    **dict.fromkeys(("thread", "threadName", "process", "processName"), None),
    "lineno": 0,
    "relativeCreated": 0.0,
}


class Log:
    """A module's logger whose events have fields; ``error`` adds an exception's traceback."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, *, error: BaseException | None = None, **fields: Any) -> None:
        if self._logger.isEnabledFor(logging.DEBUG):
            self._write(logging.DEBUG, event, fields, error)

    def info(self, event: str, *, error: BaseException | None = None, **fields: Any) -> None:
        if self._logger.isEnabledFor(logging.INFO):
            self._write(logging.INFO, event, fields, error)

    def warning(self, event: str, *, error: BaseException | None = None, **fields: Any) -> None:
        if self._logger.isEnabledFor(logging.WARNING):
            self._write(logging.WARNING, event, fields, error)

    def error(self, event: str, *, error: BaseException | None = None, **fields: Any) -> None:
        if self._logger.isEnabledFor(logging.ERROR):
            self._write(logging.ERROR, event, fields, error)

    def caused(self, event: str, **fields: Any) -> None:
        """Log normal operation that callers can cause at will: bounded in rate, as warnings are."""
        if self._logger.isEnabledFor(logging.INFO):
            self._write(logging.INFO, event, fields, None, bounded=True)

    def action(self, event: str, **fields: Any) -> None:
        """Log what an operator did: a warning that is never dropped, however often it comes."""
        if self._logger.isEnabledFor(logging.WARNING):
            self._write(logging.WARNING, event, fields, None, bounded=False)

    def phase(self, phase: str, **fields: Any) -> None:
        """Log the phase of a start or a stop; `millstream up` reads it."""
        self.info("phase", phase=phase, **fields)

    def _write(
        self,
        level: int,
        event: str,
        fields: Mapping[str, Any],
        error: BaseException | None,
        *,
        bounded: bool | None = None,
    ) -> None:
        # Made here: `Logger.log` would walk the stack for a file and a line, which we don't show.
        record = _Event(self._logger.name, level, event, fields, error)
        record.bounded = level >= logging.WARNING if bounded is None else bounded
        self._logger.handle(record)


class _Event(logging.LogRecord):
    """A record without the fields that we don't show, which take most of the library's time."""

    bounded: bool
    """Whether it is dropped when its event repeats too often."""

    def __init__(
        self,
        name: str,
        level: int,
        event: str,
        fields: Mapping[str, Any],
        error: BaseException | None,
    ) -> None:
        self.name = name
        self.msg = event
        self.args = ()
        self.levelno = level
        self.levelname = logging.getLevelName(level)
        self.created = time.time()
        self.msecs = self.created % 1 * 1000
        self.exc_info = None if error is None else (type(error), error, error.__traceback__)
        self.fields = fields
        self.__dict__.update(_NOT_SHOWN)


def get_log(name: str) -> Log:
    """Return a module's log; ``name`` is its `__name__`."""
    return Log(logging.getLogger(name))


_OURS = ("millstream_server", "millstream_client", "__main__")


def configure(level: str, line_format: Literal["text", "json"] = "text") -> None:
    """Set up the process's logging at ``level``; libraries' lines are shown from WARNING on.

    Below it they may hold what callers sent: hpack's every header, API keys among them. Who wants
    them sets the level of that library's logger.
    """
    handler = _Stderr()
    handler.setFormatter(_Json() if line_format == "json" else _Text())
    number = getattr(logging, level.upper(), logging.INFO)
    logging.basicConfig(level=number, handlers=[handler], force=True)


def _may_be_shown(record: logging.LogRecord) -> bool:
    """Return whether a line is ours, a warning, or of a library whose logger has a level set."""
    if record.levelno >= logging.WARNING or record.name.startswith(_OURS):
        return True
    logger = logging.getLogger(record.name)
    while logger.parent is not None:
        if logger.level:
            return True
        logger = logger.parent
    return False


class _Stderr(logging.Handler):
    """Writes a line in one system call, so that lines of several threads don't mix; no lock."""

    def __init__(self) -> None:
        super().__init__()
        self.repeats = Repeats(self.emit)

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a line unless it repeats; the library's own has a lock and a list of filters."""
        if record.__class__ is _Event:  # of ours most aren't bounded
            bounded = record.bounded
        else:
            bounded = True
            if not _may_be_shown(record):
                return False
        if (bounded or self.repeats.dropping) and not self.repeats.passes(record):
            return False
        self.emit(record)
        return True

    def createLock(self) -> None:  # noqa: N802 - the library's name
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = (self.format(record) + "\n").encode(errors="backslashreplace")
            while data:
                data = data[os.write(_STDERR, data) :]
        except OSError:
            pass  # stderr is closed
        except Exception:  # noqa: BLE001 - a field whose `str` fails, for instance
            self.handleError(record)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return a record's fields, with the id of the current trace."""
    fields: Mapping[str, Any] = record.__dict__.get("fields", {})
    if "trace_id" not in fields:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return {**fields, "trace_id": f"{context.trace_id:032x}"}
    return fields


class _Clock:
    """Formats times; the part down to the second is made once per second."""

    def __init__(self, seconds: Callable[[int], str]) -> None:
        self._format = seconds
        self._text: tuple[int, str] = (-1, "")

    def __call__(self, created: float) -> str:
        second = int(created)
        known, text = self._text  # read and set as one: several threads log
        if second != known:
            text = self._format(second)
            self._text = second, text
        return text


class _Text(logging.Formatter):
    """Like ``2026-11-20 10:00:00,000 INFO millstream_server.x: worker connected worker=…``."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = _Clock(lambda s: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(s)))

    def format(self, record: logging.LogRecord) -> str:
        at = f"{self._seconds(record.created)},{int(record.msecs):03d}"
        line = f"{at} {record.levelname} {record.name}: {_cut(record.getMessage())}"
        for name, value in _fields(record).items():
            kind = value.__class__
            # Nearly all fields: without a call for each.
            short = kind is str and len(value) <= _LONGEST
            plain = _plain(value) if short else kind is int or kind is float
            line += f" {name}={value if plain else _value(value)}"
        # May contain text from clients: keep it on one line.
        line = _printable(line)
        if record.exc_info:
            for part in traceback_of(record).splitlines():
                line += f"\n  {_printable(part)}".rstrip(" ")  # indented, unlike an event's line
        return line


_quoted = json.JSONEncoder(ensure_ascii=False).encode


def _value(value: Any) -> str:
    text = _cut(str(value).lower() if value.__class__ is bool else str(value))
    if _plain(text):
        return text
    quoted: str = _quoted(text)
    # So that a reader who looks for ` name=` finds our fields only, whatever a value holds.
    return quoted.replace("=", r"\u003d") if "=" in text and _blank(text) else quoted


def _cut(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}… ({len(text) - _LONGEST} more)"


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in line
    )


class _Json(logging.Formatter):
    """Like ``{"time": "2026-11-20T10:00:00.000Z", "level": "INFO", …, "message": …, field: …}``."""

    _encode = json.JSONEncoder(default=str).encode

    def __init__(self) -> None:
        super().__init__()
        self._seconds = _Clock(lambda s: time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(s)))

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{self._seconds(record.created)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        for name, value in _fields(record).items():
            kept = _cut(value) if value.__class__ is str else value
            line[f"{name}_" if name in _RESERVED else name] = kept
        if record.exc_info and (exception := traceback_of(record)):
            line["exception"] = exception
        return self._encode(line)
