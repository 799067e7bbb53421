"""Counts of a worker's requests stay right when something fails."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.worker.core import GenerationWorker
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_server.runtime.telemetry.counts import RequestCounts
from millstream_server.runtime.telemetry.metrics import STREAM_REQUESTS_OPEN
from millstream_testing.in_process import hosted

START = GenerationRequest(request_id="r", prompt=Prompt([1]), sampling=Sampling(max_new_tokens=4))
DONE = Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=4)


class Sink:
    def __init__(self) -> None:
        self.ends: list[Finish | ServingError] = []

    def emit(self, *_: Any) -> None:
        """Take tokens."""

    def finish(self, finish: Finish) -> None:
        self.ends.append(finish)

    def fail(self, error: ServingError) -> None:
        self.ends.append(error)


class Engine:
    """Takes requests; raises if the test says so."""

    def __init__(self) -> None:
        self.raises: BaseException | None = None
        self.sinks: list[OutputSink] = []

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        self.sinks.append(sink)
        if self.raises:
            raise self.raises


async def _core(engine: Engine) -> GenerationWorker:
    simulated = SimulatedEngine(SimulatedConfig())
    info: GeneratorInfo = await simulated.start(lambda _: None)
    await simulated.close()
    host = hosted(simulated, Role.AGGREGATED)
    host.set_info(info)
    return GenerationWorker(host, cast("Any", engine), None)


async def test_an_engine_that_raises_leaves_nothing_open() -> None:
    engine = Engine()
    core = await _core(engine)
    engine.raises = RuntimeError("a bug")
    gauge = STREAM_REQUESTS_OPEN.labels("aggregated")._value
    before = gauge.get()
    with pytest.raises(RuntimeError):
        core.submit(START, Sink())
    assert (core.work.count, core._requests.tokens) == (0, 0)
    engine.sinks[0].finish(DONE)
    assert (core.work.count, gauge.get()) == (0, before), "counted out twice"


@pytest.mark.parametrize("end", [DONE, EngineFailedError("it died")])
async def test_the_end_is_passed_on_whatever_telemetry_does(
    end: Finish | ServingError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(RequestCounts, "ended", breaks)
    engine, sink = Engine(), Sink()
    core = await _core(engine)
    core.submit(START, sink)
    (counted,) = engine.sinks
    tell = partial(counted.finish, end) if isinstance(end, Finish) else partial(counted.fail, end)
    with pytest.raises(RuntimeError):
        tell()
    assert sink.ends == [end]
    assert core.work.count == 0
