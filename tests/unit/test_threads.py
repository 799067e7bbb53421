"""Threads that run calls in their order."""

from __future__ import annotations

import threading

import pytest

from millstream_server.runtime.threads import DaemonThreads


def test_they_report_results_and_failures_and_skip_what_was_cancelled() -> None:
    threads = DaemonThreads(1, "t")
    going, seen = threading.Event(), list[int]()
    first = threads.submit(going.wait, 5)
    second = threads.submit(seen.append, 2)
    third = threads.submit(int, "x")
    assert second.cancel()
    going.set()
    assert first.result(5)
    with pytest.raises(ValueError, match="invalid literal"):
        third.result(5)
    assert seen == []
    threads.close()


def test_closed_they_run_what_is_there_and_take_no_more() -> None:
    threads = DaemonThreads(2, "t")
    going = threading.Event()
    calls = [threads.submit(going.wait, 5) for _ in range(4)]
    threads.close()
    threads.close()
    going.set()
    assert all(call.result(5) for call in calls)
    with pytest.raises(RuntimeError, match="no more calls"):
        threads.submit(int)
