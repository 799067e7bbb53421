"""The endurance benchmarks in short: what must hold for minutes holds for seconds.

What takes time to show, memory above all, is judged in the long runs only (docs/benchmarks.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import pkgutil
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import hpack
import pytest

import millstream.v1
from millstream.v1 import decode_pb2, errors_pb2, generation_pb2, processor_pb2
from millstream_server.runtime.lifecycle import admin
from millstream_server.runtime.rpc import health, orca
from millstream_server.runtime.rpc.reflection import V1, V1ALPHA
from tests.benchmarks.fuzzing.connections import play_wire
from tests.benchmarks.fuzzing.frames import WireScript, make_wire_script
from tests.benchmarks.fuzzing.messages import MessageMaker, mutate
from tests.benchmarks.fuzzing.scripts import Outcome, Script, make_script, play
from tests.benchmarks.fuzzing.targets import Target
from tests.support.processes import forked
from tests.support.processes.processes import Footprint, Sampler, complaints
from tests.support.wire.raw_http2 import (
    END_HEADERS,
    PREFACE,
    Kind,
    data,
    frame,
    message,
    request_fields,
    settings,
)
from tests.support.wire.rpc_kinds import SERVICE, Kinds
from tests.support.wire.transports import serving

CHAT = processor_pb2.DESCRIPTOR.services_by_name["ProcessorService"].methods_by_name["Chat"]
DECODE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].methods_by_name["Decode"]


async def _run(benchmark: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark; all of its points must hold."""
    done = await asyncio.to_thread(
        forked.run, "services", f"tests.benchmarks.{benchmark}", "--json", *arguments
    )
    assert done.stdout, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["broken"] == [], done.stderr[-4000:]
    assert done.returncode == 0
    return report


async def test_every_chat_of_a_soak_has_one_status_of_those_it_may_have() -> None:
    report = await _run(
        "soak", "--chats", "60", "--seconds", "8", "--restart-s", "1.5", "--step-s", "0.03"
    )
    assert {*report["statuses"]} >= {"OK", "CANCELLED", "DEADLINE_EXCEEDED"}
    lost = report["statuses"].get("ABORTED REPEATED_LOSS", 0)
    assert lost == sum(report["requests_lost_by_each_sigkill"])
    assert report["restarts_by_sigterm"] >= 1
    assert report["restarts_by_sigkill"] >= 1
    assert len(report["plans"]) == 5
    assert report["requests"] > 60
    assert {*report["memory"]} >= {"processor-1", "worker-1", "client"}


async def test_cancelled_streams_leave_nothing_behind() -> None:
    report = await _run("cancelled_streams", "--streams", "800", "--warm-up", "200")
    assert report["streams_cancelled"] == 800
    assert len(report["ways"]) == 8
    assert sum(report["ways"].values()) == 1000
    for name in ("processor-1", "worker-1"):
        assert report[name]["ratio"]["rss"] < 1.25  # so few streams: warming up, mostly


@pytest.mark.parametrize(
    ("restarts", "arguments"),
    [
        pytest.param(
            4,
            [
                "--topology",
                "all",
                "--client",
                "both",
                "--long",
                "4",
                "--restart",
                "decode-1,worker-1,processor",
            ],
            id="every kind, with streams that outlast a drain",
        ),
        pytest.param(2, ["--topology", "pair", "--restart", "prefill-1,decode-1"], id="a pair"),
        pytest.param(
            2,
            ["--workers", "1", "--client", "millstream", "--restart", "processor", "--kill"],
            id="Processors that are killed, under our own client",
        ),
    ],
)
async def test_a_rolling_restart_costs_no_request(restarts: int, arguments: list[str]) -> None:
    report = await _run("rolling_restart", "--chats", "15", "--step-s", "0.005", *arguments)
    assert report["restarts"] == restarts
    assert report["statuses"] == {"OK": report["requests"]}
    assert report["requests"] > 15 * restarts


async def test_a_rolling_restart_loses_no_kept_connections_of_http() -> None:
    flags = ("--workers", "1", "--client", "http", "--restart", "processor")
    report = await _run("rolling_restart", "--chats", "15", "--step-s", "0.005", *flags)
    assert {*report["statuses"]} <= {"OK", "LOST"}  # how many may be lost it says itself
    assert report["connections"] > 15
    assert report["restarts"] == 2


async def test_hostile_callers_fail_no_sound_chat() -> None:
    """The rows that need no quiet machine; memory and latency are judged in the long run only."""
    rows = "metadata-not-utf8"
    done = await asyncio.to_thread(
        forked.run,
        "services",
        *("tests.benchmarks.hostile", "--json", "--only", rows),
        *("--seconds", "1", "--idle-s", "0.5", "--after-s", "0", "--alone-s", "0"),
    )
    assert done.stdout, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert [row["row"] for row in report["rows"]] == rows.split(",")
    for row in report["rows"]:
        assert row["alive"], row
        assert {*row["codes"]} == {"OK"}, row
        assert row["log_lines"] <= 100, row
        assert row["attacker"]["broken"] == [], row


def _all_services() -> set[str]:
    """Name every service: those of our proto, and the standard ones of both addresses."""
    files = [
        importlib.import_module(f"millstream.v1.{module.name}")
        for module in pkgutil.iter_modules(millstream.v1.__path__)
        if module.name.endswith("_pb2")
    ]
    ours = {s.full_name for file in files for s in file.DESCRIPTOR.services_by_name.values()}
    return ours | {*admin.SERVICES, health.SERVICE_NAME, orca.SERVICE, V1, V1ALPHA}


async def test_fuzzing_finds_nothing() -> None:
    report = await _run("fuzz", "--seconds", "5", "--seed", str(os.getpid()))
    paths = [name.rpartition(" ")[2] for name in report["methods"]]
    assert {path.split("/")[1] for path in paths} == _all_services()
    assert report["calls"] > 100
    assert report["by_hypothesis"] > 5
    assert report["canaries"] > 0


@pytest.mark.parametrize("flags", [(), ("--tls",)], ids=["plain", "TLS"])
async def test_fuzzing_the_wire_finds_nothing(flags: tuple[str, ...]) -> None:
    report = await _run("wire_fuzz", "--seconds", "2", "--seed", str(os.getpid()), *flags)
    assert report["connections"] > 20
    assert {"status 0", "GOAWAY PROTOCOL_ERROR"} <= {*report["ends"]}
    assert report["canaries"] > 0


# ---- the harness itself must be able to fail


async def _planted(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    """Answer with what was asked; fail, in the two ways there are, when asked to."""
    async for request in requests:
        if request == b"bang":
            raise RuntimeError("planted")
        if request == b"fault":
            error = errors_pb2.RequestError(code=grpc.StatusCode.INTERNAL.value[0], message="deep")
            failed = generation_pb2.SlotError(error=error)
            frame = generation_pb2.StepFrame(errors=[failed])
            yield decode_pb2.DecodeResponse(frame=frame).SerializeToString()
        else:
            yield request


async def test_the_fuzzer_sees_a_planted_fault() -> None:
    server = grpc.aio.server()
    handlers = {"P": grpc.stream_stream_rpc_method_handler(_planted)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("p", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = Target("planted", f"127.0.0.1:{port}", "/p/P", DECODE)

    async def outcome(message: bytes) -> Outcome:
        script = Script("planted", "/p/P", (message,))
        return await play(Script.from_json(script.to_json()), target, channel)

    try:
        async with grpc.aio.insecure_channel(target.address) as channel:
            assert await outcome(b"") == Outcome("OK", "")
            bang = await outcome(b"bang")
            assert bang.code == "UNKNOWN"
            assert "planted" in bang.problem
            assert await outcome(b"fault") == Outcome("OK", "RequestError 13: deep")
            unreadable = await outcome(b"\xff")
            assert unreadable == Outcome(
                "OK", "a response that isn't a millstream.v1.DecodeResponse"
            )
    finally:
        await server.stop(0)


async def _wire_problem(port: int) -> str:
    """Make a connection that asks test.v1.Kinds for a fault."""
    block = hpack.Encoder().encode(request_fields(f"/{SERVICE}/Unary"))
    opened = frame(Kind.HEADERS, 1, block, END_HEADERS)
    sent = PREFACE + settings() + opened + data(1, message(b"bug"), end=True)
    script = WireScript.from_json(WireScript((sent[:30], sent[30:])).to_json())
    return await play_wire(script, port, "127.0.0.2", Counter())


async def test_the_wire_fuzzer_sees_a_planted_fault() -> None:
    async with serving({SERVICE: Kinds().by_name()}) as server:
        assert (await _wire_problem(server.port)).startswith("INTERNAL: ")
    assert "no connection" in await _wire_problem(server.port)
    bad = frame(Kind.HEADERS, 1, b"\x80", END_HEADERS)  # index 0

    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bad)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    garbled = await asyncio.start_server(garble, "127.0.0.1", 0)
    async with garbled:
        assert "isn't HTTP/2" in await _wire_problem(garbled.sockets[0].getsockname()[1])


def test_a_seed_repeats_a_connection() -> None:
    normal = {"/a/B": [b"x" * 100, b""], "/a/C": [b"y"]}
    made = [make_wire_script(random.Random(i), normal) for i in range(50)]
    assert made == [make_wire_script(random.Random(i), normal) for i in range(50)]
    assert len({script.writes for script in made}) > 40


def test_a_seed_repeats_a_call() -> None:
    target = Target("worker", "", "/millstream.v1.WorkerService/WatchLoad", DECODE)
    unseeded = [make_script(random.Random(f"1/{i}"), [target]).path for i in range(3)]
    assert unseeded == [target.path] * 3

    def message(seed: int) -> bytes:
        chance = random.Random(seed)
        made = MessageMaker(chance, 0.3).opening(CHAT.input_type)
        return mutate(chance, made, [made])

    assert [message(i) for i in range(50)] == [message(i) for i in range(50)]
    assert len({message(i) for i in range(50)}) > 40


def test_tame_messages_are_sound() -> None:
    for i in range(100):
        data = MessageMaker(random.Random(i), 0.0).opening(CHAT.input_type)
        assert processor_pb2.ChatRequest.FromString(data).WhichOneof("message") is not None


def test_a_log_is_searched_for_what_it_should_not_hold() -> None:
    log = """
2026-11-20 10:00:00,000 INFO x: phase phase=serving
2026-11-20 10:00:00,000 WARNING x: disconnected worker=127.0.0.1:9 open_requests=3
2026-11-20 10:00:00,000 ERROR asyncio: Task exception was never retrieved
sys:1: RuntimeWarning: coroutine 'x' was never awaited
sys:1: RuntimeWarning: coroutine 'x' was never awaited
"""
    assert complaints(log) == [
        "2 x sys:1: RuntimeWarning: coroutine 'x' was never awaited",
        "1 x 2026-11-20 10:00:00,000 ERROR asyncio: Task exception was never retrieved",
    ]


def test_grpcs_word_on_a_client_that_left_is_no_complaint() -> None:
    harmless = """
2026-11-20 10:00:00,000 ERROR grpc: ExecuteBatchError raised in core by servicer method [/a/B]
  Traceback (most recent call last):
    File "a.py", line 82, in guarded
  errors.InvalidRequestError: the message is not valid

  During handling of the above exception, another exception occurred:

  Traceback (most recent call last):
    File "b.pyx.pxi", line 99, in execute_batch
  grpc._cython.cygrpc.ExecuteBatchError: Failed "execute_batch": (<...>,)
"""
    assert complaints(harmless) == []
    assert complaints(harmless * 2) == []
    assert complaints(harmless + "Traceback (most recent call last):\n") == [
        "1 x Traceback (most recent call last):"
    ]


def test_what_a_process_keeps_open_is_seen(tmp_path: Path) -> None:
    before = Footprint.of(os.getpid())
    kept = [(tmp_path / str(i)).open("wb") for i in range(8)]
    assert Footprint.of(os.getpid()).leaked(before, slack=6) == "8 more files"
    for file in kept:
        file.close()
    assert Footprint.of(os.getpid()).leaked(before, slack=6) == ""


def test_growing_memory_has_a_slope() -> None:
    sampler = Sampler({})
    sampler.samples["a", 1] = [(float(s), 100.0 if s < 30 else 70.0 + s) for s in range(90)]
    growth = sampler.growth("a")
    assert growth is not None
    assert growth.slope_mb_per_min == pytest.approx(60.0)
    assert growth.fitted_s == 59
    assert growth.drift == pytest.approx(59 / 129.5)
    assert sampler.growth("b") is None
