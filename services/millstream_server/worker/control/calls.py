"""What each RPC of EngineControlService does: request, operation, response.

The servicer runs each in a task that the audit logs: also a request that can't be converted leaves
a line there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from millstream.v1 import engine_control_pb2 as pb
from millstream_server.protobuf import engine_control as convert
from millstream_server.worker.control import messages
from millstream_server.worker.control.core import ControlCore
from millstream_server.worker.control.operations import Report


async def get_engine_state(
    control: ControlCore, _request: pb.GetEngineStateRequest
) -> pb.GetEngineStateResponse:
    """Return what operations have set."""
    return pb.GetEngineStateResponse(state=messages.state_to_proto(control.state()))


# ---- in and out of service -----------------------------------------------------------------------


async def drain(control: ControlCore, request: pb.DrainRequest, report: Report) -> None:
    """Take the worker out of service."""
    await control.drain.drain(report, convert.timeout_from_proto(request))


async def undrain(control: ControlCore, _request: pb.UndrainRequest) -> pb.UndrainResponse:
    """Put the worker back into service."""
    return pb.UndrainResponse(was_drained=control.drain.undrain())


async def pause(control: ControlCore, request: pb.PauseRequest) -> pb.PauseResponse:
    """Stop the engine's steps."""
    paused = await control.pause.pause(convert.mode_from_proto(request.mode))
    return pb.PauseResponse(was_paused=paused.was_paused, open_requests=paused.open_requests)


async def go_on(control: ControlCore, _request: pb.ContinueRequest) -> pb.ContinueResponse:
    """Let the engine's steps go on."""
    return pb.ContinueResponse(was_paused=await control.pause.go_on())


# ---- memory, weights, cache ----------------------------------------------------------------------


async def release(
    control: ControlCore, request: pb.ReleaseMemoryRequest, report: Report
) -> pb.MemoryReleased:
    """Give memory back."""
    tags = convert.tags_from_proto(request.tags)
    timeout_s = convert.timeout_from_proto(request)
    return messages.released_to_proto(await control.memory.release(report, tags, timeout_s))


async def resume(control: ControlCore, request: pb.ResumeMemoryRequest) -> pb.ResumeMemoryResponse:
    """Take memory again."""
    tags = convert.tags_from_proto(request.tags)
    return messages.resumed_to_proto(await control.memory.resume(tags))


async def update(
    control: ControlCore,
    start: pb.UpdateWeightsRequest | None,
    requests: AsyncIterator[pb.UpdateWeightsRequest],
    report: Report,
) -> pb.WeightsUpdated:
    """Replace the weights; ``start`` is the first message, ``requests`` are the others."""
    asked = messages.update_from_proto(start, requests)
    return messages.updated_to_proto(await control.weights.update(report, asked))


async def flush(control: ControlCore, request: pb.FlushCacheRequest) -> pb.FlushCacheResponse:
    """Empty the prefix cache."""
    timeout_s = convert.timeout_from_proto(request)
    await control.cache.flush(drain=request.drain, timeout_s=timeout_s)
    return pb.FlushCacheResponse()


# ---- profiles, adapters --------------------------------------------------------------------------


async def start_profile(
    control: ControlCore, request: pb.StartProfileRequest
) -> pb.StartProfileResponse:
    """Begin to record."""
    activities = convert.activities_from_proto(request.activities)
    directory = await control.profile.start(activities, request.steps)
    return pb.StartProfileResponse(directory=str(directory))


async def stop_profile(
    control: ControlCore, _request: pb.StopProfileRequest
) -> pb.StopProfileResponse:
    """End the recording."""
    return pb.StopProfileResponse(
        files=[
            pb.ProfileFile(path=str(file.path), bytes=file.nbytes)
            for file in await control.profile.stop()
        ]
    )


async def load_lora(control: ControlCore, request: pb.LoadLoraRequest) -> pb.LoadLoraResponse:
    """Load an adapter."""
    adapter = await control.adapters.load(request.name, request.path)
    return pb.LoadLoraResponse(adapter=convert.adapter_to_proto(adapter))


async def unload_lora(control: ControlCore, request: pb.UnloadLoraRequest) -> pb.UnloadLoraResponse:
    """Remove an adapter."""
    await control.adapters.unload(request.name)
    return pb.UnloadLoraResponse()


async def list_loras(control: ControlCore, _request: pb.ListLorasRequest) -> pb.ListLorasResponse:
    """List the adapters."""
    adapters = map(convert.adapter_to_proto, control.adapters.listed())
    return pb.ListLorasResponse(adapters=adapters)
