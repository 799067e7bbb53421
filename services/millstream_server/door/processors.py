"""The Processors behind the door: where they are, whose turn it is, and calls of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any, TypeVar

from grpc_health.v1 import health_pb2

from millstream_server.links.channel import CallError, Metadata, Rpc, rpc_of
from millstream_server.links.grpc_channel import GrpcChannel
from millstream_server.routing.discovery.sources import Discovery, follow
from millstream_server.runtime.errors import (
    Code,
    NoWorkerError,
    ServingError,
    UnavailableError,
)
from millstream_server.runtime.rpc.auth import credentials
from millstream_server.runtime.security.tls import ClientTls
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext
from millstream_server.runtime.telemetry.tracing import Tracing, ambient

log = get_log(__name__)

T = TypeVar("T")

SERVICE = "millstream.v1.ProcessorService"
_WATCH = rpc_of(health_pb2.DESCRIPTOR, "Health/Watch")
_PAUSE_S = 0.5
_MOST_TRIES = 3
"""Processors that one request is tried at: more would help nobody if it is what ends them."""
_RETRY_S = 1.0


class Processor:
    """One Processor; connects when it is made, until it is retired or closed."""

    def __init__(
        self, address: str, open_channel: Callable[[str], GrpcChannel], changed: Callable[[], None]
    ) -> None:
        self.address = address
        self.open = 0
        """Requests of this door that it runs."""
        self.serving: bool | None = None
        """What its health says; None: it can't be reached."""
        self.channel = open_channel(address)
        self._open_channel = open_channel
        self._changed = changed
        self._retired = False
        self._following = asyncio.ensure_future(self._follow())

    @property
    def rank(self) -> int:
        """Below those with a lower one in any case; also the last may serve a request yet."""
        return 2 if self.serving is None else int(not self.serving)

    def begin(self) -> None:
        """Count a request."""
        self.open += 1

    def end(self) -> None:
        """Count one less."""
        self.open -= 1
        if self._retired and not self.open:
            self._following.cancel()

    def retire(self) -> None:
        """Disconnect when all requests have ended."""
        self._retired = True
        if not self.open:
            self._following.cancel()

    async def close(self) -> None:
        """Disconnect; what is open fails."""
        self._following.cancel()
        await asyncio.wait({self._following})

    async def _follow(self) -> None:
        """Follow its health until this is cancelled."""
        try:
            while True:
                await self._watch()
                self._set(serving=None)
                await asyncio.sleep(_PAUSE_S)
                if self.channel.stale:  # certificates have changed
                    old, self.channel = self.channel, self._open_channel(self.address)
                    await old.aclose()
        finally:
            self._set(serving=None)
            await self.channel.aclose()

    async def _watch(self) -> None:
        watch = self.channel.watch(_WATCH, health_pb2.HealthCheckRequest(service=SERVICE))
        try:
            while (response := await watch.read()) is not None:
                self._set(serving=response.status == health_pb2.HealthCheckResponse.SERVING)
        except CallError as error:
            log.debug("watch ended", processor=self.address, code=error.code.name)
        finally:
            watch.cancel()

    def _set(self, *, serving: bool | None) -> None:
        if serving is self.serving:
            return
        self.serving = serving
        said = "not reached" if serving is None else "serving" if serving else "not serving"
        log.info("processor", address=self.address, health=said)
        self._changed()


class Processors:
    """All of them; one per process."""

    def __init__(
        self,
        discovery: Discovery,
        changed: Callable[[], None],
        *,
        tls: ClientTls | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Prepare; `open` starts to connect. ``changed`` is called when `serving` may have."""
        self._discovery = discovery
        self._changed = changed
        self._open_channel = lambda address: GrpcChannel(address, tls, tracing)
        self._found: dict[str, Processor] = {}
        self._retired: set[Processor] = set()
        self._task: asyncio.Task[None] | None = None
        self._turns = itertools.count()

    def open(self) -> None:
        self._task = asyncio.ensure_future(follow(self._discovery, self.follow))

    async def close(self) -> None:
        """Disconnect; what is open fails."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        for processor in (*self._found.values(), *self._retired):
            await processor.close()

    @property
    def serving(self) -> bool:
        """Whether one of them serves all of its models."""
        return any(processor.serving for processor in self._found.values())

    def known(self) -> Collection[Processor]:
        """Return those that are discovered now."""
        return self._found.values()

    def follow(self, addresses: Collection[str]) -> None:
        """Connect to the Processors at these addresses; let go of all others."""
        for address in self._found.keys() - set(addresses):
            log.info("processor no longer discovered", address=address)
            processor = self._found.pop(address)
            processor.retire()
            self._retired = {each for each in self._retired if each.open} | {processor}
        for address in sorted(set(addresses) - self._found.keys()):
            self._found[address] = Processor(address, self._open_channel, self._changed)
        self._changed()

    # ---- requests

    async def call(
        self,
        rpc: Rpc,
        request: Any,
        *,
        deadline_s: float | None = None,
        trace: TraceContext = NOT_TRACED,
    ) -> Any:
        """Return the one response.

        Raises:
            ServingError: the RPC failed.
        """
        metadata = _metadata(trace)

        async def begin(processor: Processor) -> Any:
            processor.begin()
            try:
                with _failing():
                    return await processor.channel.call(
                        rpc, request, timeout_s=_left_s(deadline_s), metadata=metadata
                    )
            finally:
                processor.end()

        return await self._somewhere(begin)

    async def stream(
        self,
        rpc: Rpc,
        request: Any,
        *,
        deadline_s: float | None = None,
        trace: TraceContext = NOT_TRACED,
        requests: bool = False,
        check: Callable[[Any], None] = lambda _: None,
    ) -> RemoteStream:
        """Return the responses, of which the first has come; ``requests``: the RPC takes several.

        ``check`` is called with the first one, and raises a `ServingError` if it says a failure.

        Raises:
            ServingError: the RPC failed before that.
        """
        metadata = _metadata(trace)

        async def begin(processor: Processor) -> RemoteStream:
            stream = RemoteStream(processor)
            try:
                await stream.begin(rpc, request, _left_s(deadline_s), metadata, requests=requests)
                check(stream.first)
            except BaseException:
                stream.close()
                raise
            return stream

        return await self._somewhere(begin)

    async def _somewhere(self, begin: Callable[[Processor], Awaitable[T]]) -> T:
        """Begin at one; if that one has gone away or leaves, at another."""
        tried: list[Processor] = []
        while True:
            processor = self._pick(tried)
            tried.append(processor)
            try:
                return await begin(processor)
            except ServingError as error:
                others = len(self._found) > len(tried) and len(tried) < _MOST_TRIES
                if not (others and _is_elsewhere_better(error)):
                    raise
                log.info(
                    "a request goes to another processor",
                    address=processor.address,
                    reason=error.reason,
                )

    def _pick(self, tried: Collection[Processor]) -> Processor:
        """Return the best one that was not tried: it serves, and has the fewest open requests.

        Raises:
            UnavailableError: none was found.
        """
        left = [processor for processor in self._found.values() if processor not in tried]
        if not left:
            raise UnavailableError(
                "no Processor is known here; retry later", retry_delay_s=_RETRY_S
            )
        first = next(self._turns) % len(left)  # equal ones in rotation
        return min((*left[first:], *left[:first]), key=lambda each: (each.rank, each.open))


class RemoteStream:
    """An RPC's responses. Close it always."""

    def __init__(self, processor: Processor) -> None:
        """Count it at ``processor``."""
        self._processor = processor
        self._stream: Any = None
        self.first: Any = None
        """The first response, until it is read."""
        self._closed = False
        processor.begin()

    async def begin(
        self, rpc: Rpc, request: Any, timeout_s: float | None, metadata: Metadata, *, requests: bool
    ) -> None:
        """Start the RPC and wait for the first response.

        Raises:
            ServingError: it failed.
        """
        channel = self._processor.channel
        if requests:
            self._stream = channel.stream(rpc, timeout_s=timeout_s, metadata=metadata)
            with contextlib.suppress(CallError):  # reading tells why
                await self._stream.write(request)
                await self._stream.done_writing()
        else:
            self._stream = channel.watch(rpc, request, timeout_s=timeout_s, metadata=metadata)
        with _failing():
            self.first = await self._stream.read()
            if self.first is None:
                raise CallError(Code.INTERNAL, "it ended without a response")

    async def read(self) -> Any:
        """Return the next response; None: there are no more.

        Raises:
            ServingError: the RPC failed.
        """
        first, self.first = self.first, None
        if first is not None:
            return first
        with _failing():
            return await self._stream.read()

    def close(self) -> None:
        """End the RPC, in any state."""
        if self._closed:
            return
        self._closed = True
        self._processor.end()
        if self._stream is not None:
            self._stream.cancel()


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Let a block fail with what a request fails with."""
    try:
        yield
    except CallError as error:
        is_gone = error.status is None and error.code is Code.UNAVAILABLE
        raise (gone() if is_gone else error.failure()) from error


def gone() -> UnavailableError:
    """Make the failure of a request whose Processor is lost."""
    sentence = "the server that ran this request went away; send it again"
    return UnavailableError(sentence, retry_delay_s=_RETRY_S)


def _is_elsewhere_better(failure: ServingError) -> bool:
    """Whether a Processor went away, shuts down, or lacks the workers; nothing has run then."""
    return type(failure) in (UnavailableError, NoWorkerError)


def _metadata(trace: TraceContext) -> Metadata:
    """Return the caller's credentials and the trace context: this process's, if it traces."""
    here = ambient()
    trace = trace if here == NOT_TRACED else here
    pairs = {
        "traceparent": trace.traceparent,
        "tracestate": trace.tracestate,
        "baggage": trace.baggage,
    }
    return (*credentials(), *((key, value) for key, value in pairs.items() if value))


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
