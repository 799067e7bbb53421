"""Wrong settings and taken ports, each to a real process: exit code, and a sentence that helps."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import decode_pb2_grpc, processor_pb2
from millstream_server.runtime.lifecycle.main import DRAINED, FAILED, KILLED, PORT_FAILED
from millstream_server.runtime.memory import out_of_memory_kills
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.processes.processes import complaints
from tests.support.processes.simulated_suite import SimulatedSuite, channels_to
from tests.support.processes.suite import ServiceProcess
from tests.support.processor.chats import completion, gather, options
from tests.support.wire.long_streams import server_status
from tests.support.worker.worker_streams import decode_stream

pytestmark = pytest.mark.timeout(120)

WRONG_SETTING = 2


async def _refused_to_start(service: ServiceProcess) -> tuple[int, str]:
    try:
        service.start()
        return await service.until_gone(30), service.log.read_text()
    finally:
        service.kill()


@pytest.mark.parametrize(
    ("module", "flags", "sentence"),
    [
        ("decode", {"drain_s": "soon"}, "--drain-s"),
        ("decode", {"engine": "sglang", "simulated_vocab_size": None}, "--model-path"),
        ("decode", {"mode": "both"}, "--mode"),
        ("decode", {"tls_cert_file": "/nowhere/tls.crt"}, "--tls-cert-file and --tls-key-file"),
        ("prefill", {"allowed_peers": "a.example"}, "--allowed-peers: set --tls-client-ca-file"),
        ("decode", {"admin_listen": "0.0.0.0:0"}, "--admin-listen 0.0.0.0:0: without TLS"),
        (
            "decode",
            {"admin_listen": "127.0.0.1:0", "admin_peers": "operator.example"},
            "--admin-peers: set --tls-cert-file",
        ),
        ("processor", {"models": "tiny="}, "--models: 'tiny=' is neither NAME=DIR nor NAME"),
        ("processor", {"models": "tiny=/nowhere"}, "--models: "),
        (
            "processor",
            {"worker_tls_dir": "/nowhere"},
            "--worker-tls-dir: can't read /nowhere/ca.crt",
        ),
        ("processor", {"api_keys_file": "/nowhere"}, "--api-keys-file: can't read /nowhere"),
    ],
)
async def test_a_wrong_setting_is_named(
    tmp_path: Path, module: str, flags: dict[str, Any], sentence: str
) -> None:
    made = SimulatedSuite(tmp_path)
    made.models["tiny"] = ["127.0.0.1:1"]
    service = (
        made.add_processor("it", **flags)
        if module == "processor"
        else made.add_worker("it", module, **flags)
    )
    code, log = await _refused_to_start(service)
    assert code == WRONG_SETTING
    assert sentence in log
    assert "Traceback" not in log


@pytest.mark.parametrize("flag", ["port", "metrics_listen", "admin_listen", "bootstrap_port"])
async def test_a_taken_port_is_a_failure_that_says_so(tmp_path: Path, flag: str) -> None:
    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as holder:
        taken = holder.sockets[0].getsockname()[1]
        made = SimulatedSuite(tmp_path)
        if flag == "bootstrap_port":
            service = made.add_worker("it", "prefill", bootstrap_port=taken)
        else:
            service = made.add_worker(
                "it", **({} if flag == "port" else {flag: f"127.0.0.1:{taken}"})
            )
        if flag == "port":
            service.port = taken
        code, log = await _refused_to_start(service)
    assert code == FAILED
    assert "taken" in log or "in use" in log
    if flag != "bootstrap_port":
        assert str(taken) in log
    assert "never retrieved" not in log


async def test_a_worker_told_to_stop_while_it_loads_is_gone_at_once(tmp_path: Path) -> None:
    made = SimulatedSuite(tmp_path)
    worker = made.add_worker("it", simulated_load_s=300, log_level="info")
    worker.start()
    try:
        await until(lambda: "loading the model" in worker.log.read_text(), 30)
        async with grpc.aio.insecure_channel(worker.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            answer = await health.Check(request, wait_for_ready=True, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        worker.terminate()
        assert await worker.until_gone(10) == DRAINED
    finally:
        worker.kill()
    assert "stopped before the model was loaded" in worker.log.read_text()


async def test_a_processor_whose_models_cant_be_read_answers_probes_and_signals(
    tmp_path: Path,
) -> None:
    """A library that hangs stands for a file system that does, in the child that reads."""
    library, hangs = tmp_path / "library" / "transformers", tmp_path / "hangs"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(
        "import os, pathlib, signal\n"
        f"whole = pathlib.Path({str(tmp_path)!r}, 'pid')\n"
        f"whole.write_text(str(os.getpid())); whole.rename({str(hangs)!r})\n"
        "signal.pause()\n"
    )
    found = os.pathsep.join([str(library.parent), os.environ.get("PYTHONPATH", "")])
    made = SimulatedSuite(tmp_path, env={"PYTHONPATH": found})
    made.models["tiny"] = ["127.0.0.1:1"]
    admin, health = f"127.0.0.1:{free_port()}", free_port()
    front = made.add_processor(
        "it", admin_listen=admin, health_listen=f"127.0.0.1:{health}", log_level="info"
    )
    front.interpreter = True  # a forked one has the library, and starts no child
    front.start()
    try:
        await until(hangs.exists, 30)
        child = int(hangs.read_text())
        assert (await _http_get(health, "/livez")).startswith(b"HTTP/1.1 200 ")
        assert (await _http_get(health, "/healthz")).startswith(b"HTTP/1.1 503 ")
        accepting = await _http_get(health, "/readyz?service=accepting")
        assert accepting.startswith(b"HTTP/1.1 503 ")
        async with grpc.aio.insecure_channel(admin) as operator:
            status = await server_status(operator)
        assert status.health_conditions == ["loading", "no workers"]
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", front.port)
        front.terminate()
        assert await front.until_gone(10) == DRAINED
        await until(lambda: not Path(f"/proc/{child}").exists())
    finally:
        front.kill()
    log = front.log.read_text()
    assert "stopped before the models were read" in log
    assert complaints(log) == []


async def test_a_model_whose_files_cant_be_read_doesnt_take_the_others_away(tmp_path: Path) -> None:
    made = SimulatedSuite(tmp_path)
    made.add_worker("tiny", model="tiny")
    made.add_worker("broken", model="broken")
    made.directories["broken"] = tmp_path / "without a tokenizer"
    made.directories["broken"].mkdir()
    front = made.add_processor("front")
    try:
        for service in made.services.values():
            service.start()
        await front.until_serving()
        async with channels_to(front, 1) as (stub,):
            listed = (await stub.ListModels(processor_pb2.ListModelsRequest())).models
            assert {model.name: model.ready for model in listed} == {"broken": False, "tiny": True}
            answer = await gather(stub.Complete(completion([1, 2], options(3), model="tiny")))
            assert answer.usage.completion_tokens == 3
            text = processor_pb2.TokenizeRequest(model="broken", text="a")
            for call in (
                lambda: gather(stub.Complete(completion([1, 2], model="broken"))),
                lambda: stub.Tokenize(text),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call()
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "the files of 'broken' can't be read here" in str(refused.value.details())
    finally:
        for service in made.services.values():
            service.kill()
    (line,) = (line for line in front.log.read_text().splitlines() if "is unavailable" in line)
    assert "model=broken" in line
    assert "without a tokenizer" in line


async def test_a_processor_none_of_whose_models_can_be_read_doesnt_start(tmp_path: Path) -> None:
    made = SimulatedSuite(tmp_path)
    made.models["a"] = ["127.0.0.1:1"]
    front = made.add_processor("it", models=f"a={tmp_path / 'a'},b={tmp_path / 'b'}")
    code, log = await _refused_to_start(front)
    assert code == WRONG_SETTING
    assert "--models: none can be read; the lines above say why" in log
    assert "model=b" in log


@pytest.mark.parametrize(("before", "after", "code"), [(2, 3, KILLED), (2, 2, FAILED)])
def test_a_worker_whose_engine_was_killed_for_memory_says_so(
    tmp_path: Path, before: int, after: int, code: int
) -> None:
    """The cgroup of its container counts what the kernel kills."""
    program = f"""
from pathlib import Path
from millstream_server.runtime.lifecycle import main as life
from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.memory import out_of_memory_kills
here = Path({str(tmp_path)!r})
life.out_of_memory_kills = lambda: out_of_memory_kills(here)
async def app(settings):
    here.joinpath("memory.events").write_text("oom 9\\noom_kill {after}\\n")
    return life.FAILED
life.main(ServiceSettings, app, prog="p", description="")
"""
    (tmp_path / "memory.events").write_text(f"low 0\noom 5\noom_kill {before}\n")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("the kernel killed processes of this container" in done.stderr) == (code == KILLED)


def test_both_versions_of_cgroups_tell_what_was_killed(tmp_path: Path) -> None:
    assert out_of_memory_kills(tmp_path) == 0
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("under_oom 0\noom_kill 4\n")
    assert out_of_memory_kills(tmp_path) == 4


async def test_a_process_whose_grpc_loop_died_ends_what_it_has_and_leaves(tmp_path: Path) -> None:
    """One frame of anybody's ends grpcio's serving loop: a `:path` that is not UTF-8.

    What runs goes on to its end; then the process leaves, to be started anew. Its other ports say
    why, and so does its exit code.
    """
    made = SimulatedSuite(tmp_path, {"simulated_step_s": 0.02})
    admin, health = f"127.0.0.1:{free_port()}", free_port()
    worker = made.add_worker("it", admin_listen=admin, health_listen=f"127.0.0.1:{health}")
    worker.start()
    try:
        await worker.until_serving()
        async with (
            grpc.aio.insecure_channel(worker.address) as channel,
            grpc.aio.insecure_channel(admin) as operator,
        ):
            stream = decode_stream(decode_pb2_grpc.DecodeServiceStub(channel))
            await stream.start(0, [1], max_new_tokens=100)
            await stream.first_token(0)
            _, writer = await asyncio.open_connection("127.0.0.1", worker.port)
            writer.write(_PATH_THAT_IS_NOT_UTF8)
            await writer.drain()
            while not (holding := (await server_status(operator)).health_conditions):
                await asyncio.sleep(0.02)
            assert holding == ["port failed", "draining"]
            assert (await _http_get(health, "/healthz")).startswith(b"HTTP/1.1 503 ")
            assert (await _http_get(health, "/livez")).startswith(b"HTTP/1.1 200 ")
            (view,) = await stream.ended(0)
            assert len(view.token_ids) == 100
            assert any(frame.draining for frame in stream.frames)
            await stream.drain()
            writer.close()
        assert await worker.until_gone(15) == PORT_FAILED
    finally:
        worker.kill()
    log = worker.log.read_text()
    assert re.search(r"gRPC's serving loop died; .* cause=\".*a :path that isn't UTF-8\"", log)


async def _http_get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    response = await reader.read()
    writer.close()
    return response


def _frame(kind: int, flags: int, payload: bytes, stream: int) -> bytes:
    length = len(payload).to_bytes(3, "big")
    return length + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


_CONTENT_TYPE = b"\x0f\x10\x10application/grpc"
_PATH_THAT_IS_NOT_UTF8 = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + _frame(4, 0, b"", 0)
    + _frame(1, 4, b"\x83\x86\x04\x02/\xff\x01\x01x" + _CONTENT_TYPE + b"\x00\x02te\x08trailers", 1)
)
