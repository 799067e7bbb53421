"""`millstream doctor`: checks whether this machine can run a suite, with advice."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from millstream_server.cli import machine
from millstream_server.cli.answers import open_console
from millstream_server.cli.flags import Commands, add_address, add_model_dir, command
from millstream_server.cli.machine import Finding, Level, miss, ok, warn
from millstream_server.cli.suite.models import default_model
from millstream_server.cli.suite.plan import BOOTSTRAP_PORT, LOOPBACK, PORTS, is_free
from millstream_server.cli.suite.processes import is_serving

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.MISS: "red"}
_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def add_doctor(commands: Commands) -> None:
    """Add the command."""
    parser = command(
        commands,
        "doctor",
        _run,
        "Check this machine and advise what to do about each miss.",
        "A line is ok, warn (works, or not needed everywhere) or miss. The exit code is 1 if one is"
        " a miss.",
        "millstream doctor",
        "millstream doctor --model ~/models/Qwen3-0.6B",
    )
    add_model_dir(parser)
    add_address(parser)


def _run(args: argparse.Namespace) -> int:
    console = open_console()
    worst = Level.OK
    for finding in _all(args.model, args.address):
        _print(console, finding)
        worst = max(worst, finding.level)
    if worst is Level.MISS:
        console.print("\nSomething is missing; the lines marked miss say what to do.")
        return 1
    console.print("\nThis machine can run a suite: millstream up")
    return 0


def _print(console: Console, finding: Finding) -> None:
    line = Text(f"{finding.level.name.lower():4}", style=_STYLES[finding.level])
    line.append(f"  {finding.what}", style="default")
    console.print(line, soft_wrap=True)
    if finding.next_step:
        console.print(Text(f"      -> {finding.next_step}"), soft_wrap=True)


def _all(model: Path | None, address: str) -> Iterator[Finding]:
    yield machine.python()
    yield from machine.pins()
    yield machine.grpc_family()
    gpus = machine.gpus()
    yield machine.gpu_finding(gpus)
    yield from machine.engine(has_gpu=bool(gpus))
    yield machine.memory(has_gpu=bool(gpus))
    yield machine.disk(Path.cwd())
    yield machine.shared_memory(Path("/dev/shm"))  # noqa: S108 - measured, not written
    running = asyncio.run(is_serving(address))
    yield _ports(running=running)
    yield check_model(model or default_model())
    yield machine.buf()
    if running:
        yield ok(f"a suite serves at {address}")
    else:
        yield warn(f"no suite serves at {address}", "start one with `millstream up`")


def _ports(*, running: bool) -> Finding:
    roles = ("processor", "prefill", "decode", "encode")
    wanted = (*(PORTS[role] for role in roles), BOOTSTRAP_PORT)
    taken = ", ".join(str(port) for port in wanted if not is_free(LOOPBACK, port))
    if not taken:
        return ok(f"ports {', '.join(map(str, wanted))} are free")
    if running:
        return ok(f"ports {taken} are in use, as they are while a suite runs")
    return warn(f"ports {taken} are taken", "nothing: `millstream up` takes the next free ones")


def check_model(directory: Path | None) -> Finding:
    """Check that all files needed to serve a model exist."""
    if directory is None:
        return miss(
            "there is no demo/model here",
            "give --model DIR, a directory with config.json, *.safetensors, tokenizer.json and a "
            "chat template",
        )
    missing = [
        name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()
    ]
    missing += _missing_weights(directory)
    if missing:
        return miss(
            f"model {directory} lacks {', '.join(missing)}",
            "download or build the model again, completely",
        )
    if not _has_chat_template(directory):
        return warn(
            f"model {directory} is complete but has no chat template",
            "use `millstream complete`, or a chat model for `millstream chat`",
        )
    return ok(f"model {directory} is complete")


def _missing_weights(directory: Path) -> list[str]:
    """List missing weight files of the index; without any weights return their kind."""
    try:
        promised = machine.read_json(directory / "model.safetensors.index.json")["weight_map"]
    except (OSError, ValueError, KeyError):
        return [] if any(directory.glob("*.safetensors")) else ["*.safetensors"]
    return [name for name in sorted(set(promised.values())) if not (directory / name).is_file()]


def _has_chat_template(directory: Path) -> bool:
    if any((directory / name).exists() for name in _CHAT_TEMPLATES):
        return True
    try:
        return bool(machine.read_json(directory / "tokenizer_config.json").get("chat_template"))
    except (OSError, ValueError):
        return False
