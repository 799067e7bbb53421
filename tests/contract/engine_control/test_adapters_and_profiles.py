"""LoadLora, UnloadLora, ListLoras; StartProfile, StopProfile."""

from __future__ import annotations

from pathlib import Path

import grpc

from millstream.v1 import worker_pb2
from millstream_server.runtime.errors import InternalError, InvalidWeightsError
from millstream_testing.waiting import until
from tests.support.wire.failures import refusal
from tests.support.worker.controlled_worker import controlled_worker, pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


async def test_an_adapter_is_listed_from_its_load_to_its_unload(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        about = one.about.WatchWorkerInfo(worker_pb2.WatchWorkerInfoRequest())
        await about.read()
        for name in ("b", "a"):
            path = tmp_path / "weights" / name
            loaded = await one.control.LoadLora(pb.LoadLoraRequest(name=name, path=str(path)))
            assert (loaded.adapter.name, loaded.adapter.rank) == (name, 8)
            assert loaded.adapter.path == str(path)
            assert name in [adapter.name for adapter in (await about.read()).info.adapters]
        listed = await one.control.ListLoras(pb.ListLorasRequest())
        assert [adapter.name for adapter in listed.adapters] == ["a", "b"]
        assert list((await one.state()).adapters) == list(listed.adapters)
        again = await refusal(one.control.LoadLora(pb.LoadLoraRequest(name="a", path=str(path))))
        assert (again.code, again.reason) == (grpc.StatusCode.ALREADY_EXISTS, "ADAPTER_EXISTS")

        held = one.script.hold("unload_adapter")
        unloading = one.control.UnloadLora(pb.UnloadLoraRequest(name="a"))
        info = (await about.read()).info  # before the engine has ended those that use it
        assert [adapter.name for adapter in info.adapters] == ["b"]
        assert not unloading.done()
        assert await one.conditions() == []
        held.set()
        await unloading
        gone = await refusal(one.control.UnloadLora(pb.UnloadLoraRequest(name="a")))
        assert (gone.code, gone.reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
        about.cancel()


async def test_an_adapter_that_does_not_fit_is_not_listed(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        one.script.failures["load_adapter"] = InvalidWeightsError("adapter_config.json is missing")
        request = pb.LoadLoraRequest(name="a", path=str(tmp_path / "weights" / "a"))
        failed = await refusal(one.control.LoadLora(request))
        assert (failed.code, failed.reason) == (PRECONDITION, "INVALID_WEIGHTS")
        assert not (await one.state()).adapters
        one.script.failures.clear()
        await one.control.LoadLora(request)
        one.script.failures["unload_adapter"] = InternalError("no")
        await refusal(one.control.UnloadLora(pb.UnloadLoraRequest(name="a")))
        assert [adapter.name for adapter in (await one.state()).adapters] == ["a"]
        request = pb.LoadLoraRequest(name="c", path="/etc")
        failed = await refusal(one.control.LoadLora(request))
        assert (failed.code, failed.fields) == (INVALID, ("path",))
        assert "--weights-dirs" in failed.message
        await one.release().ended()
        request = pb.LoadLoraRequest(name="c", path=str(tmp_path / "weights" / "c"))
        failed = await refusal(one.control.LoadLora(request))
        assert (failed.reason, one.script.calls.count("load_adapter c")) == (
            "OPERATION_CONFLICT",
            0,
        )


async def test_an_adapters_name_is_checked(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        for name in ("", "a/b", "a b", "x" * 129, "ä", "a\n"):
            request = pb.LoadLoraRequest(name=name, path=str(tmp_path / "weights"))
            for call in (
                one.control.LoadLora(request),
                one.control.UnloadLora(pb.UnloadLoraRequest(name=name)),
            ):
                failed = await refusal(call)
                assert (failed.code, failed.fields) == (INVALID, ("name",)), name


async def test_while_an_adapter_is_unloaded_a_paused_engine_can_go_on(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        path = str(tmp_path / "weights" / "a")
        await one.control.LoadLora(pb.LoadLoraRequest(name="a", path=path))
        await one.control.Pause(pb.PauseRequest())
        held = one.script.hold("unload_adapter")
        unloading = one.control.UnloadLora(pb.UnloadLoraRequest(name="a"))
        await until(lambda: "unload_adapter a" in one.script.calls)
        assert (await one.control.Continue(pb.ContinueRequest())).was_paused
        held.set()
        await unloading


async def test_a_profile_has_a_directory_and_files(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        activities = [pb.PROFILE_ACTIVITY_CPU, pb.PROFILE_ACTIVITY_MEMORY]
        request = pb.StartProfileRequest(activities=activities, steps=3)
        directory = Path((await one.control.StartProfile(request)).directory)
        assert directory.parent == tmp_path / "profiles"
        assert one.script.calls == ["start_profile cpu memory 3"]
        assert (await one.state()).profiling
        again = await refusal(one.control.StartProfile(pb.StartProfileRequest()))
        assert (again.code, again.reason) == (PRECONDITION, "OPERATION_CONFLICT")
        assert "StopProfile" in again.message
        (directory / "rank-1").mkdir()
        (directory / "rank-1" / "trace.gz").write_bytes(b"12345")
        stopped = await one.control.StopProfile(pb.StopProfileRequest())
        assert [(file.path, file.bytes) for file in stopped.files] == [
            (str(directory / "rank-1" / "trace.gz"), 5),
            (str(directory / "trace.json"), 2),
        ]
        assert not (await one.state()).profiling
        twice = await refusal(one.control.StopProfile(pb.StopProfileRequest()))
        assert (twice.code, twice.reason) == (PRECONDITION, "OPERATION_CONFLICT")
        bad = await refusal(one.control.StartProfile(pb.StartProfileRequest(activities=[0])))
        assert bad.fields == ("activities[0]",)
        second = await one.control.StartProfile(pb.StartProfileRequest())
        assert Path(second.directory) != directory


async def test_a_profile_that_has_no_room_is_refused(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        (tmp_path / "profiles").write_text("a file")
        failed = await refusal(one.control.StartProfile(pb.StartProfileRequest()))
        assert (failed.code, failed.reason) == (
            grpc.StatusCode.UNAVAILABLE,
            "STORAGE_FAILED",
        )
        assert "--profile-dir" in failed.message
        assert str(tmp_path) not in failed.message
        assert not (await one.state()).profiling
