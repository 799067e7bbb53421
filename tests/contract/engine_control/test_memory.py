"""ReleaseMemory and ResumeMemory; and what holds for every operation that needs an idle engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from millstream_server.runtime.errors import EngineBusyError, InternalError
from millstream_testing.waiting import until
from tests.support.telemetry.logged import events
from tests.support.wire.failures import failure, refusal
from tests.support.wire.long_streams import NOT_SERVING, SERVING
from tests.support.worker.controlled_worker import (
    APPLYING,
    DONE,
    DRAINING,
    HANGING,
    controlled_worker,
    pb,
)
from tests.support.worker.scripted_controls import LESS, USE

KV, WEIGHTS, GRAPH = (
    pb.MEMORY_TAG_KV_CACHE,
    pb.MEMORY_TAG_WEIGHTS,
    pb.MEMORY_TAG_CUDA_GRAPH,
)
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
SHORT = Duration(nanos=50_000_000)


async def test_memory_is_released_once_no_request_is_open_and_taken_again(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        stream, slot = await one.request()
        released = one.release()
        await one.health.until(NOT_SERVING)
        await released.reached(DRAINING)
        assert await one.conditions() == ["memory released"]
        assert one.script.calls == []
        await stream.cancel(slot)
        await released.ended()
        assert released.stages[-3:] == [DRAINING, APPLYING, DONE]
        assert one.script.calls == ["release cuda_graph kv_cache weights"]
        assert one.script.open_at == {"release": 0}
        result = released.result
        assert (list(result.released), list(result.already_released)) == ([1, 2, 3], [])
        assert (result.before.host_bytes, result.before.device_bytes) == (
            USE.host_bytes,
            USE.device_bytes,
        )
        assert result.after.host_bytes == LESS.host_bytes
        assert list((await one.state()).released) == [1, 2, 3]

        again = one.release(KV)
        await again.ended()
        assert list(again.result.already_released) == [KV]
        assert again.result.before == again.result.after
        assert len(one.script.calls) == 1

        part = await one.control.ResumeMemory(pb.ResumeMemoryRequest(tags=[WEIGHTS]))
        assert (list(part.resumed), list(part.released)) == ([WEIGHTS], [KV, GRAPH])
        assert one.health.told[-1] == NOT_SERVING
        rest = await one.control.ResumeMemory(pb.ResumeMemoryRequest())
        assert (list(rest.resumed), list(rest.released)) == ([KV, GRAPH], [])
        assert rest.after.host_bytes == USE.host_bytes
        await one.health.until(SERVING)
        none = await one.control.ResumeMemory(pb.ResumeMemoryRequest())
        assert list(none.resumed) == []
        assert one.script.calls[1:] == ["resume weights", "resume cuda_graph kv_cache"]


async def test_the_canarys_probe_is_over_before_the_engine_is_changed(tmp_path: Path) -> None:
    quick = replace(HANGING, step_s=0.001)
    times: dict[str, Any] = {"canary_interval_s": 0.05, "canary_timeout_s": 100.0}
    async with controlled_worker(tmp_path, config=quick, **times) as one:
        one.engine.wedge()

        async def probed() -> bool:
            return (await one.engine.load()).running_requests == 1

        await until(probed)
        released = one.release()
        await released.reached(DRAINING)
        await until(lambda: one.health.told[-1] == NOT_SERVING)
        assert one.script.calls == []
        one.engine.unwedge()
        await released.ended()
        assert one.script.open_at == {"release": 0}


async def test_released_parts_are_not_released_twice(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        await one.release(KV).ended()
        both = one.release(KV, WEIGHTS)
        await both.ended()
        assert list(both.result.already_released) == [KV]
        assert one.script.calls == ["release kv_cache", "release weights"]
        bad = await refusal(one.control.ReleaseMemory(pb.ReleaseMemoryRequest(tags=[0])))
        assert (bad.code, bad.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("tags[0]",))
        paused = await refusal(one.control.Pause(pb.PauseRequest()))
        assert "ResumeMemory first" in paused.message


async def test_requests_that_do_not_end_leave_all_as_it_was(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        await one.request()
        failed = await refusal(one.control.ReleaseMemory(pb.ReleaseMemoryRequest(timeout=SHORT)))
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "give a longer timeout" in failed.message
        assert one.script.calls == []
        assert await one.conditions() == []
        negative = pb.ReleaseMemoryRequest(timeout=Duration(seconds=-1))
        assert (await refusal(one.control.ReleaseMemory(negative))).fields == ("timeout",)


async def test_a_caller_who_goes_away_before_the_change_undoes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with controlled_worker(tmp_path) as one:
        await one.request()
        released = one.release()
        await released.reached(DRAINING)
        await released.cancel()
        await one.health.until(SERVING)
        assert (one.script.calls, await one.conditions()) == ([], [])
        await until(lambda: bool(events(caplog, "operator action")))
        (line,) = events(caplog, "operator action")
        assert (line["outcome"], line["caller_gone"]) == ("undone", True)


async def test_a_change_is_finished_without_its_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with controlled_worker(tmp_path) as one:
        held = one.script.hold("release")
        released = one.release()
        await until(lambda: bool(one.script.calls))
        await released.cancel()
        state = await one.state()
        assert (state.operation, list(state.released)) == ("ReleaseMemory", [])
        conflict = await refusal(one.control.FlushCache(pb.FlushCacheRequest()))
        assert (conflict.code, conflict.reason) == (PRECONDITION, "OPERATION_CONFLICT")
        assert conflict.message.startswith("ReleaseMemory runs on this worker's engine")
        held.set()

        async def done() -> bool:
            return list((await one.state()).released) == [1, 2, 3]

        await until(done)
        assert await one.conditions() == ["memory released"]
        (line,) = [
            e for e in events(caplog, "operator action") if e["operation"] == "ReleaseMemory"
        ]
        assert (line["outcome"], line["caller_gone"]) == ("done", True)


async def test_an_engine_that_refuses_serves_on_and_one_that_fails_does_not(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        one.script.failures["release"] = EngineBusyError("it isn't idle")
        failed = one.release()
        await until(lambda: failed.failed is not None)
        assert failure(failed.failed).reason == "ENGINE_BUSY"
        assert await one.conditions() == []
        one.script.failures["release"] = InternalError("half of it is gone")
        failed = one.release()
        await until(lambda: failed.failed is not None)
        assert failure(failed.failed).code is grpc.StatusCode.INTERNAL
        assert await one.conditions() == ["memory released"]
        one.script.failures["resume"] = InternalError("no")
        await refusal(one.control.ResumeMemory(pb.ResumeMemoryRequest()))
        assert await one.conditions() == ["memory released"]
        one.script.failures.clear()
        await one.control.ResumeMemory(pb.ResumeMemoryRequest())
        assert await one.conditions() == []


async def test_memory_may_be_released_on_a_drained_worker_which_stays_drained(
    tmp_path: Path,
) -> None:
    async with controlled_worker(tmp_path) as one:
        await one.drain().ended()
        await one.release(KV).ended()
        assert await one.conditions() == ["drained", "memory released"]
        await one.control.ResumeMemory(pb.ResumeMemoryRequest())
        assert await one.conditions() == ["drained"]
        await one.control.Undrain(pb.UndrainRequest())
        await one.health.until(SERVING)
