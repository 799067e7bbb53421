"""EngineControlService, on the admin address."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from millstream.v1 import engine_control_pb2 as pb
from millstream.v1 import engine_control_pb2_grpc
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.security.auth import caller
from millstream_server.worker.control import calls, messages
from millstream_server.worker.control.audit import Action, Audit
from millstream_server.worker.control.core import ControlCore
from millstream_server.worker.control.operations import Report, Stage

T = TypeVar("T")

SERVICE = "millstream.v1.EngineControlService"
MAX_RECEIVE_BYTES = 4 << 20
"""A piece of a tensor has 2 MiB at most; the list of a broadcast's tensors may be longer."""
_LOOKS = frozenset({"GetEngineState", "ListLoras"})
"""Methods that change nothing."""
_REPEAT_S = 1.0
"""Time after which progress is sent again without a change of the stage."""


class EngineControlServicer(engine_control_pb2_grpc.EngineControlServiceServicer):
    """Serves EngineControlService."""

    def __init__(self, control: ControlCore) -> None:
        """Serve the operations of ``control``."""
        self._control = control
        self._audit = Audit()

    async def GetEngineState(
        self, request: pb.GetEngineStateRequest, call: Call
    ) -> pb.GetEngineStateResponse:
        """Return what operations have set."""
        return await self._run(call, request, calls.get_engine_state(self._control, request))

    async def Drain(self, request: pb.DrainRequest, call: Call) -> AsyncIterator[pb.DrainResponse]:
        """Take the worker out of service."""
        report = self._control.report()
        task = self._start(call, request, calls.drain(self._control, request, report))
        async with contextlib.aclosing(_followed(task, report)) as steps:
            async for progress, _ in steps:
                yield pb.DrainResponse(progress=progress)

    async def Undrain(self, request: pb.UndrainRequest, call: Call) -> pb.UndrainResponse:
        """Put the worker back into service."""
        return await self._run(call, request, calls.undrain(self._control, request))

    async def Pause(self, request: pb.PauseRequest, call: Call) -> pb.PauseResponse:
        """Stop the engine's steps."""
        return await self._run(call, request, calls.pause(self._control, request))

    async def Continue(self, request: pb.ContinueRequest, call: Call) -> pb.ContinueResponse:
        """Let the engine's steps go on."""
        return await self._run(call, request, calls.go_on(self._control, request))

    async def ReleaseMemory(
        self, request: pb.ReleaseMemoryRequest, call: Call
    ) -> AsyncIterator[pb.ReleaseMemoryResponse]:
        """Give memory back."""
        report = self._control.report()
        task = self._start(call, request, calls.release(self._control, request, report))
        async with contextlib.aclosing(_followed(task, report)) as steps:
            async for progress, result in steps:
                yield pb.ReleaseMemoryResponse(progress=progress, result=result)

    async def ResumeMemory(
        self, request: pb.ResumeMemoryRequest, call: Call
    ) -> pb.ResumeMemoryResponse:
        """Take memory again."""
        return await self._run(call, request, calls.resume(self._control, request))

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[pb.UpdateWeightsRequest], call: Call
    ) -> AsyncIterator[pb.UpdateWeightsResponse]:
        """Replace the model's weights."""
        start = await anext(request_iterator, None)
        report = self._control.report()
        task = self._start(
            call, start, calls.update(self._control, start, request_iterator, report)
        )
        async with contextlib.aclosing(_followed(task, report)) as steps:
            async for progress, result in steps:
                yield pb.UpdateWeightsResponse(progress=progress, result=result)

    async def FlushCache(self, request: pb.FlushCacheRequest, call: Call) -> pb.FlushCacheResponse:
        """Empty the prefix cache."""
        return await self._run(call, request, calls.flush(self._control, request))

    async def StartProfile(
        self, request: pb.StartProfileRequest, call: Call
    ) -> pb.StartProfileResponse:
        """Begin to record."""
        return await self._run(call, request, calls.start_profile(self._control, request))

    async def StopProfile(
        self, request: pb.StopProfileRequest, call: Call
    ) -> pb.StopProfileResponse:
        """End the recording."""
        return await self._run(call, request, calls.stop_profile(self._control, request))

    async def LoadLora(self, request: pb.LoadLoraRequest, call: Call) -> pb.LoadLoraResponse:
        """Load an adapter."""
        return await self._run(call, request, calls.load_lora(self._control, request))

    async def UnloadLora(self, request: pb.UnloadLoraRequest, call: Call) -> pb.UnloadLoraResponse:
        """Remove an adapter."""
        return await self._run(call, request, calls.unload_lora(self._control, request))

    async def ListLoras(self, request: pb.ListLorasRequest, call: Call) -> pb.ListLorasResponse:
        """List the adapters."""
        return await self._run(call, request, calls.list_loras(self._control, request))

    # ---- for all of them -------------------------------------------------------------------------

    def _start(self, call: Call, request: Any, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run an operation in a task that leaves a line in the log."""
        name = call.method.rpartition("/")[2]
        action = Action(
            operation=name,
            caller=caller(),
            arguments=messages.shown(request),
            changes=name not in _LOOKS,
        )
        return self._audit.start(action, work)

    async def _run(self, call: Call, request: Any, work: Coroutine[Any, Any, T]) -> T:
        """Run an operation without progress; if the caller goes away, tell it and don't wait."""
        task = self._start(call, request, work)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()  # no effect when it has ended
        return task.result()


async def _followed(
    task: asyncio.Task[T], report: Report
) -> AsyncGenerator[tuple[pb.OperationProgress, T | None], None]:
    """Yield an operation's progress while it runs, and at last its result."""
    task.add_done_callback(lambda _: report.changed.set())
    try:
        while not task.done():
            report.changed.clear()
            yield messages.progress_to_proto(report.progress()), None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPEAT_S):
                    await report.changed.wait()
        result = task.result()
    finally:
        task.cancel()  # no effect when it has ended
    report.enter(Stage.DONE)
    yield messages.progress_to_proto(report.progress()), result


def add_service(control: ControlCore, server: Any) -> None:
    """Add EngineControlService to a server."""
    engine_control_pb2_grpc.add_EngineControlServiceServicer_to_server(
        EngineControlServicer(control), server
    )
