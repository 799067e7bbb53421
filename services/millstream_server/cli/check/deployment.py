"""The steps of a check, in order, and the lines that it prints of them."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import processor_pb2
from millstream_client import Client, MillstreamError
from millstream_client.errors import from_rpc_error
from millstream_client.service_config import DIFFUSION_SERVICE, EMBEDDING_SERVICE, SERVICE
from millstream_server.cli.check.model import Asked, CheckFailedError, connected, lacking
from millstream_server.cli.client import explain
from millstream_server.cli.flags import Destination, explain_tls

_METHOD = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
_EXPECTED = (SERVICE, DIFFUSION_SERVICE, EMBEDDING_SERVICE, "grpc.health.v1.Health")
_ASK_AGAIN_S = 0.5
_SHORT_S = 5.0
"""Time-out of a call that needs no engine."""


class Report:
    """Prints the steps and knows whether one failed."""

    def __init__(self, server: Destination) -> None:
        self.failed = 0
        self.passed = 0
        self._server = server
        self._said = ""
        self._signs = _signs()

    async def step(self, name: str, work: Awaitable[str]) -> bool:
        """Run a step, which returns what it found; print the line; return whether it passed."""
        began = time.monotonic()
        try:
            found = await work
        except (CheckFailedError, MillstreamError) as error:
            self.failed += 1
            why, *more = self.explain(error)
            self._print("✗", name, why, began)
            for line in more:
                print(f"  {line}")
            return False
        self.passed += 1
        self._print("✓", name, found, began)
        return True

    def explain(self, error: CheckFailedError | MillstreamError) -> list[str]:
        """Return why a step failed, then lines of advice."""
        if isinstance(error, CheckFailedError):
            return [str(error), *([f"-> {error.advice}"] if error.advice else [])]
        why, *more = (line.removeprefix("error: ").strip() for line in explain(error, self._server))
        return [why, *(f"-> {line}" for line in more)]

    def waiting(self, name: str, why: str) -> None:
        """Print what is waited for, once."""
        line = f"{self._signs['…']} {name}: waiting: {why}"
        if line != self._said:
            print(line, flush=True)
        self._said = line

    def note(self, name: str, what: str) -> None:
        print(f"- {name}: {what}", flush=True)

    def conclude(self) -> int:
        steps = self.passed + self.failed
        if self.failed:
            print(f"{self.failed} of {steps} steps failed")
            return 1
        print(f"all {steps} steps passed")
        return 0

    def _print(self, sign: str, name: str, what: str, began: float) -> None:
        print(f"{self._signs[sign]} {name}: {what} ({time.monotonic() - began:.2f} s)", flush=True)


def _signs() -> dict[str, str]:
    """Return the signs as the output can show them; a container may have no locale for them."""
    signs = {"✓": "ok", "✗": "FAILED", "…": "..."}
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # what servers say may hold anything
    try:
        "".join(signs).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return signs
    return {sign: sign for sign in signs}


async def list_services(client: Client, timeout_s: float) -> frozenset[str]:
    """Return the full names of all services.

    Raises:
        MillstreamError: the call failed.
    """
    from grpc_reflection.v1alpha import reflection_pb2 as pb  # noqa: PLC0415 - a lean install

    # v1 has the messages of v1alpha.
    method: Any = client.channel.stream_stream(
        _METHOD,
        pb.ServerReflectionRequest.SerializeToString,
        pb.ServerReflectionResponse.FromString,
    )
    call = method(
        iter([pb.ServerReflectionRequest(list_services="")]),
        metadata=client.metadata(),
        timeout=timeout_s,
    )
    try:
        async for reply in call:
            return frozenset(s.name for s in reply.list_services_response.service)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        call.cancel()
        raise
    return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to check."""

    server: Destination
    wait_s: float = 0.0
    timeout_s: float = 60.0
    models: frozenset[str] = frozenset()
    """Empty: all."""
    disaggregated: frozenset[str] = frozenset()
    """Models that prefill and decode workers have to answer."""


async def check(client: Client, wanted: Wanted) -> int:
    """Run all steps, print them, and return the exit code."""
    return await _Check(client, wanted).run()


class _Check:
    def __init__(self, client: Client, wanted: Wanted) -> None:
        self._client = client
        self._wanted = wanted
        self._report = Report(wanted.server)
        self._deadline = time.monotonic() + wanted.wait_s
        self._models: list[processor_pb2.ServedModel] = []

    async def run(self) -> int:
        report = self._report
        if await report.step("connection", self._patiently("connection", self._connect)):
            await report.step("health", self._patiently("health", self._health))
            await self._reflection()
            if await report.step("models", self._patiently("models", self._list)):
                for model in self._models:
                    await self._model(model)
        return report.conclude()

    async def _patiently(self, name: str, work: Callable[[], Awaitable[str]]) -> str:
        """Repeat ``work`` while it fails and there is time."""
        while True:
            try:
                return await work()
            except (CheckFailedError, MillstreamError) as error:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    raise
                self._report.waiting(name, self._report.explain(error)[0])
                await asyncio.sleep(min(_ASK_AGAIN_S, left_s))

    async def _connect(self) -> str:
        try:
            await self._status("")
        except MillstreamError as error:
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                return "a server, which has no grpc.health.v1.Health"
            server = self._wanted.server
            why = explain_tls(error.message, server)
            raise CheckFailedError(
                " ".join(f"{server.address} can't be reached: {why or error.message}".split()),
                "" if why else "is it running, and are address and port right?",
            ) from error
        return self._wanted.server.address

    async def _status(self, service: str) -> str:
        request = health_pb2.HealthCheckRequest(service=service)
        stub = health_pb2_grpc.HealthStub(self._client.channel)
        try:
            reply = await stub.Check(request, timeout=_SHORT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    async def _health(self) -> str:
        try:
            status = await self._status(SERVICE)
        except MillstreamError as error:
            if error.code not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
                raise
            raise CheckFailedError(
                f"the server has no {SERVICE}",
                "give the Processor's address (workers have other ports)",
            ) from error
        if status != "SERVING":
            raise CheckFailedError(
                f"{SERVICE} is {status}",
                "a model lacks workers (see below), or the Processor is shutting down",
            )
        return f"{SERVICE} is SERVING"

    async def _reflection(self) -> None:
        if importlib.util.find_spec("grpc_reflection") is None:
            self._report.note("reflection", "not checked: grpcio-reflection isn't installed here")
        else:
            await self._report.step("reflection", self._services())

    async def _services(self) -> str:
        found = await list_services(self._client, _SHORT_S)
        missing = [name for name in _EXPECTED if name not in found]
        if missing:
            raise CheckFailedError(
                f"{', '.join(missing)} not listed",
                "is this a Processor, and of this version?",
            )
        return f"{len(found)} services, all that a Processor has"

    async def _list(self) -> str:
        models = await self._client.models(timeout_s=_SHORT_S)
        wanted = self._wanted.models
        self._models = [m for m in models if not wanted or m.name in wanted]
        known = {model.name for model in models}
        if unknown := sorted((wanted | self._wanted.disaggregated) - known):
            raise CheckFailedError(
                f"{', '.join(unknown)} not served; served are: {', '.join(sorted(known))}",
                "--models of the Processor names what is served",
            )
        if not models:
            raise CheckFailedError("none is served", "--models of the Processor names them")
        not_ready = [m.name for m in self._models if not m.ready]
        if not_ready and time.monotonic() < self._deadline:
            raise CheckFailedError(f"{', '.join(not_ready)} not ready")
        return ", ".join(f"{m.name} ({connected(m)})" for m in self._models)

    async def _model(self, model: processor_pb2.ServedModel) -> None:
        name = f"model {model.name}"
        if not model.ready:
            await self._report.step(name, _not_ready(model))
            return
        wanted = self._wanted
        asked = Asked(self._client, model, wanted.timeout_s)
        steps = asked.steps(disaggregated=model.name in wanted.disaggregated)
        for work in steps:
            await self._report.step(name, work)
        if not steps:
            self._report.note(name, "not asked: this command doesn't know what it does")


async def _not_ready(model: processor_pb2.ServedModel) -> str:
    lacks = lacking(model)
    raise CheckFailedError(
        f"not ready, it lacks {lacks} (connected: {connected(model)})",
        "do they run, and are they ready, not drained or paused by an operator? "
        "does --workers of the Processor name them, and is --model-name theirs? "
        "the Processor's log has why a connection fails",
    )
