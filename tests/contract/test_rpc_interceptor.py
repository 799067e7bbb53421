"""RPC layers, unknown methods, and exceptions that are not ours."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import pytest

from millstream_server.runtime.errors import NoWorkerError, OverloadedError
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.rpc.call import Call, Layer, Outcome, Visit
from millstream_server.runtime.rpc.server_telemetry import TelemetryLayer
from millstream_server.runtime.rpc.serving import Method
from millstream_server.runtime.security.api_keys import ApiKeys
from tests.support.telemetry.logged import fields_of
from tests.support.telemetry.spans import SpanLog, attributes
from tests.support.wire import transports
from tests.support.wire.failures import refusal
from tests.support.wire.rpc_kinds import SERVICE as KINDS
from tests.support.wire.rpc_kinds import Kinds
from tests.support.wire.rpc_kinds import serving as serving_kinds
from tests.support.wire.transports import new_server

pytestmark = pytest.mark.both_transports

SERVICE = "test.v1.Any"
METHOD = f"/{SERVICE}/Method"
Handler = Callable[[bytes, Any], Awaitable[bytes]]
IMPATIENT: dict[str, Any] = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.01s",
                "maxBackoff": "0.02s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


class Noted:
    """A layer that writes down when it is entered and left, and fails where it is told to."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name = name
        self.log = log
        self.fails = fails

    def covers(self, method: str) -> bool:
        return True

    def enter(self, call: Call) -> Visit:
        self.log.append(f"+{self.name}")
        if self.fails == "enter":
            raise OverloadedError("full")
        if self.fails == "accident":
            raise KeyError("secret")
        return NotedVisit(self)


class NotedVisit(Visit):
    def __init__(self, layer: Noted) -> None:
        self._layer = layer

    def leave(self) -> None:
        self._layer.log.append(f"-{self._layer.name}")
        if self._layer.fails == "leave":
            raise OverloadedError("full after all")

    def ended(self, outcome: Outcome) -> None:
        self._layer.log.append(f"{self._layer.name}: {outcome.code.name}")


@contextlib.asynccontextmanager
async def serving(
    handler: Handler, *layers: Layer, config: Mapping[str, Any] | None = None
) -> AsyncIterator[Callable[[], grpc.aio.UnaryUnaryCall]]:  # type: ignore[type-arg]
    server = new_server(*layers)
    methods = {"Method": grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        options = [("grpc.service_config", json.dumps(config or {}))]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            to: Any = channel
            yield lambda: to.unary_unary(METHOD)(b"", timeout=5)
    finally:
        await server.stop(0)


async def answers(_request: bytes, _context: Any) -> bytes:
    return b"ok"


# ---- layers


async def test_layers_are_left_in_the_order_opposite_to_that_of_entering() -> None:
    log: list[str] = []
    async with serving(answers, Noted("a", log), Noted("b", log)) as call:
        assert await call() == b"ok"
    assert log == ["+a", "+b", "-b", "-a", "a: OK", "b: OK"]


@pytest.mark.parametrize(
    ("fails", "code", "order"),
    [
        ("enter", grpc.StatusCode.RESOURCE_EXHAUSTED, ["+a", "+b", "-a", "a"]),
        (
            "leave",
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            ["+a", "+b", "+c", "-c", "-b", "-a", "a", "b", "c"],
        ),
        ("accident", grpc.StatusCode.INTERNAL, ["+a", "+b", "-a", "a"]),
    ],
)
async def test_a_layer_that_fails_ends_the_rpc_and_those_outside_are_left(
    fails: str, code: grpc.StatusCode, order: list[str]
) -> None:
    log: list[str] = []
    layers = Noted("a", log), Noted("b", log, fails), Noted("c", log)
    async with serving(answers, *layers) as call:
        failed = await refusal(call())
    assert failed.code is code
    assert "secret" not in failed.message
    assert log == [step if step[0] in "+-" else f"{step}: {code.name}" for step in order]


async def test_grpcs_own_retries_wait_as_long_as_the_failure_asks() -> None:
    asked_at: list[float] = []

    async def ready_later(_request: bytes, _context: Any) -> bytes:
        asked_at.append(time.monotonic())
        if len(asked_at) == 1:
            raise NoWorkerError("none yet", retry_delay_s=0.5)
        return b"ok"

    async with serving(ready_later, config=IMPATIENT) as call:
        assert await call() == b"ok"
    first, second = asked_at
    assert second - first >= 0.5


# ---- failures that look like a client's leaving


async def _waits_for_what_was_cancelled(_request: bytes, _context: Any) -> bytes:
    other: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    other.cancel()
    return await other


async def _misuses_a_closed_channel(_request: bytes, _context: Any) -> bytes:
    channel: Any = grpc.aio.insecure_channel("127.0.0.1:1")
    await channel.close()
    return bytes(await channel.unary_unary("/x/y")(b""))


async def _meets_an_error_of_grpcs_own(_request: bytes, _context: Any) -> bytes:
    raise grpc.aio.InternalError("of another RPC")


@pytest.mark.parametrize(
    "handler",
    [_waits_for_what_was_cancelled, _misuses_a_closed_channel, _meets_an_error_of_grpcs_own],
)
async def test_a_caller_who_still_waits_is_told(
    handler: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(handler) as call:
        failed = await refusal(call())
    assert failed.code is grpc.StatusCode.INTERNAL
    (line,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert fields_of(line)["error_id"] == failed.error_id


# ---- callers


async def test_a_span_names_its_caller() -> None:
    spans, key = SpanLog(), "k" * 32
    policy = AuthPolicy(keys=ApiKeys(inline=f"alice:{key}"))
    telemetry = TelemetryLayer(spans.tracing, served=[f"/{KINDS}/Unary"])
    async with serving_kinds(Kinds(), [telemetry, *policy.layers()]) as client:
        await client.unary(b"", metadata=(("authorization", f"Bearer {key}"),))
        await refusal(client.unary(b""))
        known, anonymous = await spans.until_ended(2)
    assert attributes(known)["enduser.id"] == "alice"
    assert "enduser.id" not in attributes(anonymous)


# ---- unknown methods


@pytest.mark.parametrize("keys", [None, ApiKeys(inline="alice:" + "k" * 32)])
async def test_made_up_methods_leave_nothing_behind(keys: ApiKeys | None) -> None:
    options = ServerOptions(
        max_receive_bytes=1 << 20, clients=transports.clients(), auth=AuthPolicy(keys=keys)
    )
    server = Server((), options)
    port = await server.listen("127.0.0.1:0")

    def kept() -> int:
        gc.collect()
        # Not `isinstance`: it asks every object for its class, and some of torch then warn.
        kinds = (grpc.RpcMethodHandler, Method)
        return sum(issubclass(type(thing), kinds) for thing in gc.get_objects())

    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            to: Any = channel

            async def guess(method: str) -> None:
                code = (await refusal(to.unary_unary(method)(b""))).code
                assert code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)

            await guess("/a.B/C")
            before = kept()
            for number in range(50):
                await guess("/a.B/C")
                await guess(f"/a.B/C{number}")
            assert kept() <= before + 5
    finally:
        await server.stop(0)
