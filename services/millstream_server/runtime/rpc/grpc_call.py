"""A `Call` on grpc.aio; the only module that uses its servicer context."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import grpc

from millstream_server.runtime.errors import Code
from millstream_server.runtime.rpc.served_call import CallOverError, ServedCall, Trailers
from millstream_server.runtime.rpc.status import GRPC_CODES
from millstream_server.runtime.security.certificate_names import CertificateName

Context = Any
"""grpc.aio.ServicerContext; its generic form exists in the stubs only."""

_TOO_LATE = (grpc.aio.InternalError, grpc.aio.UsageError)
"""What grpc.aio raises when something is sent on an RPC that has ended."""

_NAMES: tuple[tuple[str, Literal["uri", "dns"]], ...] = (("peer_uri", "uri"), ("peer_dns", "dns"))
"""Where grpc.aio has a certificate's names."""


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

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """See `Call`."""
        if self._metadata is None:
            self._metadata = self.context.invocation_metadata() or ()
        return self._metadata

    @property
    def peer(self) -> str:
        """See `Call`."""
        return self.context.peer()  # type: ignore[no-any-return]

    @property
    def certificate_names(self) -> Sequence[CertificateName] | None:
        """See `Call`."""
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
        """See `Call`."""
        return self.context.time_remaining()  # type: ignore[no-any-return]

    async def _keep(self, response: Any) -> None:
        self.response = response

    def complete(self) -> None:
        """See `ServedCall`: grpc.aio sends the status when the handler returns."""
        if self.trailers:
            self.context.set_trailing_metadata(self.trailers)

    async def abort(self, code: Code, message: str, trailers: Trailers) -> None:
        """See `ServedCall`."""
        try:
            await self.context.abort(GRPC_CODES[code], message, trailers)
        except grpc.aio.AbortError as aborted:
            self.aborted = aborted
        except (*_TOO_LATE, asyncio.InvalidStateError) as error:
            raise CallOverError from error

    def is_late(self, error: BaseException) -> bool:
        """See `ServedCall`."""
        return isinstance(error, _TOO_LATE)
