"""SIGTERM while an operator has a worker in his hands: it ends in order all the same."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import pytest

from millstream_server.runtime.lifecycle.main import CUT_OFF, DRAINED
from millstream_testing.waiting import until
from tests.support.telemetry.logged import events
from tests.support.wire.failures import failure, refusal
from tests.support.worker.controlled_worker import (
    APPLYING,
    DRAINING,
    controlled_worker,
    from_disk,
    pb,
)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_an_operation_that_has_changed_nothing_ends_and_requests_are_finished(
    tmp_path: Path,
) -> None:
    async with controlled_worker(tmp_path) as one:
        stream, slot = await one.request()
        update = one.update(from_disk(tmp_path / "weights"))
        await update.reached(DRAINING)
        _terminate()
        await until(lambda: update.failed is not None)
        failed = failure(update.failed)
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_DRAINING")
        assert "nothing was changed" in failed.message
        late = await refusal(one.control.Pause(pb.PauseRequest()))
        assert late.reason == "WORKER_DRAINING"
        assert not one.code.done()
        await stream.cancel(slot)
        await stream.ended(slot)
        await stream.drain()
        assert any(frame.draining for frame in stream.frames)
        assert await asyncio.wait_for(one.code, 10) == DRAINED
        assert one.script.calls == ["check DiskWeights"]


async def test_a_change_is_finished_before_the_engine_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with controlled_worker(tmp_path) as one:
        held = one.script.hold("update")
        update = one.update(from_disk(tmp_path / "weights"))
        await update.reached(APPLYING)
        _terminate()
        await one.out_for("updating weights", "draining")
        assert not one.code.done()
        held.set()
        assert await asyncio.wait_for(one.code, 10) == DRAINED
    (line,) = (e for e in events(caplog, "operator action") if e["operation"] == "UpdateWeights")
    assert line["outcome"] == "done"


async def test_a_change_that_does_not_end_is_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with controlled_worker(tmp_path, drain_s=0.1) as one:
        one.script.hold("release")
        await one.release().reached(APPLYING)
        _terminate()
        assert await asyncio.wait_for(one.code, 10) == CUT_OFF
    (line,) = (e for e in events(caplog, "operator action") if e["operation"] == "ReleaseMemory")
    assert line["outcome"] == "UNAVAILABLE"


async def test_a_paused_engine_goes_on_so_that_its_requests_can_end(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        stream, slot = await one.request()
        await one.control.Pause(pb.PauseRequest())
        _terminate()
        await until(lambda: one.script.calls == ["pause in_place", "go_on"])
        await stream.cancel(slot)
        await stream.ended(slot)
        await stream.drain()
        assert await asyncio.wait_for(one.code, 10) == DRAINED


async def test_requests_that_stay_paused_do_not_keep_it_longer_than_the_drain(
    tmp_path: Path,
) -> None:
    async with controlled_worker(tmp_path, drain_s=0.2) as one:
        await one.request()
        await one.control.Pause(pb.PauseRequest())
        one.script.failures["go_on"] = RuntimeError("it hangs")
        _terminate()
        assert await asyncio.wait_for(one.code, 10) == CUT_OFF


async def test_a_worker_out_of_service_exits_at_once(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        await one.drain().ended()
        await one.release().ended()
        _terminate()
        assert await asyncio.wait_for(one.code, 10) == DRAINED
