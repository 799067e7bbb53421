"""`millstream doctor`: checks whether this machine can run a suite, with advice."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from millstream_server.cli import machine
from millstream_server.cli.answers import open_console
from millstream_server.cli.flags import (
    Commands,
    add_address,
    add_json,
    add_model_dir,
    command,
    flag,
)
from millstream_server.cli.machine import Finding, Level, miss, ok, warn
from millstream_server.cli.suite.models import (
    PlanError,
    Task,
    check_vision,
    choose_further,
    default_model,
)
from millstream_server.cli.suite.plan import BOOTSTRAP_PORT, LOOPBACK, PORTS, is_free, python_of
from millstream_server.cli.suite.processes import is_serving
from millstream_server.engines.registry import (
    DIFFUSERS,
    EMBEDDERS,
    GENERATORS,
    TEXT_DIFFUSERS,
    Engines,
    adapter,
)
from millstream_server.runtime.settings import SettingsError

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.MISS: "red"}
_ENGINES: dict[Task, Engines[Any]] = {
    Task.IMAGE: DIFFUSERS,
    Task.TEXT_DIFFUSION: TEXT_DIFFUSERS,
    Task.EMBEDDING: EMBEDDERS,
    Task.RERANK: EMBEDDERS,
}
_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_HELP = """\
Check this machine and advise what to do about each miss.

Give it the flags that `up` will get. A line is ok, warn (works, or not needed everywhere) or miss.
The exit code is 1 if one is a miss.

examples:
  millstream doctor
  millstream doctor --all
  millstream doctor --engine vllm --model ~/models/Qwen3-0.6B
"""


def add_doctor(commands: Commands) -> None:
    """Add the command."""
    parser = command(commands, "doctor", _run, _HELP)
    add_model_dir(parser)
    flag(parser, "--engine", "for `up --engine`", choices=GENERATORS.names)
    flag(parser, "--multimodal", "for `up --multimodal`")
    flag(parser, "--all", "for `up --all`")
    add_address(parser)
    add_json(parser, "findings")


def _run(args: argparse.Namespace) -> int:
    console = open_console()
    findings = []
    for finding in _all(args):
        if args.json:
            shown = {"level": finding.level.name.lower(), "what": finding.what}
            print(json.dumps({**shown, "next_step": finding.next_step}), flush=True)
        else:
            _print(console, finding)
        findings.append(finding.level)
    missing = Level.MISS in findings
    if not args.json and not missing and os.environ.get("KUBERNETES_SERVICE_HOST"):
        console.print("\nNothing is missing in this pod.")
    elif not args.json:
        flags = [f"--engine {args.engine}"] if args.engine != "sglang" else []
        flags += [f"--{name}" for name in ("multimodal", "all") if getattr(args, name)]
        flags += [f"--model {args.model}"] if args.model else []
        console.print(
            "\nSomething is missing; the lines marked miss say what to do."
            if missing
            else f"\nThis machine can run a suite: {' '.join(['millstream up', *flags])}",
            soft_wrap=True,
        )
    return 1 if missing else 0


def _print(console: Console, finding: Finding) -> None:
    line = Text(f"{finding.level.name.lower():4}", style=_STYLES[finding.level])
    line.append(f"  {finding.what}", style="default")
    console.print(line, soft_wrap=True)
    if finding.next_step:
        console.print(Text(f"      -> {finding.next_step}"), soft_wrap=True)


def _all(args: argparse.Namespace) -> Iterator[Finding]:
    yield machine.python()
    yield from machine.pins()
    yield machine.grpc_family()
    gpus = machine.gpus()
    yield machine.gpu_finding(gpus)
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        yield from _pod(has_gpu=bool(gpus))
        return
    yield from _engine(args.engine, every_service=args.all, has_gpu=bool(gpus))
    yield machine.memory(
        has_gpu=bool(gpus),
        simulated=args.engine == "simulated",
        multimodal=args.multimodal,
        every_service=args.all,
    )
    yield machine.disk(Path.cwd())
    yield machine.shared_memory(Path("/dev/shm"))  # noqa: S108 - measured, not written
    running = asyncio.run(is_serving(args.address))
    yield _ports(running=running, every_service=args.all)
    sees = args.multimodal or args.all
    model = args.model or default_model(multimodal=sees)
    yield check_model(model)
    if sees and model is not None:
        yield from _vision(model)
    if args.all:
        yield from (_further(task, args.engine) for task in Task)
    yield machine.buf()
    if running:
        yield ok(f"a suite serves at {args.address}")
    else:
        yield warn(f"no suite serves at {args.address}", "start one with `millstream up`")


def _pod(*, has_gpu: bool) -> Iterator[Finding]:
    """Check a pod: its image has what its role needs, and no suite of `up` runs there."""
    engines = [name for name in ("sglang", "vllm") if importlib.util.find_spec(name)]
    if "sglang" in engines:
        yield from machine.engine(has_gpu=has_gpu)
    else:
        yield ok("vllm is installed" if engines else "no engine: this is the Processor's image")
    yield machine.memory(has_gpu=has_gpu, simulated=True)
    yield machine.disk(Path.cwd())
    yield machine.shared_memory(Path("/dev/shm"), "set shm.size of the pool")  # noqa: S108 - as above


def _engine(engine: str, *, every_service: bool, has_gpu: bool) -> Iterator[Finding]:
    """Check that what computes the tokens is installed, and with every service the images."""
    if engine == "simulated":
        yield ok("the simulated engine needs no packages of its own")
        return
    try:
        python = python_of(engine)
    except PlanError as error:
        own = adapter(engine).environment
        yield miss(str(error), f"`{own.command}` in a checkout of Millstream" if own else "")
        return
    if python != sys.executable:
        yield ok(f"{engine} has an environment of its own: {python}")
        if every_service:  # images are made in this one
            yield from machine.diffusers(has_gpu=has_gpu)
    elif engine == "sglang":
        yield from machine.engine(has_gpu=has_gpu)


def _vision(model: Path) -> Iterator[Finding]:
    try:
        check_vision(model)
    except PlanError as error:
        yield miss(str(error), "leave --multimodal out, or give --model DIR of a vision model")


def _further(task: Task, engine: str) -> Finding:
    """Check that one of the models of `up --all` is there, and that the engine can serve it."""
    try:
        model = choose_further(task, None)
        model.flags(engine)
    except PlanError as error:
        return miss(str(error), "run `millstream up --all` in a checkout of Millstream")
    except SettingsError as error:
        return miss(
            str(error), "use another --engine, or name the models you want instead of --all"
        )
    able = _ENGINES[task].names
    if (name := model.engine(engine)) not in able:
        return miss(
            f"{name} can't serve model {model.path}; {' and '.join(able)} can",
            f"`millstream up --engine {engine}` without --all, with --embedding-model and the like",
        )
    return ok(f"model {model.path} is there")


def _ports(*, running: bool, every_service: bool) -> Finding:
    roles = ["processor", "prefill", "decode", "encode"]
    roles += ["diffusion", "embedding"] if every_service else []
    wanted = (*(PORTS[role] for role in roles), BOOTSTRAP_PORT)
    taken = ", ".join(str(port) for port in wanted if not is_free(LOOPBACK, port))
    if not taken:
        return ok(f"ports {', '.join(map(str, wanted))} are free")
    if running:
        return ok(f"ports {taken} are in use, as they are while a suite runs")
    return warn(f"ports {taken} are taken", "nothing: `millstream up` takes the next free ones")


_VOCABULARIES = ("tokenizer.json", "tekken.json", "*.tiktoken", "*.model")
"""Files of which a Processor makes a tokenizer."""


def check_model(directory: Path | None) -> Finding:
    """Check that all files needed to serve a model exist."""
    if directory is None:
        return miss(
            "there is no demo/model here",
            "give --model DIR, a directory with config.json, *.safetensors, tokenizer.json and a "
            "chat template",
        )
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    if not any(file for pattern in _VOCABULARIES for file in directory.glob(pattern)):
        missing.append("tokenizer.json")
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
