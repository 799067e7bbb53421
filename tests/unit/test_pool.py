"""How much the workers of a pool run at once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from millstream_server.engines.base import Role
from millstream_server.routing.policy import LeastLoaded
from millstream_server.routing.pool import WorkerPool
from millstream_server.worker_stream.client import WorkerConnection


class _Sink:
    def emit(self, token_ids: Sequence[int], logprobs: Sequence[Any] = ()) -> None: ...
    def finish(self, finish: Any) -> None: ...
    def fail(self, error: Any) -> None: ...


def _connect(connection: WorkerConnection) -> None:
    """As if it had said hello."""
    engine = SimpleNamespace(
        max_running_requests=4, context_length=9, abilities=frozenset(), bootstrap_port=0
    )
    connection._connected = cast(
        "Any", SimpleNamespace(model="m", role=Role.AGGREGATED, engine=engine)
    )
    connection._healthy = True
    connection._request_type = lambda **_: None
    connection._update()


async def test_a_request_that_was_cancelled_on_a_wedged_worker_is_no_capacity(
    monkeypatch: Any,
) -> None:
    """Its place is given back, so what it still fills there would let one more run elsewhere."""
    monkeypatch.setattr("millstream_server.worker_stream.convert.start_to_proto", lambda *_: None)
    monkeypatch.setattr("millstream_server.routing.pool._limits", lambda _: None)
    pool = WorkerPool(["a:1", "b:1"], LeastLoaded, lambda: None)
    one, two = pool._connections
    _connect(one)
    _connect(two)
    assert pool.capacity("m") == 8
    cancels = [two.start(cast("Any", None), _Sink()) for _ in range(3)]
    two._serves(serving=False)
    assert pool.capacity("m") == 4 + 3
    for cancel in cancels[:2]:
        cancel()
        cancel()
    assert two.in_flight == 3
    assert pool.capacity("m") == 4 + 1
