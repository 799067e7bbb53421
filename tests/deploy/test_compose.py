"""The compose files: their schema, their hardening, and their commands run as local processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream_client import Client
from tests.support.deploy.deploy_tools import ROOT, tool
from tests.support.processes.ports import free_port
from tests.support.processes.suite import TICKET_KEY

COMPOSE = ROOT / "deploy" / "compose"
FILES = ("compose.yaml", "compose.cpu.yaml")
MODEL = ROOT / "demo" / "model"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}")


def _read(name: str, **variables: str) -> dict[str, Any]:
    """Read a file as `docker compose` does, with these variables set."""
    text = (COMPOSE / name).read_text(encoding="utf-8")
    text = _VARIABLE.sub(lambda found: variables.get(found[1]) or found[2] or "", text)
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_what_the_specification_allows(name: str) -> None:
    schema = ["--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [tool("check-jsonschema"), *schema, COMPOSE / name],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", FILES)
def test_no_container_can_do_more_than_it_needs(name: str) -> None:
    for service in _read(name).values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for mount in service["volumes"]:
            writable = mount.startswith("cache-") or "model_files" in " ".join(service["command"])
            assert writable or mount.endswith(":ro"), mount


def _command(words: list[str], models: Path) -> list[str]:
    """Make a container's command one of this machine."""
    python, *rest = words
    assert python == "python"
    return [sys.executable, *(word.replace("/models/demo", str(models)) for word in rest)]


@pytest.mark.parametrize("service", ["processor", "aggregated", "prefill", "decode"])
def test_the_services_take_the_settings_of_the_gpu_file(service: str) -> None:
    found = _read("compose.yaml", MODEL_NAME="qwen")[service]
    done = subprocess.run(
        [*_command(found["command"], MODEL), "--print-config"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "/models/model" in done.stdout
    assert "qwen" in done.stdout


@contextlib.asynccontextmanager
async def _cpu_suite(logs: Path) -> AsyncIterator[str]:
    """Run all services of the CPU file with the simulated engine; give the Processor's address."""
    services = _read("compose.cpu.yaml", MILLSTREAM_ENGINE="simulated")
    addresses = {name: f"127.0.0.1:{free_port()}" for name in services}
    running = []
    try:
        for name, service in services.items():
            with (logs / f"{name}.log").open("wb") as log:
                running.append(
                    await asyncio.create_subprocess_exec(
                        *(_at(word, addresses) for word in _command(service["command"], MODEL)),
                        stdout=log,
                        stderr=log,
                        env=_environment(service, addresses[name]),
                    )
                )
        for name, service in services.items():
            await _healthy(service["healthcheck"]["test"], addresses[name], logs / f"{name}.log")
        yield addresses["processor"]
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in running:
            await process.wait()


def _at(word: str, addresses: Mapping[str, str]) -> str:
    """Replace services' names by this machine's addresses, and an address in a container by one."""
    for name, address in addresses.items():
        word = re.sub(rf"\b{name}:50051\b", address, word)
    return re.sub(r"^172\.[\d.]+$", "127.0.0.1", word)


def _environment(service: Mapping[str, Any], address: str) -> dict[str, str]:
    return {
        **os.environ,
        **service.get("environment", {}),
        "MILLSTREAM_LISTEN": address,
        "MILLSTREAM_METRICS_LISTEN": "",
        "MILLSTREAM_BOOTSTRAP_PORT": str(free_port()),
        "MILLSTREAM_TICKET_KEY": TICKET_KEY,
    }


async def _healthy(test: list[str], address: str, log: Path) -> None:
    """Run a container's health check until it passes, as an engine does."""
    kind, program, command, target = test
    assert (kind, program, target) == ("CMD", "millstream", "127.0.0.1:50051")
    entry = "import sys; from millstream_server.cli.entry import main; sys.exit(main())"
    for _ in range(60):
        check = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", entry, command, address),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        if await check.wait() == 0:
            return
    pytest.fail(f"never healthy; the end of its log:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8")[-2000:]


async def test_the_cpu_file_s_own_commands_make_a_suite_that_answers(tmp_path: Path) -> None:
    async with _cpu_suite(tmp_path) as address, Client(address) as client:
        answer = await client.chat("Hello", model="demo", max_new_tokens=5).answer()
        assert answer.usage.completion_tokens == 5
    assert not any("Traceback" in _tail(tmp_path / f"{name}.log") for name in ("prefill", "decode"))
