"""`millstream admin` when a call fails, or is wrong: what it says, and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_client.errors import UnavailableError
from millstream_server.cli.admin.commands import COMMANDS
from millstream_server.cli.admin.output import explain
from millstream_server.cli.entry import run_plain
from millstream_server.cli.flags import Destination
from millstream_server.runtime.errors import (
    AdapterExistsError,
    DeadlinePassedError,
    InvalidRequestError,
    ServingError,
    UnsupportedFeatureError,
)
from millstream_testing.in_process import worker
from tests.support.processes.ports import free_port
from tests.support.processes.secured_front import secured_front
from tests.support.worker.scripted_admin import admin, control


@pytest.mark.parametrize(
    ("args", "rpc", "error", "said"),
    [
        (
            "drain --timeout-s 1",
            "Drain",
            DeadlinePassedError("2 requests are open after 1 s"),
            [
                "error: DEADLINE_EXCEEDED (DEADLINE_EXCEEDED): 2 requests are open after 1 s",
                ("-> the worker stays out of service: `drain` again waits on, `undrain` puts it "
                "back"),
            ],
        ),
        (
            "load-lora sql /a",
            "LoadLora",
            AdapterExistsError("sql is loaded"),
            [
                "error: ALREADY_EXISTS (ADAPTER_EXISTS): sql is loaded",
                "-> to replace it, `unload-lora` it first",
            ],
        ),
        (
            "load-lora sql /a",
            "LoadLora",
            UnsupportedFeatureError("this engine can't load LoRA adapters"),
            [
                ("error: INVALID_ARGUMENT (UNSUPPORTED_FEATURE): this engine can't load LoRA "
                "adapters"),
                ("-> SGLang takes adapters on a worker that was started with "
                "--max-loras-per-batch"),
            ],
        ),
        (
            "update-weights --weight-version v --path /etc",
            "UpdateWeights",
            InvalidRequestError.of("start.disk.path", "is below no --weights-dirs"),
            [
                ("error: INVALID_ARGUMENT (INVALID_REQUEST): start.disk.path: is below no "
                "--weights-dirs")
            ],
        ),
        ("drain", "Drain", None, [("error: the call ended without a result; `status` says what was "
                                  "done")]),
    ],
)  # fmt: skip
async def test_a_failure_has_its_reason_and_advice(
    args: str,
    rpc: str,
    error: ServingError | None,
    said: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with control(**{rpc: error or []}) as served:
        code = await admin(*args.split(), "--admin", served.address)
    printed = capsys.readouterr()
    first, *more = said
    lines = [f"{served.address}: {first}", *(f"  {line}" for line in more)]
    assert (code, printed.out, printed.err.splitlines()) == (1, "", lines)


def test_a_connection_that_broke_is_not_one_that_could_not_be_made() -> None:
    broke = UnavailableError("broke", reason="CONNECTION_LOST", retryable=True)
    failed = explain(broke, Destination("a:1"), "update-weights")
    assert failed.lines == [
        "error: UNAVAILABLE (CONNECTION_LOST): the connection to a:1 broke before the end",
        "-> does the server still run? `millstream admin status` says what was done",
    ]


async def test_nobody_there_and_another_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    assert await admin("status", "--admin", nobody) == 1
    said = capsys.readouterr().err
    assert f"{nobody}: error: UNAVAILABLE (SERVER_NOT_REACHED): {nobody} can't be reached: " in said
    assert "-> does the server run, with --admin-listen at this address?" in said
    async with worker() as one:
        assert await admin("status", "--admin", one.address) == 1
        said = capsys.readouterr().err
        assert f"{one.address} doesn't have this operation" in said
        assert "-> give the address of --admin-listen" in said
    async with secured_front(tmp_path) as front:
        assert await admin("status", "--admin", front.address, *front.tls) == 1
        assert "-> is it the address of --admin-listen? " in capsys.readouterr().err
        assert await admin("status", "--admin", front.address) == 1
        assert "if it serves TLS, give --tls-ca-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("status", "name the admin address of each server, --admin HOST:PORT"),
        ("status --all --admin a:1", "give either --admin or --all"),
        ("status --model m --admin a:1", "--model chooses among the workers of --all"),
        ("status --admin a:99999", "'a:99999' is not HOST:PORT"),
        ("flush-cache --timeout-s 1 --admin a:1", "--timeout-s is for --drain"),
    ],
)
def test_wrong_usage_is_code_2(args: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plain(["admin", *args.split()]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("release-memory gpu", "'gpu' is none of kv-cache, weights, cuda-graph"),
        ("start-profile --steps 0", "'0' is not a whole number from 1 on"),
        ("update-weights --path p", "required: --weight-version"),
        ("update-weights --weight-version v", "one of the arguments --path --safetensors"),
        ("drain --timeout-s 0", "'0' is not a number of seconds above 0"),
    ],
)
def test_flags_are_checked(args: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run_plain(["admin", *args.split()])
    assert left.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_help_teaches_with_an_example_that_parses(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_plain(["admin", command, "--help"])
    text = capsys.readouterr().out
    example = text.partition("\nexamples:\n")[2].strip()
    assert example.startswith(f"millstream admin {command}")
    with pytest.raises(SystemExit) as left:
        run_plain([*example.split()[1:], "--help"])  # read up to its end
    assert left.value.code == 0
