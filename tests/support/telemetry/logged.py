"""Log events as a test reads them."""

from __future__ import annotations

import logging
from typing import Any

import pytest


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of an event that `runtime.telemetry.log` wrote."""
    return dict(record.__dict__["fields"])


def events(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """Return the fields of every event of that name."""
    return [fields_of(record) for record in caplog.records if record.getMessage() == event]
