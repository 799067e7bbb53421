"""What operators may load from where, and for how long a change keeps the canary away."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.v1 import engine_control_pb2 as pb
from millstream_server.control.engine import Role
from millstream_server.control.operations import MemoryTag, NamedTensor
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.runtime.errors import DeadlinePassedError, InvalidRequestError
from millstream_server.runtime.lifecycle.conditions import HealthConditions
from millstream_server.runtime.settings.load import load
from millstream_server.worker.control import weights, wire
from millstream_server.worker.control.core import ControlCore
from millstream_server.worker.control.plan import ControlSettings
from millstream_server.worker.control.weights import Piece, Received, TensorsInCall
from millstream_server.worker.host import WorkerHost
from millstream_testing.in_process import ALPHABET, plan_of
from millstream_testing.waiting import until
from tests.support.worker.scripted_controls import ScriptedControls


async def _allowed(settings: ControlSettings, model: Path | None, asked: Path) -> bool:
    try:
        await settings.plan(model).directories.resolve("path", str(asked))
    except InvalidRequestError:
        return False
    return True


async def test_without_a_setting_the_models_neighbours_are_allowed(tmp_path: Path) -> None:
    model = tmp_path / "models" / "a"
    settings = ControlSettings()
    assert await _allowed(settings, model, tmp_path / "models" / "b")
    assert not await _allowed(settings, model, tmp_path / "other")
    assert not await _allowed(settings, None, tmp_path)
    # A model in the root directory, as in a container: not the whole machine.
    assert await _allowed(settings, Path("/model-xyz"), Path("/model-xyz/adapter"))
    assert not await _allowed(settings, Path("/model-xyz"), Path("/etc"))


async def test_directories_of_a_flag_allow_no_others_but_the_models_own(tmp_path: Path) -> None:
    flags = ["--weights-dirs", f"{tmp_path / 'a'},{tmp_path / 'b'}"]
    settings = load(ControlSettings, flags, {}, prog="p", description="")
    asked = (("a/step-200", True), ("b/step-200", True), ("c/step-200", False), ("c/model", True))
    for path, allowed in asked:
        assert await _allowed(settings, tmp_path / "c" / "model", tmp_path / path) is allowed


async def test_a_change_keeps_the_canary_away_for_a_limited_time() -> None:
    engine = SimulatedEngine(ALPHABET)
    plan = plan_of(engine, Role.AGGREGATED)
    script = ScriptedControls(engine)
    control_plan = replace(
        plan.control, controls=lambda: script.all_of_them, operation_limit_s=0.05
    )
    host = WorkerHost(replace(plan, control=control_plan))
    host.ready(await engine.start(lambda _: None))
    control = ControlCore(host, HealthConditions(lambda _: None), 0.0)
    assert not host.silence.expected()
    held = script.hold("release")
    releasing = asyncio.ensure_future(
        control.memory.release(control.report(), [MemoryTag.KV_CACHE], None)
    )
    await until(lambda: bool(script.calls))
    await until(lambda: not host.silence.expected())
    assert not releasing.done()
    held.set()
    await releasing
    assert host.silence.expected(), "released, for as long as the operator wants"
    await control.memory.resume([])
    assert not host.silence.expected()
    await engine.close()


async def test_a_caller_who_sends_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent() -> AsyncIterator[NamedTensor | Piece]:
        yield NamedTensor("w", TensorSpec(ElementType.FLOAT16, (2,)))
        await asyncio.Event().wait()

    monkeypatch.setattr(weights, "_SILENCE_S", 0.01)
    told: list[tuple[int, int]] = []
    received = Received(100, lambda done, total: told.append((done, total)))
    with pytest.raises(DeadlinePassedError, match=r"no message came for 0\.01 s"):
        await received.all_of(TensorsInCall(silent(), 4))
    assert told == [(0, 4)]


async def test_a_tensor_takes_memory_only_as_its_bytes_come() -> None:
    nbytes = 1 << 30
    peaks: list[int] = []

    async def parts() -> AsyncIterator[NamedTensor | Piece]:
        yield NamedTensor("w", TensorSpec(ElementType.FLOAT16, (nbytes // 2,)))
        yield Piece(0, bytes(1000))
        peaks.append(tracemalloc.get_traced_memory()[1])

    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=f"w has {nbytes} bytes; only 1000 came"):
            await Received(nbytes, lambda _done, _total: None).all_of(TensorsInCall(parts()))
    finally:
        tracemalloc.stop()
    assert peaks[0] < 1 << 20


def test_a_list_of_a_million_tags_is_neither_read_nor_logged() -> None:
    request = pb.ReleaseMemoryRequest(tags=[pb.MEMORY_TAG_WEIGHTS] * 1_000_000)
    with pytest.raises(InvalidRequestError, match="1000000 values; 64 are allowed"):
        wire.tags_from_proto(request.tags)
    assert wire.shown(request) == {"tags": ",".join(["MEMORY_TAG_WEIGHTS"] * 16)}
