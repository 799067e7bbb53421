"""Logging: one line an event, key=value, to stderr. No prompt text."""

from __future__ import annotations

import logging


def configure(level: str) -> None:
    """Set up the process's logging. Phases of a start are logged as ``phase="..."``."""
    logging.basicConfig(
        level=getattr(logging, level.upper(), logging.INFO),
        format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
        force=True,
    )


def phase(logger: logging.Logger, text: str) -> None:
    """Tell people, and `millstream up`, how far a start has come."""
    logger.info('phase="%s"', text)
