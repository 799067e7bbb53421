"""Memory, pauses, the cache and profiles of the real engine; an engine that dies meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from millstream_server.control.operations import MemoryTag, PauseMode, ProfileActivity
from millstream_server.generation.output import FinishReason
from millstream_server.runtime.errors import (
    EngineBusyError,
    EngineFailedError,
    UnsupportedFeatureError,
    WorkerPausedError,
)
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_operations import ASKED, ask, end_all, start_running
from tests.support.engines.sglang_requests import (
    LONG,
    answer,
    generation,
    prompt,
    released,
    result,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    # An engine takes 10 s to start on a quiet machine and over a minute on a busy one.
    pytest.mark.timeout(420),
]


class TestMemory:
    """ReleaseMemory and ResumeMemory."""

    async def test_it_is_refused_while_requests_run(self, engine: EngineProcess) -> None:
        sinks = await start_running(engine)
        with pytest.raises(EngineBusyError, match="has 2 requests"):
            await engine.control("memory", "release_memory", [MemoryTag.KV_CACHE])
        await end_all(engine, sinks)

    @pytest.mark.parametrize("tags", [[MemoryTag.KV_CACHE], list(MemoryTag)])
    async def test_answers_are_the_same_afterwards(
        self, engine: EngineProcess, tags: list[MemoryTag]
    ) -> None:
        before, _ = await ask(engine)
        sinks = await start_running(engine)
        engine.abort_all()
        for sink in sinks:
            await result(sink)
        # At once: SGLang may not have let go of them yet.
        await engine.control("memory", "release_memory", tags)
        waiting = engine.submit(generation(ASKED))
        given_up = generation(ASKED)
        gone = engine.submit(given_up)
        load = await engine.load()  # answered behind it: it has reached the engine
        assert load.queued_requests == 2
        engine.abort(given_up.engine_id)
        assert (await result(gone)).reason is FinishReason.CANCELLED
        assert (await engine.inspect())["open_requests"] == 0
        for tag in reversed(tags):
            assert waiting.token_ids == []
            await engine.control("memory", "resume_memory", [tag])
        await result(waiting)
        assert waiting.token_ids == before

    async def test_memory_is_measured(self, engine: EngineProcess) -> None:
        use = await engine.control("memory", "memory_use")
        assert 50e6 < use.host_bytes < 20e9
        assert use.device_bytes == 0


class TestPause:
    """Pause and Continue."""

    @pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
    async def test_requests_go_on_afterwards(self, engine: EngineProcess, mode: PauseMode) -> None:
        request = generation(prompt(40), 150, ignore_eos=True)
        alone = (await answer(engine, request)).token_ids
        running = engine.submit(generation(prompt(40), 150, ignore_eos=True))
        await running.first_token()
        await engine.control("pause", "pause", mode)
        late = engine.submit(generation(ASKED))
        await engine.load()
        assert not late.token_ids
        await engine.control("pause", "go_on")
        await result(late)
        assert (await result(running)).completion_tokens == 150
        if mode is PauseMode.IN_PLACE:  # computed again, rounding may choose another token
            assert running.token_ids == alone
        await released(engine)

    async def test_requests_can_be_aborted_meanwhile(self, engine: EngineProcess) -> None:
        request = generation(prompt(40), LONG)
        running = engine.submit(request)
        await running.first_token()
        await engine.control("pause", "pause", PauseMode.IN_PLACE)
        late_request = generation(ASKED)
        late = engine.submit(late_request)
        engine.abort(request.engine_id)
        engine.abort(late_request.engine_id)
        assert (await result(running)).reason is FinishReason.CANCELLED
        assert (await result(late)).reason is FinishReason.CANCELLED
        with pytest.raises(EngineBusyError):
            await engine.control("cache", "flush_cache")
        await engine.control("pause", "go_on")
        await released(engine)

    async def test_abort_ends_them_with_the_reason(self, engine: EngineProcess) -> None:
        sinks = await start_running(engine, 4)
        queued = engine.submit(generation(ASKED))
        await engine.control("pause", "pause", PauseMode.ABORT)
        for sink in (*sinks, queued):
            with pytest.raises(WorkerPausedError):
                await result(sink)
        late = engine.submit(generation(ASKED))
        await engine.load()
        assert not late.token_ids
        await engine.control("pause", "go_on")
        assert (await result(late)).reason is not FinishReason.CANCELLED
        await released(engine)


class TestCacheAndProfile:
    """FlushCache, StartProfile and StopProfile."""

    async def test_a_flush_empties_the_cache(self, engine: EngineProcess) -> None:
        ids = prompt(64, start=300)
        for cached in (0, 63):
            assert (await result(engine.submit(generation(ids)))).cached_tokens == cached
        await engine.control("cache", "flush_cache")
        assert (await result(engine.submit(generation(ids)))).cached_tokens == 0

    async def test_a_flush_is_refused_while_requests_run(self, engine: EngineProcess) -> None:
        sinks = await start_running(engine)
        with pytest.raises(EngineBusyError, match="2 requests"):
            await engine.control("cache", "flush_cache")
        await end_all(engine, sinks)

    @pytest.mark.parametrize("steps", [0, 2])
    async def test_a_profile_is_recorded(
        self, engine: EngineProcess, tmp_path: Path, steps: int
    ) -> None:
        await engine.control("profile", "start_profile", tmp_path, [ProfileActivity.CPU], steps)
        await answer(engine, generation(ASKED, 6))
        await engine.control("profile", "stop_profile")
        assert _events(tmp_path)
        await engine.control("profile", "stop_profile")

    async def test_what_the_machine_lacks_is_refused(
        self, engine: EngineProcess, tmp_path: Path
    ) -> None:
        wanted = list(ProfileActivity)
        with pytest.raises(UnsupportedFeatureError, match="can't record gpu, memory"):
            await engine.control("profile", "start_profile", tmp_path, wanted, 0)


def _events(folder: Path) -> Any:
    """Read the one trace in a folder."""
    (file,) = folder.iterdir()
    with gzip.open(file) as opened:
        return json.load(opened)["traceEvents"]


async def test_an_operation_ends_when_the_engine_dies(model: Path, tmp_path: Path) -> None:
    engine = await EngineProcess.launch(tmp_path / "log", model_path=str(model))
    await engine.ready()
    scheduler, _ = (await engine.inspect())["pids"]
    os.kill(scheduler, signal.SIGSTOP)
    flush = asyncio.create_task(engine.control("cache", "flush_cache"))
    await engine.load()  # answered behind it: it has reached the engine
    os.kill(scheduler, signal.SIGKILL)
    with pytest.raises(EngineFailedError):
        await flush
    assert await engine.close() == 0
