"""What no code catches is logged with bounds: in the loop, in threads, in destructors, in grpc."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
from collections.abc import Iterator

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from millstream_server.runtime.lifecycle.main import log_uncaught
from millstream_server.runtime.rpc.grpc_server import LOGGER, plain_grpc_log
from millstream_server.runtime.telemetry import log
from tests.support.telemetry.logged import fields_of


@pytest.fixture
def _hooks() -> Iterator[None]:
    hooks = sys.unraisablehook, threading.excepthook
    yield
    sys.unraisablehook, threading.excepthook = hooks


class _Hostile:
    def __del__(self) -> None:
        raise ValueError("in a destructor")


async def _fail() -> None:
    raise ValueError("in a task")


def _fail_in_thread() -> None:
    raise ValueError("in a thread")


@pytest.mark.usefixtures("_hooks")
async def test_each_place_has_its_event(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    log_uncaught(loop)
    lost = loop.create_task(_fail())
    await asyncio.wait({lost})
    del lost
    gc.collect()
    _Hostile()
    thread = threading.Thread(target=_fail_in_thread, name="worker")
    thread.start()
    thread.join()
    loop.call_exception_handler({"message": "no exception"})
    loop_error, destructor, in_thread, plain = caplog.records
    assert loop_error.getMessage() == plain.getMessage() == "uncaught in the event loop"
    assert fields_of(loop_error)["what"] == "Task exception was never retrieved"
    assert "in a task" in str(loop_error.exc_info)
    assert destructor.getMessage() == "uncaught where nothing can be raised"
    assert "__del__" in fields_of(destructor)["where"]
    assert in_thread.getMessage() == "uncaught in a thread"
    assert fields_of(in_thread) == {"thread": "worker"}
    assert fields_of(plain) == {"what": "no exception", "where": "-"}


@pytest.fixture
def _logging() -> Iterator[None]:
    root, theirs = logging.getLogger(), logging.getLogger(LOGGER)
    handlers, level, filters = root.handlers[:], root.level, theirs.filters[:]
    yield
    root.handlers[:], root.level, theirs.filters[:] = handlers, level, filters


def _not_text() -> None:
    b"\xff".decode()


def _left() -> None:
    raise cygrpc.ExecuteBatchError("execute_batch", (), None)


@pytest.mark.usefixtures("_logging")
@pytest.mark.parametrize("cause", [_not_text, _left])
def test_what_grpc_says_of_a_caller_is_one_line(
    cause: object, capfd: pytest.CaptureFixture[str]
) -> None:
    assert callable(cause)
    log.configure("info")
    plain_grpc_log()
    plain_grpc_log()
    for number in range(1000):
        try:
            cause()
        except (UnicodeDecodeError, cygrpc.BaseError) as error:
            logging.getLogger(LOGGER).exception("Invalid encoding on %s", number, exc_info=error)
    (line,) = capfd.readouterr().err.splitlines()
    assert " WARNING grpc._cython.cygrpc: a caller" in line
    assert "dropped for a minute" in line
