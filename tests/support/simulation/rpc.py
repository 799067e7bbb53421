"""RPCs over the simulated network: a link's `Channel` to a worker, and calls as servers see them.

Messages are serialized and parsed, statuses have their real trailers: only grpc.aio is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from millstream_server.links.channel import CallError, Metadata, Rpc
from millstream_server.runtime.errors import Code, Failure
from millstream_server.runtime.rpc.call import CertificateName, Source, key_of_address
from millstream_server.runtime.rpc.served_call import CallOverError, ServedCall
from millstream_server.runtime.rpc.serving import MethodTable
from millstream_server.runtime.rpc.status import DETAILS_KEY, to_trailers
from tests.support.simulation.network import BrokenError, Link, Network, Pipe

_RECONNECT_S = 0.1


def _lost() -> CallError:
    """Make a new one each time: one that is raised again keeps the frames of all times before."""
    return CallError(Code.UNAVAILABLE, "Socket closed")


@dataclass(frozen=True)
class Status:
    """How an RPC ended, as its caller gets it."""

    code: Code
    message: str = ""
    details: bytes | None = None


class HalfClose:
    """The caller sends nothing more."""


class SimulatedCall(ServedCall):
    """A `Call` whose messages come and go through pipes."""

    END: ClassVar[Any] = HalfClose

    def __init__(
        self, method: str, received: Pipe, sent: Pipe, peer: str, deadline_s: float | None = None
    ) -> None:
        super().__init__(method)
        self._received, self._sent = received, sent
        self._deadline_s = deadline_s
        self._wanted = asyncio.Event()
        self._peer = peer
        self.parse: Any = bytes
        self.serialize: Any = bytes
        self.caller_key = key_of_address(peer)
        self.statuses: list[Status] = []
        """One, if all is right."""
        self.read = self._read
        self.write = self._write
        self.ready = self._wanted.set
        self.send_from = self._send_from

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return ()

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def certificate_names(self) -> Sequence[CertificateName] | None:
        return None

    @property
    def time_left_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    def served_by(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    async def _read(self) -> Any:
        try:
            item = await self._received.get()
        except BrokenError as error:
            raise CallOverError from error
        return item if item is HalfClose else self.parse(item)

    async def _write(self, response: Any) -> None:
        if self.statuses:
            self._sent.link.network.broken.append(f"{self.method} sent a message after its status")
        try:
            await self._sent.put(self.serialize(response))
        except BrokenError as error:
            raise CallOverError from error

    async def _send_from(self, source: Source) -> None:
        while not source.over:
            await self._wanted.wait()
            self._wanted.clear()
            message = source.next()
            if message is not None:
                source.gathers = True  # what comes while this one can't be written counts
                await self._write(message)

    def complete(self) -> None:
        self._end(Status(Code.OK))

    async def abort(self, failure: Failure) -> None:
        trailers: dict[str, Any] = dict(to_trailers(failure))
        self._end(Status(failure.code, failure.message, trailers.get(DETAILS_KEY)))

    def leave(self) -> None:
        """Let the caller be gone: end it as gRPC does."""
        self._received.fail(BrokenError())
        self._sent.fail(BrokenError())
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def _end(self, status: Status) -> None:
        self.statuses.append(status)
        if len(self.statuses) > 1:
            self._sent.link.network.broken.append(f"{self.method} ended as {self.statuses}")
        self._sent.tell(status)


def serve(methods: MethodTable, name: str, call: SimulatedCall) -> asyncio.Task[None]:
    """Serve a call in a task of the node whose context this is."""
    method = methods.find(name)
    call.parse, call.serialize = method.parse, method.serialize
    task = asyncio.ensure_future(_served(method, call))
    call.served_by(task)
    return task


async def _served(method: Any, call: SimulatedCall) -> None:
    with contextlib.suppress(asyncio.CancelledError, CallOverError):
        await method.serve(call)
        return
    if not call.statuses:
        late = call.time_left_s == 0
        call._end(Status(Code.DEADLINE_EXCEEDED if late else Code.CANCELLED))


class SimulatedStream:
    """A `links.channel.Stream`."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self.requests: Pipe
        self.responses: Pipe
        self.on_cancel: Any = lambda: None
        self._end: CallError | None = None
        self._over = False

    async def read(self) -> Any:
        if self._over:
            if self._end is not None:
                raise self._end
            return None
        try:
            item = await self.responses.get()
        except BrokenError:
            self._over, self._end = True, _lost()
            raise _lost() from None
        if isinstance(item, Status):
            self._over = True
            if item.code is Code.OK:
                return None
            self._end = CallError(item.code, item.message, item.details)
            raise self._end
        return self._rpc.response.FromString(item)

    async def write(self, message: Any) -> None:
        try:
            await self.requests.put(message.SerializeToString())
        except BrokenError:
            raise _lost() from None

    async def done_writing(self) -> None:
        self.requests.tell(HalfClose)

    def cancel(self) -> None:
        if not self._over:
            self._over, self._end = True, CallError(Code.CANCELLED, "cancelled here")
            self.responses.fail(BrokenError())
            self.on_cancel()


@dataclass(eq=False)
class _Open:
    """An RPC of a channel, and its call once that has arrived."""

    stream: SimulatedStream
    call: SimulatedCall | None = None

    def leave(self) -> None:
        if self.call is not None:
            self.call.leave()


class SimulatedChannel:
    """A `links.channel.Channel` to a node that may come and go."""

    stale = False

    def __init__(self, network: Network, client: str, server: str, nodes: Any) -> None:
        """``nodes`` finds a node that serves by its name; None: it isn't there."""
        self._network = network
        self._client, self._server = client, server
        self._peer = f"ipv4:{client}:50000"
        self._nodes = nodes
        self._link: Link | None = None
        self._open: list[_Open] = []

    # ---- the connection

    def _connected(self) -> Link | None:
        if self._link is None or self._link.over:
            self._link = None
            ends = self._client, self._server
            open_ = not (self._network.blocked(*ends) or self._network.is_cut(*ends))
            if open_ and self._nodes(self._server) is not None:
                self._link = Link(self._network, self._client, self._server)
                self._link.on_break = self._broke
        return self._link

    def _broke(self) -> None:
        opened, self._open = self._open, []
        for each in opened:
            each.stream.requests.fail(BrokenError())
            each.stream.responses.fail(BrokenError())
            each.leave()

    # ---- RPCs

    def stream(self, rpc: Rpc) -> SimulatedStream:
        return self.begin(rpc)

    def watch(self, rpc: Rpc, request: Any) -> SimulatedStream:
        return self.begin(rpc, request)

    def begin(
        self, rpc: Rpc, request: Any = None, *, timeout_s: float | None = None
    ) -> SimulatedStream:
        """Start an RPC, with its one request if it takes one only."""
        now_s = self._network.loop.time()
        deadline_s = None if timeout_s is None else now_s + timeout_s
        stream = SimulatedStream(rpc)
        link = self._connected()
        if link is None:
            nowhere = Link(self._network, self._client, self._server)
            nowhere.break_()
            stream.requests, stream.responses = Pipe(nowhere.to_server), Pipe(nowhere.to_client)
            stream.requests.fail(BrokenError())
            stream.responses.fail(BrokenError())
            return stream
        stream.requests, stream.responses = Pipe(link.to_server), Pipe(link.to_client)
        opened = _Open(stream)
        self._open.append(opened)

        def arrived(_: object) -> None:
            node = self._nodes(self._server)
            if node is None:
                link.break_()
                return
            call = SimulatedCall(
                f"/{rpc.name}", stream.requests, stream.responses, self._peer, deadline_s
            )
            opened.call = call
            node.context.run(serve, node.methods, call.method, call)

        def cancelled() -> None:
            if opened in self._open:
                self._open.remove(opened)
                link.to_server.send(lambda _: opened.leave(), None)

        link.to_server.send(arrived, None)
        stream.on_cancel = cancelled
        if request is not None:
            stream.requests.tell(request.SerializeToString())
            stream.requests.tell(HalfClose)
        return stream

    async def call(
        self,
        rpc: Rpc,
        request: Any,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        wait: bool = False,
    ) -> Any:
        stream: SimulatedStream | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while wait and self._connected() is None:
                    await asyncio.sleep(_RECONNECT_S)
                stream = self.begin(rpc, request)
                return await stream.read()
        except TimeoutError:
            raise CallError(Code.DEADLINE_EXCEEDED, "the deadline passed") from None
        finally:
            if stream is not None:
                stream.cancel()

    async def aclose(self) -> None:
        if self._link is not None:
            self._link.break_()
