"""`millstream admin`: what each command sends, prints and returns, on a real channel."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from millstream_server.cli.admin.commands import COMMANDS
from millstream_server.runtime.errors import (
    OperationConflictError,
)
from tests.support.processes.command_line import millstream
from tests.support.processes.ports import free_port
from tests.support.processor.fake_kubernetes import (
    NAMESPACE,
    FakeApiServer,
    endpoint,
    endpoint_slice,
)
from tests.support.worker.scripted_admin import ADMIN, DONE, ENGINE, admin, control

DRAINING = {"stage": "OPERATION_STAGE_DRAINING", "openRequests": 3, "elapsed": "0.5s"}
LORA = {"name": "sql", "path": "/adapters/sql", "rank": 8}


@dataclass(frozen=True)
class Case:
    args: str
    rpc: str
    response: Sequence[dict[str, Any]]
    sent: dict[str, Any]
    printed: Sequence[str]


CASES = [
    Case(
        "status",
        "GetEngineState",
        [
            {
                "state": {
                    "drained": True,
                    "released": ["MEMORY_TAG_KV_CACHE", "MEMORY_TAG_CUDA_GRAPH"],
                    "weightVersion": "v1",
                    "adapters": [LORA],
                    "openRequests": 2,
                    "operation": "UpdateWeights",
                    "supported": ["Pause", "Drain"],
                }
            }
        ],
        {},
        [
            "drained, memory released (kv-cache, cuda-graph), UpdateWeights runs",
            "  weights: v1",
            "  requests: 2 open",
            "  adapters: sql",
            "  profile: none",
            "  can do: Pause, Drain",
        ],
    ),
    Case(
        "drain --timeout-s 1.5",
        "Drain",
        [{"progress": DRAINING}, {"progress": DONE}],
        {"timeout": "1.500s"},
        [
            "drained after 1.25 s: no request is open",
            "  out of service until `millstream admin undrain`",
        ],
    ),
    Case("undrain", "Undrain", [{"wasDrained": True}], {}, ["back in service"]),
    Case(
        "pause",
        "Pause",
        [{"openRequests": 1}],
        {"mode": "PAUSE_MODE_IN_PLACE"},
        ["paused; 1 request open until `continue`"],
    ),
    Case(
        "pause --mode retract",
        "Pause",
        [{"wasPaused": True}],
        {"mode": "PAUSE_MODE_RETRACT"},
        ["was paused already; 0 requests open until `continue`"],
    ),
    Case("continue", "Continue", [{"wasPaused": True}], {}, ["goes on"]),
    Case(
        "release-memory kv-cache weights --timeout-s 9",
        "ReleaseMemory",
        [
            {"progress": DRAINING},
            {
                "progress": DONE,
                "result": {
                    "released": ["MEMORY_TAG_KV_CACHE", "MEMORY_TAG_WEIGHTS"],
                    "alreadyReleased": ["MEMORY_TAG_KV_CACHE"],
                    "before": {"hostBytes": 3 << 30},
                    "after": {"hostBytes": 512 << 20},
                },
            },
        ],
        {"tags": ["MEMORY_TAG_KV_CACHE", "MEMORY_TAG_WEIGHTS"], "timeout": "9s"},
        [
            "released: weights",
            "  released before: kv-cache",
            "  host memory: 3.0 GiB before, 512.0 MiB now",
            "  out of service until `millstream admin resume-memory`",
        ],
    ),
    Case(
        "resume-memory weights",
        "ResumeMemory",
        [{"resumed": ["MEMORY_TAG_WEIGHTS"], "released": ["MEMORY_TAG_KV_CACHE"]}],
        {"tags": ["MEMORY_TAG_WEIGHTS"]},
        ["resumed: weights", "  still released: kv-cache; out of service until then"],
    ),
    Case(
        "flush-cache --drain --timeout-s 2",
        "FlushCache",
        [{}],
        {"drain": True, "timeout": "2s"},
        ["the prefix cache is empty"],
    ),
    Case(
        "start-profile --activity cpu --activity memory --steps 1",
        "StartProfile",
        [{"directory": "/traces"}],
        {"activities": ["PROFILE_ACTIVITY_CPU", "PROFILE_ACTIVITY_MEMORY"], "steps": 1},
        ["recording for 1 step, into /traces on the worker"],
    ),
    Case(
        "stop-profile",
        "StopProfile",
        [{"files": [{"path": "/traces/a.json", "bytes": "2048"}]}],
        {},
        ["recorded 1 file on the worker", "  /traces/a.json (2.0 KiB)"],
    ),
    Case(
        "load-lora sql /adapters/sql",
        "LoadLora",
        [{"adapter": LORA}],
        {"name": "sql", "path": "/adapters/sql"},
        ["adapter sql (/adapters/sql, rank 8) loaded"],
    ),
    Case("unload-lora sql", "UnloadLora", [{}], {"name": "sql"}, ["adapter sql removed"]),
    Case(
        "list-loras",
        "ListLoras",
        [{"adapters": [LORA]}],
        {},
        ["1 adapter", "  sql (/adapters/sql, rank 8)"],
    ),
    Case(
        "update-weights --weight-version v2 --path /models/v2 --timeout-s 60",
        "UpdateWeights",
        [
            {"progress": {"stage": "OPERATION_STAGE_CHECKING", "bytesDone": 1, "bytesTotal": 4}},
            {
                "progress": DONE,
                "result": {
                    "previousVersion": "v1",
                    "weightVersion": "v2",
                    "outOfService": "0.25s",
                },
            },
        ],
        {"start": {"weightVersion": "v2", "disk": {"path": "/models/v2"}, "timeout": "60s"}},
        ["weights: v2, before v1; out of service for 0.25 s"],
    ),
    Case(
        "server-status",
        "GetServerStatus",
        [
            {
                "status": {
                    "services": ["millstream.v1.DecodeService"],
                    "millstreamVersion": "1.2.3",
                    "pid": 7,
                    "uptime": "2s",
                    "settings": {"drain_s": "30"},
                    "health": {"": True},
                    "openWork": {"requests": "4", "sessions": "0"},
                    "healthConditions": ["drained"],
                }
            }
        ],
        {},
        [
            "SERVING, pid 7, up 2.00 s",
            "  version: 1.2.3",
            "  health: server SERVING",
            "  conditions: drained",
            "  open work: requests 4",
            "  services: millstream.v1.DecodeService",
            "  settings:",
            "    drain_s = 30",
        ],
    ),
    Case(
        "set-log-level debug --logger millstream_server.worker",
        "SetLogLevel",
        [{"previousLevel": "LOG_LEVEL_INHERIT"}],
        {"logger": "millstream_server.worker", "level": "LOG_LEVEL_DEBUG"},
        ["level of millstream_server.worker: debug, before inherit"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.args)
async def test_a_command_sends_and_prints(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    async with control(**{case.rpc: case.response}) as served:
        code = await admin(*case.args.split(), "--admin", served.address)
    (request,) = served.received
    assert json_format.MessageToDict(request) == case.sent
    first, *more = case.printed
    assert capsys.readouterr().out.splitlines() == [f"{served.address}: {first}", *more]
    assert code == 0


def test_there_is_a_command_for_each_rpc() -> None:
    rpcs = {rpc.name for service in (ENGINE, ADMIN) for rpc in service.methods}
    assert {case.rpc for case in CASES} == rpcs
    assert {case.args.split()[0] for case in CASES} == {command.name for command in COMMANDS}


# ---- progress, JSON, several servers


async def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    checking = {"stage": "OPERATION_STAGE_CHECKING", "bytesDone": 1 << 20, "bytesTotal": 4 << 20}
    progress = [checking, DRAINING, {"stage": "OPERATION_STAGE_APPLYING", "elapsed": "2s"}]
    script = [{"progress": step} for step in [*progress, DONE]]
    async with control(UpdateWeights=script) as served:
        await admin(
            *("update-weights", "--weight-version", "b", "--path", "/b", "--admin", served.address)
        )
    where = served.address
    assert capsys.readouterr().err.splitlines() == [
        f"{where}: checking [#####---------------] 25 % of 4.0 MiB (0.0 s)",
        f"{where}: draining 3 requests open (0.5 s)",
        f"{where}: applying (2.0 s)",
    ]


async def test_json_has_a_line_for_each_event(capsys: pytest.CaptureFixture[str]) -> None:
    async with control(Drain=[{"progress": DRAINING}, {"progress": DONE}]) as served:
        await admin("drain", "--admin", served.address, "--json")
        await admin("undrain", "--admin", f"127.0.0.1:{free_port()}", "--json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["server"] for line in lines[:3]] == [served.address] * 3
    assert lines[0]["progress"]["open_requests"] == 3
    assert lines[2]["ok"] is True
    assert lines[2]["result"]["progress"]["stage"] == "OPERATION_STAGE_DONE"
    assert lines[3]["ok"] is False
    assert lines[3]["error"]["code"] == "UNAVAILABLE"


async def test_all_servers_are_called_and_one_failure_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    busy = OperationConflictError("UpdateWeights runs")
    async with control(Undrain=[{}]) as one, control(Undrain=busy) as two:
        code = await admin("undrain", "--admin", one.address, "--admin", two.address)
    said = capsys.readouterr()
    assert code == 1
    assert said.out == f"{one.address}: wasn't drained; nothing was changed\n"
    assert said.err.splitlines() == [
        f"{two.address}: error: FAILED_PRECONDITION (OPERATION_CONFLICT): UpdateWeights runs",
        "  -> `millstream admin status` shows what is set, and what runs",
    ]


_KEY = "k" * 32


async def test_the_key_of_a_run_is_found_and_is_its_users_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control(_KEY, Undrain=[{}]) as one:
        found = {"name": "decode-1", "role": "decode", "model": "m", "address": ""}
        services = [{**found, "admin": one.address}]
        (tmp_path / "suite.json").write_text(json.dumps({"pid": os.getpid(), "services": services}))
        (tmp_path / "admin-key").write_text(f"{_KEY}\n")
        here, elsewhere = ("--log-dir", str(tmp_path)), ("--log-dir", str(tmp_path / "none"))
        for servers in (
            ("--all",),
            ("--admin", "decode-1"),
            ("--admin", one.address),
            ("--admin", one.address.replace("127.0.0.1", "localhost")),
        ):
            assert await admin("undrain", *servers, *here) == 0, capsys.readouterr().err
        capsys.readouterr()
        assert await admin("undrain", "--admin", one.address, *elsewhere) == 1
        first, advice = capsys.readouterr().err.splitlines()
        assert "error: UNAUTHENTICATED (UNAUTHENTICATED): this server requires a valid API" in first
        assert "takes the key of its run, which only the user who started it can read" in advice
        monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", _KEY)
        assert await admin("undrain", "--admin", one.address, *elsewhere) == 0
        monkeypatch.delenv("MILLSTREAM_ADMIN_KEY")
        read_text = Path.read_text

        def as_another_user(file: Path, *args: Any, **kwargs: Any) -> str:
            if file.name == "admin-key":
                raise PermissionError
            return read_text(file, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", as_another_user)
        capsys.readouterr()
        assert await admin("undrain", "--all", *here) == 2
        assert capsys.readouterr().err == (
            f"error: the suite that has its logs in {tmp_path} is another user's: only the user "
            f"who started it may operate it, since only they can read {tmp_path}/admin-key\n"
        )


async def test_the_suite_of_up_is_found_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(pid: int, *services: tuple[str, str, str, str]) -> None:
        names = ("name", "role", "model", "admin")
        found = [{**dict(zip(names, service, strict=True)), "address": ""} for service in services]
        (tmp_path / "suite.json").write_text(json.dumps({"pid": pid, "services": found}))

    async with control(Undrain=[{}], SetLogLevel=[{}]) as one, control(SetLogLevel=[{}]) as two:
        workers = [("decode-1", "decode", "m", one.address), ("image-1", "diffusion", "n", "x:1")]
        write(os.getpid(), *workers, ("processor", "processor", "", two.address))
        logs = ("--log-dir", str(tmp_path))
        assert await admin("undrain", "--all", "--model", "m", *logs) == 0
        assert await admin("set-log-level", "info", "--admin", "processor", *logs) == 0
        assert capsys.readouterr().out.splitlines() == [
            "decode-1: wasn't drained; nothing was changed",
            "processor: level of the root logger: info, before unspecified",
        ]
        assert await admin("undrain", "--all", "--model", "o", *logs) == 2
        assert "no worker serves 'o'; the suite has: m, n" in capsys.readouterr().err
        assert await admin("undrain", "--admin", "decode-9", *logs) == 2
        assert "nor one of the suite's: decode-1, image-1, processor" in capsys.readouterr().err
        write(2**22 + 1, *workers)
        assert await admin("undrain", "--all", *logs) == 2
        assert "no suite of `millstream up` has its logs in" in capsys.readouterr().err


async def test_all_workers_of_a_cluster_are_found_by_discovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeApiServer() as api, control(Undrain=[{"wasDrained": True}]) as one:
        workers = (endpoint("127.0.0.1", ready=True), endpoint("127.0.0.2", ready=True))
        api.put(endpoint_slice("llm-workers-1", *workers, service="llm-workers"))
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "kubeconfig")))
        port = one.address.partition(":")[2]
        at = ("--workers", f"k8s:{NAMESPACE}/llm-workers", "--admin-port", port)
        found = await millstream("admin", "undrain", "--all", *at)
        twice = await millstream("admin", "undrain", "--admin", one.address, *at)
    # Nobody listens at the second one's address.
    assert found.out == f"127.0.0.1:{port}: back in service\n"
    assert f"127.0.0.2:{port}: " in found.err
    assert (found.code, len(one.received)) == (1, 1)
    assert (twice.code, twice.err) == (2, "error: --workers is for --all, without --model\n")
