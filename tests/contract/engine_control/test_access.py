"""Who may control an engine, from where, and what is left in the log."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millstream.v1 import engine_control_pb2_grpc, tensor_pb2
from millstream_server.control.engine import Role
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.worker import app
from millstream_testing.in_process import ALPHABET, plan_of
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.telemetry.logged import events
from tests.support.wire.certificates import Authority, SecretMount
from tests.support.wire.failures import refusal
from tests.support.worker.controlled_worker import controlled_worker, from_disk, pb, start_of
from tests.support.worker.hosted_worker import host_settings

SERVICE = "millstream.v1.EngineControlService"


async def listed_services(channel: grpc.aio.Channel) -> list[str]:
    call: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    return [service.name for service in (await call.read()).list_services_response.service]


async def test_it_is_served_on_the_admin_address_only(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        public: Any = engine_control_pb2_grpc.EngineControlServiceStub(one.channel)
        for call in (public.GetEngineState(pb.GetEngineStateRequest()), public.UpdateWeights()):
            failed = await refusal(call)
            assert (failed.code, failed.reason) == (
                grpc.StatusCode.UNIMPLEMENTED,
                "UNKNOWN_METHOD",
            )
        assert SERVICE in await listed_services(one.admin)
        assert SERVICE not in await listed_services(one.channel)


async def test_a_chunk_of_a_tensor_may_be_larger_than_other_requests(tmp_path: Path) -> None:
    async with controlled_worker(tmp_path) as one:
        spec = tensor_pb2.TensorSpec(element_type=tensor_pb2.ELEMENT_TYPE_FLOAT16, shape=[4])
        tensor = pb.UpdateWeightsRequest(tensor=pb.WeightTensor(name="w", spec=spec))
        chunk = pb.UpdateWeightsRequest(chunk=tensor_pb2.TensorChunk(data=bytes(2 << 20)))
        messages = iter([start_of(tensors=pb.WeightsInCall()), tensor, chunk])
        failed = await refusal(one.control.UpdateWeights(messages))
        assert failed.fields == ("chunk.data",)  # it has arrived


async def test_each_call_leaves_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="millstream_server")
    async with controlled_worker(tmp_path) as one:
        await one.state()
        await one.control.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_RETRACT))
        await refusal(one.control.UnloadLora(pb.UnloadLoraRequest(name="x" * 257)))
        await one.control.Continue(pb.ContinueRequest())
        path = tmp_path / "weights" / "next"
        await one.update(from_disk(path, timeout_s=2.5)).ended()
        await one.release(pb.MEMORY_TAG_WEIGHTS).ended()
        await until(lambda: len(events(caplog, "operator action")) == 6)
    found = events(caplog, "operator action")
    assert all(line.pop("took_s") >= 0 and line.pop("caller") == "local" for line in found)
    assert not any(line.pop("caller_gone") for line in found)
    assert found == [
        {"operation": "GetEngineState", "outcome": "done"},
        {"operation": "Pause", "outcome": "done", "mode": "PAUSE_MODE_RETRACT"},
        {"operation": "UnloadLora", "outcome": "INVALID_REQUEST", "name": "x" * 256},
        {"operation": "Continue", "outcome": "done"},
        {
            "operation": "UpdateWeights",
            "outcome": "done",
            "weight_version": "v2",
            "source": "disk",
            "path": str(path),
        },
        {"operation": "ReleaseMemory", "outcome": "done", "tags": "MEMORY_TAG_WEIGHTS"},
    ]
    levels = [r.levelname for r in caplog.records if r.getMessage() == "operator action"]
    assert levels == ["INFO"] + 5 * ["WARNING"]


async def test_over_tls_only_named_operators_may_and_the_log_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, mount = Authority(), SecretMount(tmp_path)
    mount.put(authority.issue("localhost"))
    port = free_port()
    settings = host_settings(
        listen=f"localhost:{free_port()}",
        admin_listen=f"localhost:{port}",
        tls_cert_file=mount.cert,
        tls_key_file=mount.key,
        tls_client_ca_file=mount.ca,
        admin_peers=("operator.example",),
    )
    code = asyncio.ensure_future(
        app.run(settings, plan_of(SimulatedEngine(ALPHABET), Role.AGGREGATED))
    )

    async def drained_by(name: str) -> Any:
        held = authority.issue(name)
        credentials = grpc.ssl_channel_credentials(authority.pem, held.key, held.cert)
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            stub: Any = engine_control_pb2_grpc.EngineControlServiceStub(channel)
            call = stub.Undrain(pb.UndrainRequest(), wait_for_ready=True, timeout=20)
            return await call if name == "operator.example" else await refusal(call)

    try:
        assert not (await drained_by("operator.example")).was_drained
        stranger = await drained_by("other.example")
        assert (stranger.code, stranger.reason) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "PERMISSION_DENIED",
        )
    finally:
        code.cancel()
        await asyncio.wait({code})
    (line,) = events(caplog, "operator action")
    assert (line["operation"], line["caller"]) == ("Undrain", "operator.example")
