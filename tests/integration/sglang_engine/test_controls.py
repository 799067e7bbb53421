"""Operators' operations on the real engine, and what would end it if it got there."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from millstream_server.control.memory import MemoryTag
from millstream_server.control.pause import PauseMode
from millstream_server.control.profile import ProfileActivity
from millstream_server.control.weights import (
    BroadcastWeights,
    DiskWeights,
    IpcWeights,
    NamedTensor,
    TensorWeights,
    WeightSource,
)
from millstream_server.generation.output import CollectingSink, FinishReason
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.runtime.errors import (
    EngineBusyError,
    EngineFailedError,
    InvalidWeightsError,
    UnsupportedFeatureError,
    WorkerPausedError,
)
from tests.support import forked
from tests.support.checkpoints import changed, save, weights_of
from tests.support.engine_process import EngineProcess
from tests.support.fork_server import PRELOAD_VARIABLE
from tests.support.ports import free_port
from tests.support.sglang_requests import (
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

_ASKED = prompt(20)
_Q = "model.layers.0.self_attn.q_proj.weight"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    engine = await EngineProcess.launch(
        tmp_path_factory.mktemp("controls") / "log", model_path=str(model), max_running_requests=4
    )
    await engine.ready()
    yield engine
    assert await engine.close() == 0


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("versions")
    return {
        "base": model,
        "A": save(model, folder / "A", changed(model, 1)),
        "B": save(model, folder / "B", changed(model, 2), shards=3),
    }


async def _tokens(engine: EngineProcess) -> tuple[list[int], str]:
    sink = engine.submit(generation(_ASKED))
    finish = await result(sink)
    return sink.token_ids, finish.weight_version


async def _update(engine: EngineProcess, source: WeightSource, version: str) -> None:
    await engine.control("weights", "check_weights", source)
    await engine.control("weights", "update_weights", source, version)


async def _running(engine: EngineProcess, count: int = 2) -> list[CollectingSink]:
    sinks = [engine.submit(generation(prompt(40, start=n), LONG)) for n in range(count)]
    for sink in sinks:
        await sink.first_token()
    return sinks


async def _end(engine: EngineProcess, sinks: Sequence[CollectingSink]) -> None:
    engine.abort_all()
    for sink in sinks:
        assert (await result(sink)).reason is FinishReason.CANCELLED
    await released(engine)


class TestMemory:
    """ReleaseMemory and ResumeMemory."""

    async def test_it_is_refused_while_requests_run(self, engine: EngineProcess) -> None:
        sinks = await _running(engine)
        with pytest.raises(EngineBusyError, match="has 2 requests"):
            await engine.control("memory", "release_memory", [MemoryTag.KV_CACHE])
        await _end(engine, sinks)

    @pytest.mark.parametrize("tags", [[MemoryTag.KV_CACHE], list(MemoryTag)])
    async def test_answers_are_the_same_afterwards(
        self, engine: EngineProcess, tags: list[MemoryTag]
    ) -> None:
        before, _ = await _tokens(engine)
        sinks = await _running(engine)
        engine.abort_all()
        for sink in sinks:
            await result(sink)
        # At once: SGLang may not have let go of them yet.
        await engine.control("memory", "release_memory", tags)
        waiting = engine.submit(generation(_ASKED))
        given_up = generation(_ASKED)
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
        late = engine.submit(generation(_ASKED))
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
        late_request = generation(_ASKED)
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
        sinks = await _running(engine, 4)
        queued = engine.submit(generation(_ASKED))
        await engine.control("pause", "pause", PauseMode.ABORT)
        for sink in (*sinks, queued):
            with pytest.raises(WorkerPausedError):
                await result(sink)
        late = engine.submit(generation(_ASKED))
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
        sinks = await _running(engine)
        with pytest.raises(EngineBusyError, match="2 requests"):
            await engine.control("cache", "flush_cache")
        await _end(engine, sinks)

    @pytest.mark.parametrize("steps", [0, 2])
    async def test_a_profile_is_recorded(
        self, engine: EngineProcess, tmp_path: Path, steps: int
    ) -> None:
        await engine.control("profile", "start_profile", tmp_path, [ProfileActivity.CPU], steps)
        await answer(engine, generation(_ASKED, 6))
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


def _broken(kind: str, folder: Path, model: Path) -> Path:
    weights: dict[str, Any] = changed(model, 1)
    if kind == "missing":
        return folder / "none"
    if kind == "other shape":
        weights[_Q] = weights[_Q][:32]
    elif kind == "other names":
        weights["model.other"] = weights.pop(_Q)
    path = save(model, folder / "broken", weights)
    file = path / "model.safetensors"
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "bin":
        file.rename(path / "pytorch_model.bin")
    return path


def _named(weights: dict[str, Any], *names: str) -> TensorWeights:
    return TensorWeights([(_spec(weights, name), weights[name].tobytes()) for name in names])


def _spec(weights: dict[str, Any], name: str) -> NamedTensor:
    return NamedTensor(name, TensorSpec(ElementType.FLOAT32, weights[name].shape))


class TestWeights:
    """UpdateWeights."""

    async def test_each_answer_is_of_the_version_that_it_names(
        self, engine: EngineProcess, versions: dict[str, Path]
    ) -> None:
        seen = {}
        for version in ("A", "B", "base"):
            await _update(engine, DiskWeights(versions[version]), version)
            seen[version] = await _tokens(engine)
            assert seen[version][1] == version
        assert len({tuple(tokens) for tokens, _ in seen.values()}) == 3
        # Under load, as a worker does it: requests of the new version wait at the engine.
        update = asyncio.create_task(
            engine.control("weights", "update_weights", DiskWeights(versions["A"]), "A")
        )
        await asyncio.sleep(0)  # it is sent first
        sinks = [engine.submit(generation(_ASKED)) for _ in range(6)]
        await update
        for sink in sinks:
            finish = await result(sink)
            assert sink.token_ids == seen[finish.weight_version][0]
        assert await _tokens(engine) == seen["A"]

    async def test_it_is_refused_while_requests_run(
        self, engine: EngineProcess, versions: dict[str, Path]
    ) -> None:
        before = await _tokens(engine)
        sinks = await _running(engine)
        with pytest.raises(EngineBusyError):
            await engine.control("weights", "update_weights", DiskWeights(versions["B"]), "B")
        await _end(engine, sinks)
        assert await _tokens(engine) == before

    @pytest.mark.parametrize(
        ("kind", "why"),
        [
            ("missing", "no directory"),
            ("truncated", "cut off"),
            ("other shape", r"shape \[32, 64\]"),
            ("other names", "lacks 1 of"),
            ("bin", "save them as safetensors"),
        ],
    )
    async def test_a_broken_checkpoint_leaves_the_old_one(
        self, engine: EngineProcess, model: Path, tmp_path: Path, kind: str, why: str
    ) -> None:
        before = await _tokens(engine)
        broken = DiskWeights(_broken(kind, tmp_path, model))
        for call in (("check_weights", broken), ("update_weights", broken, "broken")):
            with pytest.raises(InvalidWeightsError, match=why):
                await engine.control("weights", *call)
            assert await _tokens(engine) == before

    async def test_tensors_replace_those_of_their_names(
        self, engine: EngineProcess, versions: dict[str, Path], tmp_path: Path
    ) -> None:
        base, other = weights_of(versions["base"]), weights_of(versions["B"])
        mixed = save(versions["base"], tmp_path / "mixed", {**base, _Q: other[_Q]})
        await _update(engine, DiskWeights(mixed), "mixed")
        wanted, _ = await _tokens(engine)
        await _update(engine, DiskWeights(versions["base"]), "base")
        assert (await _tokens(engine))[0] != wanted
        await _update(engine, _named(other, _Q), "tensors")
        assert await _tokens(engine) == (wanted, "tensors")
        await _update(engine, DiskWeights(versions["A"]), "A")

    @pytest.mark.parametrize(
        ("spoil", "why"),
        [
            (lambda tensor, data: [(tensor, data[:-4])], "needs 16,384"),
            (lambda tensor, data: [(tensor, data)] * 2, "twice"),
            (lambda *_: [], "no tensors"),
            (
                lambda _, data: [(NamedTensor("x", TensorSpec(ElementType.FLOAT32, (64,))), data)],
                "no tensor 'x'",
            ),
            (
                lambda t, data: [
                    (NamedTensor(t.name, TensorSpec(ElementType.FLOAT32, (4,))), data)
                ],
                r"shape \[4\]",
            ),
        ],
    )
    async def test_wrong_tensors_are_refused(
        self,
        engine: EngineProcess,
        versions: dict[str, Path],
        spoil: Callable[..., Any],
        why: str,
    ) -> None:
        ((tensor, data),) = _named(weights_of(versions["B"]), _Q).tensors
        with pytest.raises(InvalidWeightsError, match=why):
            await engine.control("weights", "check_weights", TensorWeights(spoil(tensor, data)))

    async def test_a_trainer_broadcasts(
        self, engine: EngineProcess, versions: dict[str, Path], tmp_path: Path
    ) -> None:
        names = sorted(weights_of(versions["base"]))
        await _update(engine, DiskWeights(versions["B"]), "B")
        wanted, _ = await _tokens(engine)
        await _update(engine, DiskWeights(versions["base"]), "base")
        whole = save(versions["base"], tmp_path / "whole", changed(versions["base"], 2))
        source, trainer = await _trainer(whole / "model.safetensors", names)
        await _update(engine, source, "trained")
        assert (await trainer).returncode == 0
        assert await _tokens(engine) == (wanted, "trained")

    async def test_a_trainer_that_dies_leaves_the_old_weights(
        self, engine: EngineProcess, versions: dict[str, Path]
    ) -> None:
        before = await _tokens(engine)
        source, trainer = await _trainer(versions["A"] / "model.safetensors", [_Q], "die")
        with pytest.raises(InvalidWeightsError, match="the old ones are in place"):
            await _update(engine, source, "trained")
        assert (await trainer).returncode == 3
        assert await _tokens(engine) == before

    async def test_sources_that_cannot_work_are_refused(self, engine: EngineProcess) -> None:
        one = [NamedTensor(_Q, TensorSpec(ElementType.FLOAT32, (64, 64)))]
        right = BroadcastWeights(
            master_address="127.0.0.1:1",
            rank_offset=1,
            world_size=2,
            group_name="g",
            backend="gloo",
            tensors=one,
        )
        refused: list[tuple[WeightSource, type[Exception], str]] = [
            (IpcWeights(), UnsupportedFeatureError, "runs on a CPU"),
            (
                replace(right, backend="nccl"),
                UnsupportedFeatureError,
                "must be 'gloo', not 'nccl'",
            ),
            (replace(right, world_size=1), InvalidWeightsError, "don't fit behind"),
            (replace(right, master_address="x"), InvalidWeightsError, "isn't HOST:PORT"),
            (right, InvalidWeightsError, "Nobody listens at 127.0.0.1:1"),
        ]
        for source, error, why in refused:
            with pytest.raises(error, match=why):
                await engine.control("weights", "check_weights", source)


async def _trainer(file: Path, names: list[str], *options: str) -> tuple[BroadcastWeights, Any]:
    """Start a trainer; return what to update from, and the future of its end."""
    port, weights = free_port(), weights_of(file.parent)
    arguments = (str(port), "trainer", str(file), ",".join(names), *options)
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(
        None, lambda: forked.run("sglang", "tests.support.trainer", *arguments)
    )
    source = BroadcastWeights(
        master_address=f"127.0.0.1:{port}",
        rank_offset=1,
        world_size=2,
        group_name="trainer",
        backend="gloo",
        tensors=[_spec(weights, name) for name in names],
    )
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return source, ended


async def test_an_update_that_fails_half_way_is_undone_or_ends_the_engine(
    model: Path, versions: dict[str, Path], tmp_path: Path
) -> None:
    engine = await EngineProcess.launch(
        tmp_path / "log",
        model_path=str(model),
        env={PRELOAD_VARIABLE: "tests.support.half_loaded"},
    )
    await engine.ready()
    fails = DiskWeights(save(model, tmp_path / "fails", changed(model, 3)))
    await _update(engine, DiskWeights(versions["A"]), "A")
    before = await _tokens(engine)
    with pytest.raises(InvalidWeightsError, match="the old ones are in place"):
        await _update(engine, fails, "fails")
    assert await _tokens(engine) == before
    # Weights that came from a trainer are in no file: nothing can undo the failure.
    await _update(engine, _named(weights_of(versions["B"]), _Q), "tensors")
    with pytest.raises(EngineFailedError, match="can't be restored"):
        await _update(engine, fails, "fails")
    await engine.engine_failed.wait()
    with pytest.raises(EngineFailedError):
        await _tokens(engine)
    assert await engine.close() == 0


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
