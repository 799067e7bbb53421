"""EngineControlService, on the admin address: request, operation, response, and a line in the log.

The log has one line for each call of an operator: who, what, with what result, how long. Also a
request that can't be converted leaves one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from millstream.v1 import engine_control_pb2 as pb
from millstream.v1 import engine_control_pb2_grpc
from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.rpc.auth import CallerIdentity, CallerKind, caller
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.control import wire
from millstream_server.worker.control.core import ControlCore
from millstream_server.worker.control.operations import OperationReport, OperationStage

log = get_log(__name__)
T = TypeVar("T")
RequestT = TypeVar("RequestT")
Unary = Callable[["EngineControlServicer", RequestT, Call], Coroutine[Any, Any, T]]

SERVICE = "millstream.v1.EngineControlService"
MAX_RECEIVE_BYTES = 4 << 20
"""A piece of a tensor has 2 MiB at most; the list of a broadcast's tensors may be longer."""
_LOOKS = frozenset({"GetEngineState", "ListLoras"})
"""Methods that change nothing."""
_REPEAT_S = 1.0
"""Time after which progress is sent again without a change of the stage."""


def _in_task(method: Unary[RequestT, T]) -> Unary[RequestT, T]:
    """Run an operation without progress in a task of its own, which leaves a line in the log.

    If the caller goes away, tell the operation and don't wait.
    """

    @functools.wraps(method)
    async def run(self: EngineControlServicer, request: RequestT, call: Call) -> T:
        task = self.start(call, request, method(self, request, call))
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()  # no effect when it has ended
        return task.result()

    return run


class EngineControlServicer(engine_control_pb2_grpc.EngineControlServiceServicer):
    """Serves EngineControlService."""

    def __init__(self, control: ControlCore) -> None:
        self._control = control
        self._running: set[asyncio.Task[Any]] = set()

    @_in_task
    async def GetEngineState(
        self, request: pb.GetEngineStateRequest, call: Call
    ) -> pb.GetEngineStateResponse:
        return pb.GetEngineStateResponse(state=wire.state_to_proto(self._control))

    # ---- in and out of service -------------------------------------------------------------------

    def Drain(self, request: pb.DrainRequest, call: Call) -> AsyncGenerator[pb.DrainResponse, None]:
        async def work(report: OperationReport) -> None:
            await self._control.drain.drain(report, wire.timeout_from_proto(request))

        return self._followed(call, request, work, pb.DrainResponse)

    @_in_task
    async def Undrain(self, request: pb.UndrainRequest, call: Call) -> pb.UndrainResponse:
        return pb.UndrainResponse(was_drained=self._control.drain.undrain())

    @_in_task
    async def Pause(self, request: pb.PauseRequest, call: Call) -> pb.PauseResponse:
        mode = wire.mode_from_proto(request.mode)
        was_paused, open_requests = await self._control.pause.pause(mode)
        return pb.PauseResponse(was_paused=was_paused, open_requests=open_requests)

    @_in_task
    async def Continue(self, request: pb.ContinueRequest, call: Call) -> pb.ContinueResponse:
        return pb.ContinueResponse(was_paused=await self._control.pause.go_on())

    # ---- memory, weights, cache ------------------------------------------------------------------

    def ReleaseMemory(
        self, request: pb.ReleaseMemoryRequest, call: Call
    ) -> AsyncGenerator[pb.ReleaseMemoryResponse, None]:
        async def work(report: OperationReport) -> pb.MemoryReleased:
            tags = wire.tags_from_proto(request.tags)
            timeout_s = wire.timeout_from_proto(request)
            released = await self._control.memory.release(report, tags, timeout_s)
            return wire.released_to_proto(released)

        return self._followed(call, request, work, pb.ReleaseMemoryResponse)

    @_in_task
    async def ResumeMemory(
        self, request: pb.ResumeMemoryRequest, call: Call
    ) -> pb.ResumeMemoryResponse:
        tags = wire.tags_from_proto(request.tags)
        return wire.resumed_to_proto(await self._control.memory.resume(tags))

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[pb.UpdateWeightsRequest], call: Call
    ) -> AsyncIterator[pb.UpdateWeightsResponse]:
        start = await anext(request_iterator, None)

        async def work(report: OperationReport) -> pb.WeightsUpdated:
            asked = wire.update_from_proto(start, request_iterator)
            return wire.updated_to_proto(await self._control.weights.update(report, asked))

        responses = self._followed(call, start, work, pb.UpdateWeightsResponse)
        async with contextlib.aclosing(responses):
            async for response in responses:
                yield response

    @_in_task
    async def FlushCache(self, request: pb.FlushCacheRequest, call: Call) -> pb.FlushCacheResponse:
        timeout_s = wire.timeout_from_proto(request)
        await self._control.cache.flush(drain=request.drain, timeout_s=timeout_s)
        return pb.FlushCacheResponse()

    # ---- profiles, adapters ----------------------------------------------------------------------

    @_in_task
    async def StartProfile(
        self, request: pb.StartProfileRequest, call: Call
    ) -> pb.StartProfileResponse:
        activities = wire.activities_from_proto(request.activities)
        directory = await self._control.profile.begin(activities, request.steps)
        return pb.StartProfileResponse(directory=str(directory))

    @_in_task
    async def StopProfile(
        self, request: pb.StopProfileRequest, call: Call
    ) -> pb.StopProfileResponse:
        return pb.StopProfileResponse(
            files=[
                pb.ProfileFile(path=str(path), bytes=nbytes)
                for path, nbytes in await self._control.profile.end()
            ]
        )

    @_in_task
    async def LoadLora(self, request: pb.LoadLoraRequest, call: Call) -> pb.LoadLoraResponse:
        adapter = await self._control.adapters.load(request.name, request.path)
        return pb.LoadLoraResponse(adapter=wire.adapter_to_proto(adapter))

    @_in_task
    async def UnloadLora(self, request: pb.UnloadLoraRequest, call: Call) -> pb.UnloadLoraResponse:
        await self._control.adapters.unload(request.name)
        return pb.UnloadLoraResponse()

    @_in_task
    async def ListLoras(self, request: pb.ListLorasRequest, call: Call) -> pb.ListLorasResponse:
        adapters = map(wire.adapter_to_proto, self._control.adapters.listed())
        return pb.ListLorasResponse(adapters=adapters)

    # ---- for all of them -------------------------------------------------------------------------

    def start(self, call: Call, request: Any, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run an operation in a task whose end is logged, perhaps after its caller has gone."""
        name, who, arguments = call.method.rpartition("/")[2], caller(), wire.shown(request)
        began_s = time.monotonic()
        task = asyncio.create_task(work)
        self._running.add(task)

        def ended(_: asyncio.Task[T]) -> None:
            self._running.discard(task)
            write = log.info if name in _LOOKS else log.action
            write(
                "operator action",
                operation=name,
                caller=_named(who),
                outcome=_outcome(task),
                took_s=round(time.monotonic() - began_s, 3),
                caller_gone=bool(task.cancelling()),
                **arguments,
            )

        task.add_done_callback(ended)
        return task

    async def _followed(
        self,
        call: Call,
        request: Any,
        work: Callable[[OperationReport], Coroutine[Any, Any, Any]],
        response: Callable[..., T],
    ) -> AsyncGenerator[T, None]:
        """Run an operation; yield its progress while it runs, and at last its result."""
        report = self._control.report()
        task = self.start(call, request, work(report))
        task.add_done_callback(lambda _: report.changed.set())
        try:
            while not task.done():
                report.changed.clear()
                yield response(progress=wire.progress_to_proto(report))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REPEAT_S):
                        await report.changed.wait()
            result = task.result()
        finally:
            task.cancel()  # no effect when it has ended
        report.enter(OperationStage.DONE)
        fields = {} if result is None else {"result": result}
        yield response(progress=wire.progress_to_proto(report), **fields)


def _named(who: CallerIdentity) -> str:
    return who.name if who.kind is CallerKind.CERTIFICATE else "local"


def _outcome(task: asyncio.Task[Any]) -> str:
    if task.cancelled():
        return "undone"
    error = task.exception()
    if error is None:
        return "done"
    return error.reason if isinstance(error, ServingError) else "INTERNAL"


def add_service(control: ControlCore, server: Any) -> None:
    """Add EngineControlService to a server."""
    engine_control_pb2_grpc.add_EngineControlServiceServicer_to_server(
        EngineControlServicer(control), server
    )
