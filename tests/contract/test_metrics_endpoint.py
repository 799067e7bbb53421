"""The metrics endpoint bounds its connections and their time, and closes in order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from millstream_server.runtime.telemetry.metrics_endpoint import (
    CLOSE_LIMIT_S,
    MOST_CONNECTIONS,
    MetricsEndpoint,
)
from millstream_testing.waiting import until
from tests.support.telemetry.scraping import scrape


class Waiting:
    """A collector that has its value once `go` is set, or after ``longest_s``."""

    def __init__(self, longest_s: float) -> None:
        self.asked = threading.Event()
        self.go = threading.Event()
        self._longest_s = longest_s

    def collect(self) -> Iterable[Metric]:
        self.asked.set()
        told = self.go.wait(self._longest_s)
        yield GaugeMetricFamily("was_told", "text", value=told)


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0)
        yield connection


def was_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:  # it had not read what we sent
        return True


def drip(connection: socket.socket) -> bool:
    """Send one more byte; answers whether it can't."""
    try:
        connection.send(b"G")
    except ConnectionError:
        return True
    return False


async def test_who_sends_byte_by_byte_is_cut_at_the_limit() -> None:
    limit_s = 0.5
    serving = MetricsEndpoint("127.0.0.1:0", "test", connection_limit_s=limit_s)
    began = time.monotonic()
    try:
        with connected(serving.port) as connection:
            await until(lambda: drip(connection), within_s=5)
        assert time.monotonic() - began >= limit_s
    finally:
        await serving.close()


async def test_connections_are_bounded_and_scrapers_come_in_when_there_is_room() -> None:
    before = set(threading.enumerate())
    serving = MetricsEndpoint("127.0.0.1:0", "test")

    def answering() -> int:
        return len(set(threading.enumerate()) - before - {serving._thread})

    try:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(connected(serving.port)) for _ in range(40)]
            for connection in silent:
                drip(connection)
            await until(lambda: sum(map(was_closed, silent)) >= 40 - MOST_CONNECTIONS, within_s=5)
            assert answering() == MOST_CONNECTIONS
            assert sum(map(was_closed, silent)) == 40 - MOST_CONNECTIONS
        await until(lambda: answering() == 0)
        assert (await scrape(serving.port)).value("process_open_fds") > 0
    finally:
        await serving.close()


async def test_closing_answers_a_scrape_under_way() -> None:
    collector = Waiting(longest_s=1.0)  # longer than it takes to stop listening
    serving = MetricsEndpoint("127.0.0.1:0", "test", [collector])
    scraping = asyncio.create_task(scrape(serving.port))
    await until(collector.asked.is_set)
    await serving.close()
    collector.go.set()  # too late: it had answered before
    assert (await scraping).value("was_told") == 0


async def test_closing_waits_for_no_collector_that_hangs() -> None:
    collector = Waiting(longest_s=60)
    serving = MetricsEndpoint("127.0.0.1:0", "test", [collector])
    scraping = asyncio.create_task(scrape(serving.port))
    await until(collector.asked.is_set)
    await serving.close()
    try:
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(scraping, 5)
    finally:
        collector.go.set()


async def test_closing_waits_for_nobody_who_has_not_asked() -> None:
    before = set(threading.enumerate())
    serving = MetricsEndpoint("127.0.0.1:0", "test")
    with connected(serving.port) as connection:
        await until(lambda: len(set(threading.enumerate()) - before) == 2)  # it and the answering
        began = time.monotonic()
        await serving.close()
        assert time.monotonic() - began < CLOSE_LIMIT_S
        await until(lambda: was_closed(connection), within_s=1)
