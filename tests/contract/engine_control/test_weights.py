"""UpdateWeights: what is checked first, what is received, who serves with what."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import grpc

from millstream.v1 import tensor_pb2, worker_pb2
from millstream_server.control.operations import (
    BroadcastWeights,
    DiskWeights,
    IpcWeights,
    NamedTensor,
)
from millstream_server.runtime.errors import EngineFailedError, InvalidWeightsError
from millstream_testing.waiting import until
from tests.support.wire.failures import Failure, refusal
from tests.support.wire.long_streams import NOT_SERVING, SERVING
from tests.support.worker.controlled_worker import (
    APPLYING,
    CHECKING,
    DONE,
    DRAINING,
    controlled_worker,
    from_disk,
    pb,
    start_of,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
F16 = tensor_pb2.ELEMENT_TYPE_FLOAT16


def _tensor(name: str = "w", *shape: int, kind: Any = F16) -> Any:
    spec = tensor_pb2.TensorSpec(element_type=kind, shape=shape or (2, 2))
    return pb.UpdateWeightsRequest(tensor=pb.WeightTensor(name=name, spec=spec))


def _chunk(offset: int, data: bytes) -> Any:
    return pb.UpdateWeightsRequest(chunk=tensor_pb2.TensorChunk(offset=offset, data=data))


def _in_call(*messages: Any, total_bytes: int = 0) -> list[Any]:
    return [start_of(tensors=pb.WeightsInCall(total_bytes=total_bytes)), *messages]


async def _refused(one: Any, messages: list[Any]) -> Failure:
    """Run an update that must fail."""
    return await refusal(one.control.UpdateWeights(iter(messages)))


async def test_weights_are_checked_while_it_serves_and_replaced_while_it_is_idle(
    tmp_path: Path,
) -> None:
    async with controlled_worker(tmp_path) as one:
        about = one.about.WatchWorkerInfo(worker_pb2.WatchWorkerInfoRequest())
        assert (await about.read()).info.weight_version == "v1"
        stream, slot = await one.request()
        checked = one.script.hold("check")
        update = one.update(from_disk(tmp_path / "weights" / "next"))
        await until(lambda: bool(one.script.calls))
        assert one.script.sources == [DiskWeights((tmp_path / "weights" / "next").resolve())]
        assert await one.conditions() == []
        checked.set()
        await update.reached(DRAINING)
        await one.health.until(NOT_SERVING)
        assert await one.conditions() == ["updating weights"]
        assert (await one.state()).weight_version == "v1"
        await stream.cancel(slot)
        await update.ended()
        assert update.stages == [CHECKING, DRAINING, APPLYING, DONE]
        assert (update.progress[-1].bytes_done, update.progress[-1].bytes_total) == (3, 4)
        assert one.script.calls == ["check DiskWeights", "update v2"]
        assert one.script.open_at["update"] == 0
        result = update.result
        assert (result.previous_version, result.weight_version) == ("v1", "v2")
        assert result.out_of_service.ToNanoseconds() > 0
        assert (await about.read()).info.weight_version == "v2"
        assert (await one.state()).weight_version == "v2"
        await one.health.until(SERVING)
        about.cancel()


async def test_weights_that_do_not_fit_leave_the_old_ones_in_service(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        for step in ("check", "update"):
            one.script.failures = {step: InvalidWeightsError("w has the shape [3], not [2]")}
            failed = await _refused(one, from_disk(tmp_path / "weights"))
            assert (failed.code, failed.reason) == (PRECONDITION, "INVALID_WEIGHTS")
            assert failed.message == "w has the shape [3], not [2]"
            assert await one.conditions() == []
            assert (await one.state()).weight_version == "v1"
        assert one.script.calls.count("check DiskWeights") == 2
        assert one.health.told.count(NOT_SERVING) <= 2


async def test_weights_that_nobody_knows_are_not_served(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        one.script.failures["update"] = EngineFailedError("a rank was lost on the way")
        failed = await _refused(one, from_disk(tmp_path / "weights"))
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED")
        assert await one.conditions() == ["updating weights"]
        one.script.failures["check"] = InvalidWeightsError("no")
        await _refused(one, from_disk(tmp_path / "weights"))
        assert await one.conditions() == ["updating weights"]
        one.script.failures.clear()
        await one.update(from_disk(tmp_path / "weights", "v1")).ended()
        assert await one.conditions() == []


async def test_an_update_that_waits_too_long_leaves_the_old_weights(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        await one.request()
        failed = await _refused(one, from_disk(tmp_path / "weights", timeout_s=0.0))
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await one.conditions(), one.script.calls) == ([], ["check DiskWeights"])


async def test_released_weights_are_resumed_before_they_are_replaced(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        await one.release(pb.MEMORY_TAG_WEIGHTS, pb.MEMORY_TAG_KV_CACHE).ended()
        failed = await _refused(one, from_disk(tmp_path / "weights"))
        assert (failed.code, failed.reason) == (PRECONDITION, "OPERATION_CONFLICT")
        await one.control.ResumeMemory(pb.ResumeMemoryRequest(tags=[pb.MEMORY_TAG_WEIGHTS]))
        await one.update(from_disk(tmp_path / "weights")).ended()
        assert await one.conditions() == ["memory released"]


async def test_tensors_are_put_together_from_their_chunks(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        messages = _in_call(
            _tensor("a"),
            _chunk(0, b"12345"),
            _chunk(5, b"678"),
            _tensor("b", 1, kind=tensor_pb2.ELEMENT_TYPE_FLOAT32),
            _chunk(0, b"wxyz"),
            total_bytes=12,
        )
        update = one.update(messages)
        await update.ended()
        assert one.script.tensors == {"a": b"12345678", "b": b"wxyz"}
        assert one.script.calls == ["check TensorWeights", "update v2"]


BROKEN: list[tuple[list[Any], str, str]] = [
    ([], "tensor", "no tensor came"),
    ([_chunk(0, b"1")], "chunk", "before the first"),
    ([_tensor(), _chunk(1, b"1")], "chunk.offset", "is 1; w goes on at 0"),
    ([_tensor(), _chunk(0, b"123"), _chunk(2, b"1")], "chunk.offset", "goes on at 3"),
    ([_tensor(), _chunk(0, b"123456789")], "chunk.data", "ends at 9; w has 8 bytes"),
    ([_tensor(), _chunk(0, b"1234567")], "tensor", "w has 8 bytes; only 7 came"),
    ([_tensor(), _tensor("v")], "tensor", "only 0 came"),
    ([_tensor(), _chunk(0, b"12345678"), _tensor()], "tensor.name", "w came already"),
    ([_tensor("")], "tensor.name", "1 to 512 characters"),
    ([_tensor(kind=0)], "tensor.spec.element_type", "is not one"),
    ([_tensor("w", 0)], "tensor.spec.shape", "at least 1"),
    ([_tensor("w", 501)], "tensor", "--max-weights-bytes allows 1000"),
    ([_tensor("w", 499), _chunk(0, bytes(998)), _tensor("v", 2)], "tensor", "1002 bytes"),
    ([start_of(disk=pb.WeightsOnDisk(path="/"))], "message", "after `start`"),
]


async def test_tensors_that_break_a_rule_are_refused(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        for messages, field, sentence in BROKEN:
            failed = await _refused(one, _in_call(*messages))
            assert (failed.code, failed.fields) == (INVALID, (field,)), messages
            assert sentence in failed.message
        assert one.script.calls == []
        assert (await one.state()).operation == ""


async def test_tensors_of_an_update_that_failed_are_freed(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        await _refused(one, _in_call(_tensor("big", 400), _chunk(0, bytes(99)), _chunk(7, b"1")))

        def freed() -> bool:
            tensors = [
                o for o in gc.get_objects() if type(o) is NamedTensor
            ]  # isinstance runs code
            held = [tensor for tensor in tensors if tensor.name == "big"]
            return not held

        await until(freed)


async def test_the_whole_is_checked_against_what_was_announced(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        failed = await _refused(one, _in_call(total_bytes=1001))
        assert "the tensors have 1001 bytes or more" in failed.message
        whole = [_tensor(), _chunk(0, bytes(8))]
        failed = await _refused(one, _in_call(*whole, total_bytes=9))
        assert failed.fields == ("start.tensors.total_bytes",)


async def test_paths_below_other_directories_are_refused_alike(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    async with controlled_worker(tmp_path) as one:
        link = tmp_path / "weights" / "link"
        link.symlink_to(secret)
        loop = tmp_path / "weights" / "loop"
        loop.symlink_to(loop)
        seen = set()
        outside = (
            secret,
            link,
            tmp_path / "no-such",
            tmp_path / "weights" / ".." / "secret",
            "/\0",
        )
        for path in outside:
            failed = await _refused(one, from_disk(Path(path)))
            assert (failed.code, failed.fields) == (INVALID, ("start.disk.path",))
            seen.add(failed.message)
        assert seen == {
            "start.disk.path: must be below a directory that the worker's --weights-dirs allows"
        }
        failed = await _refused(one, from_disk(Path("next")))
        assert "absolute" in failed.message
        inside = tmp_path / "weights" / "alias"
        inside.symlink_to(tmp_path / "weights" / "next")
        await one.update(from_disk(inside)).ended()
        assert one.script.sources == [DiskWeights(tmp_path / "weights" / "next")]


async def test_a_version_has_a_name_of_its_own(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        for version in ("", "x" * 129, "a\nb", "v1"):
            failed = await _refused(one, from_disk(tmp_path / "weights", version))
            assert (failed.code, failed.fields) == (INVALID, ("start.weight_version",)), version


async def test_the_first_message_says_what_is_meant(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        for messages in ([], [_tensor()]):
            failed = await _refused(one, messages)
            assert (failed.code, failed.fields) == (INVALID, ("start",))
        assert (await _refused(one, [start_of()])).fields == ("start.source",)


def _broadcast(**changes: Any) -> Any:
    given = {
        "master_address": "trainer:29500",
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "g",
        "backend": "gloo",
        "tensors": [_tensor().tensor],
    }
    return start_of(broadcast=pb.WeightsBroadcast(**(given | changes)))


async def test_weights_may_come_from_a_process_group_or_this_machines_gpus(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        wrong: dict[str, Any] = {
            "master_address": "trainer",
            "world_size": 1,
            "group_name": "",
            "backend": "mpi",
            "tensors": [],
        }
        for field, value in wrong.items():
            failed = await _refused(one, [_broadcast(**{field: value})])
            assert (failed.code, failed.fields) == (INVALID, (f"start.broadcast.{field}",))
        empty = await _refused(one, [start_of(ipc=pb.WeightsByIpc())])
        assert empty.fields == ("start.ipc.zmq_addresses",)
        await one.update([_broadcast()]).ended()
        addresses = {"GPU-1": "ipc:///tmp/a"}
        await one.update([start_of("v3", ipc=pb.WeightsByIpc(zmq_addresses=addresses))]).ended()
        group, ipc = one.script.sources
        assert isinstance(group, BroadcastWeights)
        assert (group.master_address, group.tensors[0].name) == ("trainer:29500", "w")
        assert ipc == IpcWeights(addresses)


async def test_a_caller_who_stops_sending_frees_the_worker_for_others(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        call = one.control.UpdateWeights()
        await call.write(start_of(tensors=pb.WeightsInCall()))
        await call.write(_tensor())

        async def receiving() -> bool:
            return bool((await one.state()).operation == "UpdateWeights")

        await until(receiving)
        conflict = await refusal(one.control.LoadLora(pb.LoadLoraRequest(name="a", path="/a")))
        assert "UpdateWeights runs" in conflict.message
        call.cancel()

        async def free() -> bool:
            return bool((await one.state()).operation == "")

        await until(free)
        assert one.script.calls == []
