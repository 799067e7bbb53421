"""Drain, Undrain, Pause, Continue, FlushCache: a worker that is out of service for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from millstream.v1 import worker_pb2
from millstream_server.control.operations import NO_CONTROLS
from millstream_server.runtime.errors import EngineBusyError, UnsupportedFeatureError
from millstream_testing.waiting import until
from tests.support.telemetry.logged import events
from tests.support.wire.failures import failure, refusal
from tests.support.wire.long_streams import NOT_SERVING, SERVING
from tests.support.worker.controlled_worker import (
    DONE,
    DRAINING,
    ControlledWorker,
    controlled_worker,
    from_disk,
    pb,
)

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
SHORT = Duration(nanos=50_000_000)


async def _refused(one: ControlledWorker, slot: int = 7) -> None:
    """Start a request, which must be refused."""
    stream = await one.open_stream()
    await stream.start(slot, [5], max_new_tokens=1)
    (view,) = await stream.ended(slot)
    assert view.reason == "WORKER_PAUSED"
    assert view.error is not None
    assert view.error.retryable
    assert view.error.retry_delay.seconds == 1
    await stream.drain()


async def test_a_drain_keeps_streams_open_and_ends_when_no_request_is_open(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        about = one.about.WatchWorkerInfo(worker_pb2.WatchWorkerInfoRequest())
        assert (await about.read()).info.weight_version == "v1"
        stream, slot = await one.request()
        drained = one.drain()
        await one.health.until(NOT_SERVING)
        await drained.reached(DRAINING)
        await until(lambda: drained.progress[-1].open_requests == 1)
        state = await one.state()
        assert (state.drained, state.operation, state.open_requests) == (True, "Drain", 1)
        assert await one.conditions() == ["drained"]
        await stream.cancel(slot)
        await stream.ended(slot)
        await drained.ended()
        assert drained.stages[-2:] == [DRAINING, DONE]
        await _refused(one)
        undrain = await one.control.Undrain(pb.UndrainRequest())
        assert undrain.was_drained
        await one.health.until(SERVING)
        await stream.start(1, [5], max_new_tokens=1)  # the same stream goes on
        await one.until_open(1)
        await stream.cancel(1)
        await stream.drain()
        assert not any(frame.draining for frame in stream.frames)
        about.cancel()
        assert not (await one.control.Undrain(pb.UndrainRequest())).was_drained


async def test_until_routers_have_noticed_requests_are_accepted(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path, propagation_s=600.0) as one:
        drained = one.drain()
        await one.health.until(NOT_SERVING)
        stream, slot = await one.request()
        assert (await one.state()).open_requests == 1
        assert DONE not in drained.stages
        await stream.cancel(slot)
        await stream.ended(slot)


async def test_after_its_timeout_a_drained_worker_stays_out_of_service(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        stream, slot = await one.request()
        failed = await refusal(one.control.Drain(pb.DrainRequest(timeout=SHORT)))
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert failed.message.startswith("requests still open after 0.05 s: 1;")
        assert (await one.state()).drained
        again = one.drain()
        await again.reached(DRAINING)
        await stream.cancel(slot)
        await again.ended()


async def test_without_its_caller_a_drain_is_undone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with controlled_worker(tmp_path) as one:
        stream, slot = await one.request()
        first, second = one.drain(), one.drain()
        await first.reached(DRAINING)
        await second.reached(DRAINING)
        await first.cancel()
        await until(lambda: second.progress[-1].open_requests == 1)
        assert (await one.state()).drained, "the second one waits"
        await second.cancel()
        await one.health.until(SERVING)
        assert await one.conditions() == []
        third = one.drain()
        await third.reached(DRAINING)
        assert (await one.control.Undrain(pb.UndrainRequest())).was_drained
        await until(lambda: third.failed is not None)
        failed = failure(third.failed)
        assert (failed.code, failed.reason) == (PRECONDITION, "OPERATION_CONFLICT")
        assert "Undrain" in failed.message
        await stream.cancel(slot)
    lines = [line for line in events(caplog, "operator action") if line["operation"] == "Drain"]
    assert [(line["outcome"], line["caller_gone"]) for line in lines] == [
        ("undone", True),
        ("undone", True),
        ("OPERATION_CONFLICT", False),
    ]


async def test_a_paused_worker_is_out_of_service_until_it_continues(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        await one.request()
        paused = await one.control.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_RETRACT))
        assert (paused.was_paused, paused.open_requests) == (False, 1)
        assert one.script.calls == ["pause retract"]
        await one.health.until(NOT_SERVING)
        assert await one.conditions() == ["paused"]
        paused = await one.control.Pause(pb.PauseRequest())
        assert (paused.was_paused, paused.open_requests) == (True, 1)
        assert (await one.state()).paused
        failed = await refusal(one.control.ReleaseMemory(pb.ReleaseMemoryRequest()))
        assert (failed.code, failed.reason) == (PRECONDITION, "OPERATION_CONFLICT")
        assert "Continue" in failed.message
        assert (await one.control.Continue(pb.ContinueRequest())).was_paused
        assert not (await one.control.Continue(pb.ContinueRequest())).was_paused
        await one.health.until(SERVING)
        assert one.script.calls == ["pause retract", "go_on"]


async def test_a_pause_that_aborts_refuses_new_requests_at_once(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path, propagation_s=600.0) as one:
        await one.control.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT))
        await _refused(one)
        assert one.script.calls == ["pause abort"]


async def test_requests_that_a_pause_aborts_end_with_worker_paused(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path, scripted=False) as one:
        stream, slot = await one.request()
        await one.control.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT))
        (view,) = await stream.ended(slot)
        assert view.reason == "WORKER_PAUSED"
        assert view.error is not None
        assert view.error.retryable


async def test_a_pause_that_fails_leaves_the_worker_in_service(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        one.script.failures["pause"] = UnsupportedFeatureError("no such mode here")
        failed = await refusal(one.control.Pause(pb.PauseRequest()))
        assert (failed.code, failed.reason, failed.message) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "UNSUPPORTED_FEATURE",
            "no such mode here",
        )
        assert await one.conditions() == []
        bad = await refusal(one.control.Pause(pb.PauseRequest(mode=99)))
        assert (bad.reason, bad.fields) == ("INVALID_REQUEST", ("mode",))


async def test_a_flush_needs_an_idle_engine(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        await one.control.FlushCache(pb.FlushCacheRequest())
        stream, slot = await one.request()
        failed = await refusal(one.control.FlushCache(pb.FlushCacheRequest()))
        assert (failed.code, failed.reason) == (PRECONDITION, "ENGINE_BUSY")
        assert failed.message.startswith("requests are open: 1; set `drain`")
        request = pb.FlushCacheRequest(drain=True, timeout=SHORT)
        failed = await refusal(one.control.FlushCache(request))
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await one.conditions() == []
        assert one.script.calls == ["flush"]
        flushing = one.control.FlushCache(pb.FlushCacheRequest(drain=True))
        await one.out_for("flushing cache")
        await stream.cancel(slot)
        await flushing
        assert one.script.calls == ["flush", "flush"]
        assert await one.conditions() == []
        one.script.failures["flush"] = EngineBusyError("it has requests that nobody sees")
        failed = await refusal(one.control.FlushCache(pb.FlushCacheRequest()))
        assert failed.reason == "ENGINE_BUSY"


UNSUPPORTED: list[tuple[str, Any, str]] = [
    ("Pause", pb.PauseRequest(), "pause"),
    ("Continue", pb.ContinueRequest(), "pause"),
    ("ReleaseMemory", pb.ReleaseMemoryRequest(), "release memory"),
    ("ResumeMemory", pb.ResumeMemoryRequest(), "release memory"),
    ("FlushCache", pb.FlushCacheRequest(), "empty its prefix cache"),
    ("StartProfile", pb.StartProfileRequest(), "record profiles"),
    ("StopProfile", pb.StopProfileRequest(), "record profiles"),
    ("LoadLora", pb.LoadLoraRequest(name="a"), "load LoRA adapters"),
    ("UnloadLora", pb.UnloadLoraRequest(name="a"), "load LoRA adapters"),
    ("ListLoras", pb.ListLorasRequest(), "load LoRA adapters"),
    ("UpdateWeights", from_disk(Path("/x")), "replace its weights"),
]


async def test_what_the_engine_cannot_do_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path, controls=NO_CONTROLS) as one:
        assert (await one.state()).supported == ["Drain", "Undrain"]
        for method, request, what in UNSUPPORTED:
            given = iter(request) if isinstance(request, list) else request
            failed = await refusal(getattr(one.control, method)(given))
            assert (failed.code, failed.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "UNSUPPORTED_FEATURE",
            )
            assert failed.message.startswith(f"{method}: this worker's engine can't {what}")
    async with controlled_worker(tmp_path) as one:
        assert set((await one.state()).supported) == {"Drain", "Undrain"} | {
            method for method, *_ in UNSUPPORTED
        }
