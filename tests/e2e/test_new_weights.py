"""New weights and adapters on a worker of real SGLang that serves all the time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import (
    decode_pb2_grpc,
    engine_control_pb2,
    engine_control_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.models.checkpoints import changed, make_adapter, save
from tests.support.processes import forked
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, stop_all
from tests.support.worker.worker_streams import decode_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_NEW_TOKENS = 60
_STREAMS = 4
_GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": _NEW_TOKENS}
_PROMPTS = [[(7 * i + 13 * j) % 1000 + 16 for j in range(9 + 5 * i)] for i in range(_STREAMS)]


@pytest.fixture(scope="module")
def checkpoints(model: Path) -> dict[str, Path]:
    """Checkpoints beside the model; "adapted" is the model with the adapter in `adapter`."""
    beside = model.parent
    _, merged = make_adapter(model, beside / "adapter", seed=3)
    return {
        "default": model,
        "A": save(model, beside / "A", changed(model, 1)),
        "B": save(model, beside / "B", changed(model, 2), shards=2),
        "adapted": save(model, beside / "adapted", merged),
    }


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What transformers answers to each prompt with each checkpoint."""
    paths = map(str, checkpoints.values())
    arguments = (str(_NEW_TOKENS), json.dumps(_PROMPTS), *paths)
    done = forked.run("sglang", "tests.support.engines.reference_llama", *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(checkpoints, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def worker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    flags = {
        "model_path": model,
        "model_name": "tiny",
        "admin_listen": f"127.0.0.1:{free_port()}",
        "max_loras_per_batch": 1,
        "propagation_s": 0.05,
    }
    folder = tmp_path_factory.mktemp("worker")
    log = folder / "log"
    flags["weights_record"] = folder / "weights.json"
    worker = ServiceProcess("millstream_server.decode", flags, log).start()
    try:
        worker.wait_serving(300)
        yield worker
    finally:
        stop_all(worker)


async def _ask_again_and_again(
    stub: Any, number: int, stop: asyncio.Event, ended: list[tuple[int, str, list[int]]]
) -> None:
    """Ask until ``stop``; what a pause refuses is asked again, nothing else may fail."""
    stream = decode_stream(stub)
    slot = 0
    while not stop.is_set():
        slot += 1
        await stream.start(slot, _PROMPTS[number], **_GREEDY)
        (view,) = await stream.ended(slot)
        if view.error is not None:
            assert view.reason == "WORKER_PAUSED"
            assert not view.token_ids
            await asyncio.sleep(0.02)
            continue
        assert view.finish is not None
        ended.append((number, view.finish.weight_version, view.token_ids))
    await stream.drain()


async def _update(control: Any, version: str, path: Path) -> engine_control_pb2.WeightsUpdated:
    disk = engine_control_pb2.WeightsOnDisk(path=str(path))
    start = engine_control_pb2.UpdateWeightsStart(weight_version=version, disk=disk)
    request = engine_control_pb2.UpdateWeightsRequest(start=start)
    responses = [response async for response in control.UpdateWeights(iter([request]))]
    return responses[-1].result  # type: ignore[no-any-return]


async def test_an_adapter_is_loaded_and_told(
    worker: ServiceProcess, model: Path, expected: dict[str, list[list[int]]]
) -> None:
    async with (
        grpc.aio.insecure_channel(worker.address) as channel,
        grpc.aio.insecure_channel(str(worker.flags["admin_listen"])) as admin,
    ):
        control = engine_control_pb2_grpc.EngineControlServiceStub(admin)
        about = worker_pb2_grpc.WorkerServiceStub(channel)
        path = str(model.parent / "adapter")
        await control.LoadLora(engine_control_pb2.LoadLoraRequest(name="a", path=path))
        info = (await about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        assert [adapter.name for adapter in info.adapters] == ["a"]
        stream = decode_stream(decode_pb2_grpc.DecodeServiceStub(channel))
        for name, adapter in (("default", ""), ("adapted", "a")):
            for slot, prompt in enumerate(_PROMPTS):
                await stream.start(slot, prompt, adapter=adapter, **_GREEDY)
            views = await stream.ended(*range(_STREAMS))
            assert [view.token_ids for view in views] == expected[name]
        await control.UnloadLora(engine_control_pb2.UnloadLoraRequest(name="a"))
        await stream.start(9, _PROMPTS[0], adapter="a", **_GREEDY)
        (view,) = await stream.ended(9)
        assert view.reason == "ADAPTER_NOT_FOUND"
        await stream.drain()


async def test_every_answer_is_of_the_version_that_it_names(
    worker: ServiceProcess,
    model: Path,
    checkpoints: dict[str, Path],
    expected: dict[str, list[list[int]]],
) -> None:
    cut_off = save(model, model.parent / "cut-off", changed(model, 5))
    file = cut_off / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    ended: list[tuple[int, str, list[int]]] = []
    stop = asyncio.Event()
    async with (
        grpc.aio.insecure_channel(worker.address) as channel,
        grpc.aio.insecure_channel(str(worker.flags["admin_listen"])) as admin,
    ):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        control = engine_control_pb2_grpc.EngineControlServiceStub(admin)
        async with asyncio.TaskGroup() as group:
            for number in range(_STREAMS):
                group.create_task(_ask_again_and_again(stub, number, stop, ended))
            for version, previous in (("A", "default"), ("B", "A")):
                await _until_seen(ended, previous)
                with pytest.raises(grpc.aio.AioRpcError, match="cut off") as caught:
                    await _update(control, "broken", cut_off)
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                result = await _update(control, version, checkpoints[version])
                assert (result.previous_version, result.weight_version) == (previous, version)
            await _until_seen(ended, "B")
            stop.set()
        assert {version for _, version, _ in ended} == {"default", "A", "B"}
        for number, version, tokens in ended:
            assert tokens == expected[version][number]


async def test_a_killed_worker_comes_back_with_the_weights_of_its_last_update(
    worker: ServiceProcess, checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    async with grpc.aio.insecure_channel(str(worker.flags["admin_listen"])) as admin:
        control = engine_control_pb2_grpc.EngineControlServiceStub(admin)
        await _update(control, "again A", checkpoints["A"])
    worker.kill()
    worker.start()
    await worker.until_serving(300)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        about = worker_pb2_grpc.WorkerServiceStub(channel)
        info = (await about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        assert info.weight_version == "again A"
        stream = decode_stream(decode_pb2_grpc.DecodeServiceStub(channel))
        for slot, prompt in enumerate(_PROMPTS):
            await stream.start(slot, prompt, **_GREEDY)
        views = await stream.ended(*range(_STREAMS))
        assert [view.token_ids for view in views] == expected["A"]
        assert {view.finish.weight_version for view in views if view.finish} == {"again A"}
        await stream.drain()


async def _until_seen(ended: list[tuple[int, str, list[int]]], version: str) -> None:
    async with asyncio.timeout(60):
        while sum(each[1] == version for each in ended) < 2 * _STREAMS:
            await asyncio.sleep(0.01)
