"""The kinds of calls: one response, progress before a result, and an upload."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from millstream.v1 import engine_control_pb2
from millstream_client.transport import Metadata
from millstream_client.writing import half_close, write

SHORT_S = 10.0
"""Time-out of a call that needs no engine."""

Report = Callable[[engine_control_pb2.OperationProgress], None]
Describe = Callable[[Any], Sequence[str]]
"""Returns the lines of a response, the most important one first."""


class IncompleteError(Exception):
    """A call ended with OK, but without its result."""


class AdminCall(Protocol):
    """A call of one server."""

    @property
    def describe(self) -> Describe:
        """See `Describe`."""
        ...

    async def run(self, stub: Any, report: Report, metadata: Metadata) -> Message:
        """Call the method of ``stub``; return the response that has the result.

        Raises:
            grpc.aio.AioRpcError: it failed.
            IncompleteError: see there.
            ValueError: a file to send can't be read; nothing was changed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OneResponse:
    """A call with one request and one response."""

    method: str
    request: Message
    describe: Describe
    timeout_s: float | None = SHORT_S
    """None: it lasts as long as the engine needs."""

    async def run(self, stub: Any, report: Report, metadata: Metadata) -> Message:
        """See `AdminCall.run`."""
        response: Message = await getattr(stub, self.method)(
            self.request, timeout=self.timeout_s, metadata=metadata
        )
        return response


@dataclass(frozen=True, slots=True, kw_only=True)
class WithProgress:
    """A call with one request, whose responses say how far it is."""

    method: str
    request: Message
    describe: Describe

    async def run(self, stub: Any, report: Report, metadata: Metadata) -> Message:
        """See `AdminCall.run`."""
        return await _last(getattr(stub, self.method)(self.request, metadata=metadata), report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A call with a stream of requests; ``messages`` is called for each server."""

    method: str
    messages: Callable[[], AsyncGenerator[Message, None]]
    describe: Describe

    async def run(self, stub: Any, report: Report, metadata: Metadata) -> Message:
        """See `AdminCall.run`."""
        call = getattr(stub, self.method)(metadata=metadata)
        reading = asyncio.ensure_future(_last(call, report))
        try:
            await self._send(call)
            return await reading
        finally:
            call.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _send(self, call: Any) -> None:
        async with contextlib.aclosing(self.messages()) as messages:
            async for message in messages:
                if not await write(call, message):  # type: ignore[arg-type] # any message
                    return
        await half_close(call)


async def _last(call: Any, report: Report) -> Message:
    """Report each response's progress; return the one that ends the operation."""
    async for response in call:
        report(response.progress)
        if response.progress.stage == engine_control_pb2.OPERATION_STAGE_DONE:
            done: Message = response
            async for _ in call:  # to its status
                pass
            return done
    raise IncompleteError("the call ended without a result; `status` says what was done")
