"""The life of a diffusion worker: its info, canary, hangs, the engine's end, drain, telemetry."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import grpc
import pytest

from millstream.v1 import diffusion_pb2, diffusion_pb2_grpc, worker_pb2
from millstream_server.control.engine import Role
from millstream_server.diffusion.diffuser import DiffuserInfo
from millstream_server.diffusion.request import Kind
from millstream_server.diffusion.worker.engine import DiffusionOptions, narrowed
from millstream_server.engines.simulated.diffuser import SimulatedDiffuserConfig
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.lifecycle.main import DRAINED, FAILED
from millstream_server.worker_info import description_from_proto
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.telemetry.otlp_collector import collecting
from tests.support.telemetry.scraping import scrape
from tests.support.wire.long_streams import NOT_SERVING, SERVING
from tests.support.worker.diffusion_worker import (
    MODEL,
    SIZE,
    VIDEOS,
    Setup,
    SteppedDiffuser,
    Stream,
    Worker,
    diffusion_worker,
    streaming,
)
from tests.support.worker.hosted_worker import SOON


async def described(one: Worker) -> tuple[worker_pb2.WorkerInfo, DiffuserInfo]:
    info = (await one.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
    engine = description_from_proto(info).engine
    assert isinstance(engine, DiffuserInfo)
    return info, engine


async def test_it_says_what_it_makes_within_its_limits() -> None:
    options = DiffusionOptions(max_steps=9, max_pixels=8192, max_outputs=2, requests_at_once=3)
    async with diffusion_worker(Setup(options=options)) as one:
        info, engine = await described(one)
        assert (info.role, info.model) == (worker_pb2.WORKER_ROLE_DIFFUSION, MODEL)
        assert engine == one.hosted.info
        assert (engine.engine, engine.max_running_requests, engine.urls) == ("simulated", 3, False)
        assert (engine.max_steps, engine.max_pixels, engine.max_outputs) == (9, 8192, 2)
        assert (engine.default_width, engine.default_steps) == (SIZE, 4)
        assert engine.kinds == {Kind.IMAGE}
        assert engine.schedulers == ("simulated", "other")


async def test_a_worker_of_videos_says_so_and_one_without_a_model_info_makes_text() -> None:
    async with diffusion_worker(VIDEOS) as one:
        info, engine = await described(one)
        assert engine == one.hosted.info
        assert engine.kinds == {Kind.VIDEO}
        assert (engine.default_frames, engine.default_fps) == (9, 16)
        info.ClearField("diffusion_model")
        text = description_from_proto(info)
        assert text.role is Role.DIFFUSION
        assert not isinstance(text.engine, DiffuserInfo)
        info.diffusion_model.SetInParent()
        with pytest.raises(ValueError, match="neither images nor videos"):
            description_from_proto(info)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (DiffusionOptions(kind=Kind.VIDEO), "makes image, but the worker was started with --kind"),
        (DiffusionOptions(max_pixels=1000), "the default size, 64 x 64 = 4096 pixels, is above"),
        (DiffusionOptions(default_steps=60), "--default-steps 60 is above --max-steps 50"),
        (DiffusionOptions(default_width=24, default_height=32), "multiples of 16"),
    ],
)
async def test_limits_that_the_model_cannot_be_served_with_end_the_start(
    options: DiffusionOptions, says: str
) -> None:
    info = await SteppedDiffuser().start(lambda _: None)
    with pytest.raises(EngineFailedError, match=says):
        narrowed(info, options)


async def test_default_frames_are_cut_to_the_limit_and_the_rule() -> None:
    info = await SteppedDiffuser(VIDEOS.engine).start(lambda _: None)
    found = narrowed(info, replace(VIDEOS.options, max_frames=7))
    assert (found.max_frames, found.default_frames) == (7, 5)


async def test_its_load_is_what_runs_and_what_waits() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        for slot in range(3):
            await stream.start(slot)
        await until(lambda: stream.slots[2].positions == [2])
        load = (await one.about.WatchLoad(worker_pb2.WatchLoadRequest()).read()).load
        assert (load.running_requests, load.queued_requests) == (1, 2)


async def test_a_request_before_the_model_is_loaded_is_refused() -> None:
    port = free_port()

    async def early() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", SOON) as channel:
            await channel.channel_ready()
            stream = Stream(diffusion_pb2_grpc.DiffusionServiceStub(channel))
            stream.read_on()
            await stream.start(0)
            view = await stream.ended(0)
            assert view.reason == "UNAVAILABLE"
            assert "still loading" in view.message
            await stream.close()

    told = asyncio.ensure_future(early())
    setup = Setup(SimulatedDiffuserConfig(load_s=1.0))
    async with diffusion_worker(setup, listen=f"127.0.0.1:{port}"):
        await told


async def test_the_canary_runs_one_step_in_the_queue_while_nothing_else_does() -> None:
    async with diffusion_worker(canary_interval_s=0.1, canary_timeout_s=5) as one:
        warmed_up = one.engine.progress(0)
        await until(lambda: one.engine.progress(0) >= warmed_up + 2)
        assert not one.engine.jobs
        assert await one.conditions() == []


async def test_a_probe_waits_its_turn_and_is_no_request() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        await stream.start(0, steps=1)
        await one.until_load(1, 0)
        probe = asyncio.ensure_future(one.hosted.probe(0))
        await stream.start(1, steps=1)
        await until(lambda: stream.slots[1].positions == [2])
        await one.until_load(1, 1)
        one.engine.allow(2)
        await stream.finished(0)
        await until(lambda: stream.slots[1].positions == [2, 1])
        await one.until_load(0, 1)
        one.engine.allow(1)
        await probe
        given_up = asyncio.ensure_future(one.hosted.probe(0))
        await until(lambda: bool(stream.slots[1].steps))
        given_up.cancel()
        await asyncio.wait({given_up})
        one.engine.allow(2)
        await stream.finished(1)


async def test_a_hang_makes_it_not_serving_until_it_works_again() -> None:
    async with streaming(canary_interval_s=0.1, canary_timeout_s=0.3) as (one, stream):
        one.engine.wedge()
        await stream.start(0)
        await one.health.until(NOT_SERVING)
        assert await one.conditions() == ["stuck"]
        one.engine.unwedge()
        await one.health.until(SERVING)
        await stream.finished(0)


async def test_the_engines_end_fails_all_requests_and_the_worker() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        await stream.start(0)
        await stream.start(1)
        await until(lambda: stream.slots[1].positions == [1])
        one.engine.die()
        one.engine.allow(20)
        assert await asyncio.wait_for(one.code, 10) == FAILED
        await until(lambda: stream.slots[0].ended or stream.failed is not None)
        assert stream.slots[0].reason == "ENGINE_FAILED"
        assert stream.slots[1].ended or stream.failed is not None


async def test_told_to_stop_it_finishes_what_is_open_and_takes_no_more() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        await stream.start(0, steps=1)
        await stream.start(1, steps=1)
        await until(lambda: stream.slots[1].positions == [1])
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: stream.draining)

        async def refused() -> bool:
            late = Stream(one.stub)
            late.read_on()
            await late.start(0, steps=1)
            await until(lambda: late.slots[0].ended or bool(late.slots[0].positions))
            found = late.slots[0].error is not None  # else peers may not have heard yet
            assert not found or late.slots[0].reason == "WORKER_DRAINING"
            await late.close()
            return found

        await until(refused)
        one.engine.allow(4)
        await stream.finished(0)
        await stream.finished(1)
        await stream.call.done_writing()
        assert await asyncio.wait_for(one.code, 10) == DRAINED


async def test_its_requests_are_spans_and_its_numbers_are_scraped() -> None:
    trace = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    with collecting() as collector:
        port = free_port()
        changes: dict[str, Any] = {
            "otlp_endpoint": f"http://{collector.address}",
            "metrics_listen": f"127.0.0.1:{port}",
        }
        async with streaming(**changes) as (one, stream):
            before = await scrape(port)
            await stream.start(0, n=2, steps=3, trace=trace, request_id="mine")
            view = await stream.finished(0)
            await stream.start(1, steps=99)
            await stream.ended(1)
            await stream.start(2, format=diffusion_pb2.IMAGE_FORMAT_WEBP)
            await stream.finished(2)
            one.engine.by_hand()
            await stream.start(3)
            await one.until_load(1, 0)
            await stream.cancel(3)
            await stream.ended(3)
            after = await scrape(port)
            await stream.call.done_writing()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(one.code, 10) == DRAINED
        spans = [span for span in collector.spans if span.name == f"generate_image {MODEL}"]
    (traced,) = [span for span in spans if span.trace_id == "a" * 32]
    assert traced.parent_id == "b" * 16
    assert traced.attributes["millstream.request_id"] == "mine"
    assert traced.attributes["millstream.diffusion.steps"] == 6
    assert traced.attributes["millstream.diffusion.outputs"] == 2
    for stage in ("queue", "run", "write", "deliver"):
        assert traced.attributes[f"millstream.diffusion.{stage}_s"] >= 0
        counted = "millstream_diffusion_stage_duration_seconds_count"
        assert after.value(counted, stage=stage) > before.value(counted, stage=stage)
    assert sorted(span.failed for span in spans) == [False, False, True, True]

    def grown(name: str, **labels: str) -> float:
        return after.value(name, **labels) - _or_zero(before, name, **labels)

    assert grown("millstream_diffusion_steps_total") == 10
    assert grown("millstream_diffusion_step_duration_seconds_count") == 10
    assert grown("millstream_diffusion_files_total", media_type="image/png") == 2
    assert grown("millstream_diffusion_files_total", media_type="image/webp") == 1
    nbytes = sum(len(file) for file in view.files.values())
    assert grown("millstream_diffusion_file_bytes_total", media_type="image/png") == nbytes
    assert after.value("millstream_diffusion_queued_requests") == 0
    outcomes = "millstream_worker_stream_requests_total"
    for outcome, times in (("OK", 2), ("INVALID_REQUEST", 1), ("CANCELLED", 1)):
        assert grown(outcomes, role="diffusion", outcome=outcome) == times


def _or_zero(scraped: Any, name: str, **labels: str) -> float:
    try:
        return float(scraped.value(name, **labels))
    except ValueError:  # no such series yet
        return 0.0
