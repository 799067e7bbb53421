"""RPCs on grpc.aio, as workers and admin ports serve them: its server, its calls, its log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import grpc

from millstream_server.runtime.errors import Failure
from millstream_server.runtime.rpc.call import CertificateName, key_of_address
from millstream_server.runtime.rpc.channel import ChannelArguments
from millstream_server.runtime.rpc.served_call import CallOverError, ServedCall
from millstream_server.runtime.rpc.serving import Handler, Method, Rpcs
from millstream_server.runtime.rpc.status import GRPC_CODES, to_trailers
from millstream_server.runtime.security.tls import ServerTls
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_WATCH_S = 0.5
LOGGER = "grpc._cython.cygrpc"
_PLAIN = {
    "UnicodeDecodeError": "a caller's metadata isn't UTF-8",
    "ExecuteBatchError": "a caller left before the answer was sent",
}
"""By the name of the exception: what any caller can cause, once per metadata entry or RPC."""
Context = Any
"""grpc.aio.ServicerContext; its generic form exists in the stubs only."""
_TOO_LATE = (grpc.aio.InternalError, grpc.aio.UsageError)
"""What grpc.aio raises when something is sent on an RPC that has ended."""
_NAMES: tuple[tuple[str, Literal["uri", "dns"]], ...] = (("peer_uri", "uri"), ("peer_dns", "dns"))
"""Where grpc.aio has a certificate's names."""


class GrpcServer:
    """grpc.aio's server. Order of calls: add servicers, `bind`, `start`, `stop`."""

    def __init__(
        self,
        interceptor: RpcInterceptor,
        arguments: ChannelArguments,
        died: Callable[[], None] | None = None,
    ) -> None:
        """Serve RPCs through ``interceptor``.

        ``died`` is called when gRPC accepts no more calls; only a new process helps.
        """
        server = cast("Any", grpc.aio.server(interceptors=[interceptor], options=arguments))
        self._server = server
        self._watching: asyncio.Task[None] | None = None
        self._died = died
        self.add_registered_method_handlers = server.add_registered_method_handlers
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def bind(self, address: str, tls: ServerTls | None = None) -> int:
        """Bind an address, HOST:PORT; return the port.

        Raises:
            OSError: it can't be bound.
        """
        try:
            if tls is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, tls.credentials()))
        except RuntimeError as error:
            message = f"can't listen on {address}: is the port taken?"
            raise OSError(message) from error

    async def start(self) -> None:
        await self._server.start()
        if self._died is not None:
            self._watching = asyncio.ensure_future(self._watch(self._died))

    async def stop(self, grace_s: float | None) -> None:
        """Take no more connections and RPCs; after ``grace_s`` cut what is open. None: at once."""
        if self._watching is not None:
            self._watching.cancel()
        await self._server.stop(grace_s)

    async def _watch(self, died: Callable[[], None]) -> None:
        """Detect that gRPC serves no more: a `:path` that isn't UTF-8 ends grpcio 1.85's own loop.

        It happens before any code of ours runs. Open streams go on, new connections are refused,
        and gRPC reports nothing.
        """
        core = self._server._server  # noqa: SLF001 - no public way
        while core.is_running():  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(_WATCH_S)
        log.error(
            "gRPC's serving loop died; this process finishes its work and exits",
            cause="a caller's frame, most likely a :path that isn't UTF-8",
        )
        died()


class RpcInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Runs the layers around each RPC, and ends it with the status of its failure.

    Other exceptions end the RPC with INTERNAL and an id of the log line; their text is not sent.
    Requests that don't parse end with INVALID_ARGUMENT.

    Handlers read and write on grpc.aio's context themselves, so that a message passes no further
    generator between grpc.aio and the servicer, however many layers there are.
    """

    def __init__(self, rpcs: Rpcs | None = None) -> None:
        """Serve with what ``rpcs`` share; without them there are no layers."""
        self._rpcs = rpcs or Rpcs()
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler; only once per method that is served."""
        name: str = handler_call_details.method
        wrapped = self._wrapped.get(name)
        if wrapped is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        wrapped = _handler(self._rpcs.method(name, handler))
        if handler is not None:
            self._wrapped[name] = wrapped
        return wrapped


def _handler(method: Method) -> Handler:
    """Make a handler of a request stream, which is the same on the wire.

    For a single request grpc.aio would read it before our code runs: a caller that sends none
    could keep an RPC open for ever, neither counted nor authenticated, and a caller that
    closes without a message would never get a status.
    """

    async def serve(_requests: object, context: Context) -> Any:
        call = GrpcCall(method.name, context, streaming=method.response_streaming)
        await method.serve(call)
        if call.aborted:
            raise call.aborted
        return call.response

    if method.response_streaming:
        return grpc.stream_stream_rpc_method_handler(serve, method.parse, method.serialize)
    return grpc.stream_unary_rpc_method_handler(serve, method.parse, method.serialize)


class GrpcCall(ServedCall):
    """A `Call` on a grpc.aio servicer context."""

    __slots__ = ("_metadata", "aborted", "context", "read", "response", "write")

    END: ClassVar[Any] = grpc.aio.EOF  # type: ignore[attr-defined]

    def __init__(self, method: str, context: Context, *, streaming: bool) -> None:
        """Call it in the task that serves the RPC; ``streaming``: there are many responses."""
        super().__init__(method)
        self.context = context
        """grpc.aio's context; for this package only."""
        self.response: Any = None
        """The response of a method that returns one: grpc.aio sends it."""
        self.aborted: grpc.aio.AbortError | None = None
        """What `abort` raised in grpc.aio: it wants to see it again."""
        # Its own functions, not ours around them: a coroutine less per message.
        self.read = context.read
        self.write = context.write if streaming else self._keep
        self._metadata: Sequence[tuple[str, str | bytes]] | None = None
        self._task = asyncio.current_task()
        self.caller_key = key_of_address(self.peer)

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        if self._metadata is None:
            self._metadata = self.context.invocation_metadata() or ()
        return self._metadata

    @property
    def peer(self) -> str:
        return self.context.peer()  # type: ignore[no-any-return]

    @property
    def certificate_names(self) -> Sequence[CertificateName] | None:
        facts: Mapping[str, Sequence[bytes]] = self.context.auth_context()
        if "x509_pem_cert" not in facts:
            return None
        return [
            CertificateName(kind, name.decode(errors="replace"))
            for key, kind in _NAMES
            for name in facts.get(key, ())
        ]

    @property
    def time_left_s(self) -> float | None:
        return self.context.time_remaining()  # type: ignore[no-any-return]

    async def _keep(self, response: Any) -> None:
        self.response = response

    def complete(self) -> None:
        """See `ServedCall`: grpc.aio sends the status when the handler returns."""
        if self.trailers:
            self.context.set_trailing_metadata(self.trailers)

    async def abort(self, failure: Failure) -> None:
        trailers = (*self.trailers, *to_trailers(failure))
        try:
            await self.context.abort(GRPC_CODES[failure.code], failure.message, trailers)
        except grpc.aio.AbortError as aborted:
            self.aborted = aborted
        except (*_TOO_LATE, asyncio.InvalidStateError) as error:
            raise CallOverError from error

    def is_late(self, error: BaseException) -> bool:
        return isinstance(error, _TOO_LATE)


# ---- what grpc.aio logs of its callers: one plain line a minute and cause, without tracebacks ----


class _Plain(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        event = _PLAIN.get(kind.__name__) if kind else None
        if event:
            record.msg, record.args, record.exc_info = event, (), None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.__dict__.update(cause=event, most=1)
        return True


_plain = _Plain()


def plain_grpc_log() -> None:
    """Make the lines plain, for the whole process; may be called again."""
    logging.getLogger(LOGGER).addFilter(_plain)  # once, however often it is called
