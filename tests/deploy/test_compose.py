"""The compose files: their schema, their hardening, and their commands run as local processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream_client import Client
from millstream_testing.waiting import until
from tests.support.deploy.deploy_tools import ROOT, tool
from tests.support.processes import forked
from tests.support.processes.ports import free_port
from tests.support.processes.suite import TICKET_KEY

COMPOSE = ROOT / "deploy" / "compose"
FILES = ("compose.yaml", "compose.cpu.yaml")
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-+?])([^}]*))?\}")


def _read(name: str, profiles: Sequence[str] = (), **variables: str) -> dict[str, Any]:
    """Read what `docker compose` would start, with these profiles and variables; "*": all."""

    def value(found: re.Match[str]) -> str:
        given = variables.get(found[1], "")
        if found[2] == "+":
            return found[3] if given else ""
        return given or (found[3] if found[2] == "-" else "")

    text = (COMPOSE / name).read_text(encoding="utf-8")
    services: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(value, text))["services"]
    wanted = {*profiles}
    return {
        key: service
        for key, service in services.items()
        if "profiles" not in service or "*" in wanted or wanted & {*service["profiles"]}
    }


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
    for service in _read(name, ["*"]).values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for mount in service["volumes"]:
            writable = mount.startswith("cache-") or "model_files" in " ".join(service["command"])
            assert writable or mount.endswith(":ro"), mount


def _here(words: list[str]) -> list[str]:
    """Return a container's module and its arguments, with the directories of this machine."""
    python, dash, *rest = words
    assert (python, dash) == ("python", "-m")
    mounts = [mount.split(":") for mount in _read("compose.cpu.yaml")["processor"]["volumes"]]
    here = {target: str((COMPOSE / source).resolve()) for source, target, _ in mounts}
    pattern = "|".join(sorted(map(re.escape, here), reverse=True))
    return [re.sub(pattern, lambda m: here[m[0]], word) for word in rest]


GPU_SERVICES = [name for name in _read("compose.yaml", ["*"]) if not name.endswith("model")]


def test_every_role_has_a_service_and_vllm_too() -> None:
    for file in FILES:
        commands = [service["command"] for service in _read(file, ["*"]).values()]
        modules = {words[2].rpartition(".")[2] for words in commands}
        roles = {"processor", "encode", "prefill", "decode", "diffusion", "embedding"}
        assert modules - {"model_files"} == roles, file
    engines = {name for name in GPU_SERVICES if name.startswith("vllm")}
    assert engines == {"vllm", "vllm-prefill", "vllm-decode"}
    for name in engines:
        service = _read("compose.yaml", ["*"])[name]
        assert service["image"].startswith("millstream-worker-vllm:")
        assert service["command"][3:5] == ["--engine", "vllm"]


def test_profiles_start_what_belongs_together() -> None:
    for profiles in (["aggregated"], ["disaggregated"], ["vllm"], ["vllm-disaggregated"]):
        started = {*_read("compose.yaml", profiles)} - {"model", "processor"}
        assert len(started) == (2 if "disagg" in profiles[0] else 1), profiles
    more = {*_read("compose.yaml", ["aggregated", "encode", "diffusion", "embedding"])}
    assert more >= {"encode", "diffusion", "image-model", "embedding", "embedding-model"}
    # The Processor serves what has files, and no more.
    for given, models in (({}, "m"), ({"IMAGE_MODEL_URI": "hf://a/b"}, "m,images")):
        command = _read("compose.yaml", MODEL_NAME="m", **given)["processor"]["command"]
        assert re.sub(r"=[^,]*", "", command[4]) == models


@pytest.mark.parametrize("service", GPU_SERVICES)
def test_the_services_take_the_settings_of_the_gpu_file(service: str) -> None:
    found = _read("compose.yaml", ["*"], MODEL_NAME="qwen")[service]
    _, _, module, *words = found["command"]
    done = forked.run("services", module, *words, "--print-config")
    assert done.returncode == 0, done.stderr
    own = {"diffusion": "images", "embedding": "vectors"}.get(service, "model")
    assert f"/models/{own}" in done.stdout
    assert {"model": "qwen"}.get(own, own) in done.stdout


@contextlib.asynccontextmanager
async def _cpu_suite(logs: Path) -> AsyncIterator[str]:
    """Run all services of the CPU file with the simulated engine; give the Processor's address."""
    engines = {f"MILLSTREAM_{of}ENGINE": "simulated" for of in ("", "ENCODE_", "DIFFUSION_")}
    services = _read("compose.cpu.yaml", ["all"], **engines)
    addresses = {name: f"127.0.0.1:{free_port()}" for name in services}
    addresses["workers"] = ",".join(addresses[name] for name in services if name != "processor")
    running = []
    try:
        for name, service in services.items():
            words = [_at(word, addresses) for word in _here(service["command"])]
            environment = _environment(service, addresses[name])
            running.append(_start(words, environment, logs / f"{name}.log"))
        for name, service in services.items():
            await _healthy(service["healthcheck"]["test"], addresses[name], logs / f"{name}.log")
        yield addresses["processor"]
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            await asyncio.to_thread(process.wait)


def _start(words: Sequence[str], environment: Mapping[str, str], file: Path) -> forked.Process:
    with file.open("wb") as log, Path(os.devnull).open("rb") as nothing:
        return forked.start("services", words[0], words[1:], (nothing, log, log), environment)


def _at(word: str, addresses: Mapping[str, str]) -> str:
    """Put addresses of this machine in the place of the name of all workers, and of a container."""
    word = word.replace("dns:workers:50051", addresses["workers"])
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
    kind, program, command, target, *more = test
    assert (kind, program, target) == ("CMD", "millstream", "127.0.0.1:50051")
    entry = "import sys; from millstream_server.cli.entry import main; sys.exit(main())"
    for _ in range(60):
        check = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", entry, command, address, *more),
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
        assert len(await client.models()) == 5
        await until(lambda: _all_ready(client), 30)
    logs = [_tail(tmp_path / f"{name}.log") for name in _read("compose.cpu.yaml", ["all"])]
    assert not any("Traceback" in log for log in logs)


async def _all_ready(client: Client) -> bool:
    return all(model.ready for model in await client.models())
