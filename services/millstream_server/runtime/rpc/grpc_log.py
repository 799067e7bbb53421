"""What grpc.aio logs of its callers: one plain line a minute and cause, without tracebacks."""

from __future__ import annotations

import logging

LOGGER = "grpc._cython.cygrpc"
_PLAIN = {
    "UnicodeDecodeError": "a caller's metadata isn't UTF-8",
    "ExecuteBatchError": "a caller left before the answer was sent",
}
"""By the name of the exception: what any caller can cause, once per metadata entry or RPC."""


class _Plain(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        event = _PLAIN.get(kind.__name__) if kind else None
        if event:
            record.msg, record.args, record.exc_info = event, (), None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.__dict__.update(cause=event, most=1)
        return True


def plain_grpc_log() -> None:
    """Make the lines plain, for the whole process; may be called again."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(found, _Plain) for found in logger.filters):
        logger.addFilter(_Plain())
