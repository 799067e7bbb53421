"""Pauses between attempts."""

from __future__ import annotations

import grpc
import pytest

from millstream_client import NO_RETRY, Retry
from millstream_client.errors import MillstreamError
from millstream_client.request import Attempts


def _failed(delay_s: float | None = None, *, retryable: bool = True) -> MillstreamError:
    return MillstreamError(
        "no", code=grpc.StatusCode.UNAVAILABLE, retryable=retryable, retry_delay_s=delay_s
    )


def test_pauses_double_up_to_the_longest_and_end() -> None:
    attempts = Attempts(Retry(attempts=6, first_pause_s=1.0, max_pause_s=5.0), None)
    pauses = [attempts.pause_s(_failed()) for _ in range(6)]
    for pause, least in zip(pauses, (1.0, 2.0, 4.0, 5.0, 5.0), strict=False):
        assert pause is not None
        assert least <= pause <= 1.2 * least
    assert pauses[5] is None


def test_the_servers_delay_counts_if_it_is_longer() -> None:
    retry = Retry(first_pause_s=1.0, max_pause_s=5.0)
    for asked, least in ((0.0, 1.0), (3.0, 3.0), (5.0, 5.0)):
        pause = Attempts(retry, None).pause_s(_failed(asked))
        assert pause is not None
        assert least <= pause <= 1.2 * least
    assert Attempts(retry, None).pause_s(_failed(5.1)) is None


@pytest.mark.parametrize(
    ("retry", "timeout_s", "failed"),
    [
        (Retry(), None, _failed(retryable=False)),
        (NO_RETRY, None, _failed()),
        (Retry(first_pause_s=2.0), 1.0, _failed()),
    ],
    ids=["not retryable", "no retries", "no time left"],
)
def test_no_other_attempt(retry: Retry, timeout_s: float | None, failed: MillstreamError) -> None:
    assert Attempts(retry, timeout_s).pause_s(failed) is None


def test_the_wait_for_a_connection_ends_with_the_time() -> None:
    assert Attempts(Retry(wait_s=7.0), None).wait_s() == 7.0
    assert Attempts(Retry(wait_s=7.0), 0.5).wait_s() <= 0.5
    assert Attempts(Retry(), -1.0).timeout_s() == 0.0
