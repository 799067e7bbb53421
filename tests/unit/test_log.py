"""One line an event, with the trace it belongs to."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest
from opentelemetry import trace

from millstream_server.runtime import log

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = trace.NonRecordingSpan(
    trace.SpanContext(int(TRACE_ID, 16), 1, is_remote=True, trace_flags=trace.TraceFlags(1))
)


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """The root logger is given back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def lines(line_format: Literal["text", "json"], capsys: pytest.CaptureFixture[str]) -> list[str]:
    log.configure("info", line_format)
    logger = logging.getLogger("millstream_server.test")
    logger.info("request=%s outcome=%s", "r1", "STOP")
    with trace.use_span(SPAN):
        try:
            raise ValueError("no such token")  # noqa: TRY301
        except ValueError:
            logger.exception("it failed\nbadly")
    return capsys.readouterr().err.splitlines()


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, *rest = lines("text", capsys)
    assert first.endswith("level=INFO logger=millstream_server.test request=r1 outcome=STOP")
    assert "level=ERROR" in second
    # What a client sent can't begin a line of its own.
    assert second.endswith(f"it failed\\x0abadly trace_id={TRACE_ID}")
    assert rest[-1] == "ValueError: no such token"


def test_json_is_one_line_whatever_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = map(json.loads, lines("json", capsys))
    assert first["message"] == "request=r1 outcome=STOP"
    assert (first["level"], first["logger"]) == ("INFO", "millstream_server.test")
    assert "trace_id" not in first
    assert second["message"] == "it failed\nbadly"
    assert second["trace_id"] == TRACE_ID
    assert second["exception"].endswith("ValueError: no such token")
