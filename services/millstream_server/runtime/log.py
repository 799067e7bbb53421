"""Logging: one line an event, to stderr, as text (key=value) or JSON. No prompt text.

A line written while a span is current carries its trace id.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Literal

from opentelemetry import trace

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127)}


def configure(level: str, line_format: Literal["text", "json"] = "text") -> None:
    """Set up the process's logging. Phases of a start are logged as ``phase="..."``."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if line_format == "json" else _Text())
    number = getattr(logging, level.upper(), logging.INFO)
    logging.basicConfig(level=number, handlers=[handler], force=True)


def phase(logger: logging.Logger, text: str) -> None:
    """Tell people, and `millstream up`, how far a start has come."""
    logger.info('phase="%s"', text)


class _Text(logging.Formatter):
    """Like ``2026-11-20 10:00:00,000 level=INFO logger=… key=value … trace_id=…``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s level=%(levelname)s logger=%(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        # What clients sent may be in it; a line stays one line.
        record.message = record.message.translate(_ESCAPES)
        line = super().formatMessage(record)
        trace_id = _trace_id()
        return f"{line} trace_id={trace_id}" if trace_id and "trace_id=" not in line else line


class _Json(logging.Formatter):
    """Like ``{"time": "2026-11-20T10:00:00.000Z", "level": "INFO", "logger": …, "message": …}``."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace_id := _trace_id():
            fields["trace_id"] = trace_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _trace_id() -> str:
    context = trace.get_current_span().get_span_context()
    return format(context.trace_id, "032x") if context.is_valid else ""
