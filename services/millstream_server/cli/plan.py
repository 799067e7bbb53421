"""What `millstream up` starts: which services, where, with which flags."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from millstream_server.worker.settings import EngineKind

PROCESSOR_PORT = 50051
PREFILL_PORT = 50061
DECODE_PORT = 50071
BOOTSTRAP_PORT = 8998
LOOPBACK = "127.0.0.1"
"""Workers listen here only: nobody but this machine's Processor needs them."""

_LAST_PORT = 65535
_DEMO_MODEL = Path("demo") / "model"
_ALL_INTERFACES = ("0.0.0.0", "[::]")  # noqa: S104  # compared with, not bound


class PlanError(Exception):
    """The suite can't be started as asked; the text says what to give instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the user asked for; ``port`` None is the default port or the next free one."""

    model: Path
    model_name: str
    topology: str = "disaggregated"
    engine: EngineKind = EngineKind.SGLANG
    prefill: int = 1
    decode: int = 1
    host: str = LOOPBACK
    port: int | None = None
    log_dir: Path = Path(".millstream/logs")
    policy: str = "least_loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One process to start. ``gpu`` is its device where there are several."""

    name: str
    role: str
    address: str
    bootstrap_port: int | None = None
    gpu: int | None = None

    @property
    def client_address(self) -> str:
        """Where this machine reaches it."""
        host, _, port = self.address.rpartition(":")
        return f"{LOOPBACK}:{port}" if host in _ALL_INTERFACES else self.address


@dataclass(frozen=True, slots=True)
class Plan:
    """The services, workers first, the Processor last."""

    options: UpOptions
    services: tuple[Service, ...]

    @property
    def workers(self) -> tuple[Service, ...]:
        """All but the Processor."""
        return self.services[:-1]

    @property
    def processor(self) -> Service:
        """The front door."""
        return self.services[-1]

    def command(self, service: Service) -> list[str]:
        """Give the command line that starts a service."""
        module = [sys.executable, "-m", f"millstream_server.{service.role}"]
        if service.role == "processor":
            return module + self._processor_flags()
        return module + self._worker_flags(service)

    def _processor_flags(self) -> list[str]:
        return [
            *("--listen", self.processor.address),
            *("--workers", ",".join(worker.address for worker in self.workers)),
            *("--models", f"{self.options.model_name}={self.options.model}"),
            *("--policy", self.options.policy),
        ]

    def _worker_flags(self, service: Service) -> list[str]:
        flags = [
            *("--listen", service.address),
            *("--model-path", str(self.options.model)),
            *("--model-name", self.options.model_name),
            *("--engine", self.options.engine.value),
        ]
        if service.bootstrap_port is not None:
            flags += ["--bootstrap-port", str(service.bootstrap_port)]
        if service.role == "decode":
            flags += ["--mode", self.options.topology]
        if self.options.engine is EngineKind.SIMULATED:
            # Simulated tokens must be tokens of the model whose tokenizer turns them into text.
            flags += ["--simulated-vocab-size", str(_vocab_size(self.options.model))]
        return flags


def make_plan(options: UpOptions, gpus: int = 0) -> Plan:
    """Decide on services and ports; a default port that is taken becomes the next free one.

    Raises:
        PlanError: the counts make no suite, or no port is free.
    """
    prefill = options.prefill if options.topology == "disaggregated" else 0
    if options.decode < 1 or (options.topology == "disaggregated" and prefill < 1):
        raise PlanError(
            "a suite needs --decode 1 or more, and --prefill 1 or more if disaggregated"
        )
    taken: set[int] = set()
    processor_port = _processor_port(options, taken)
    services = [
        Service(
            name=f"prefill-{i}",
            role="prefill",
            address=f"{LOOPBACK}:{_next_free(LOOPBACK, PREFILL_PORT, taken)}",
            bootstrap_port=_next_free(LOOPBACK, BOOTSTRAP_PORT, taken),
            gpu=_gpu(i - 1, gpus),
        )
        for i in range(1, prefill + 1)
    ]
    services += [
        Service(
            name=f"decode-{i}",
            role="decode",
            address=f"{LOOPBACK}:{_next_free(LOOPBACK, DECODE_PORT, taken)}",
            gpu=_gpu(prefill + i - 1, gpus),
        )
        for i in range(1, options.decode + 1)
    ]
    front = Service(name="processor", role="processor", address=f"{options.host}:{processor_port}")
    return Plan(options, (*services, front))


def default_model() -> Path | None:
    """Find the demo model, in this directory or beside the repository's root."""
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (root / _DEMO_MODEL / "config.json").is_file():
            return root / _DEMO_MODEL
    return None


def choose_model(given: Path | None, name: str) -> tuple[Path, str]:
    """Answer the model's directory and the name to serve it under.

    Raises:
        PlanError: there is no such model; the text says what to give.
    """
    model = given or default_model()
    if model is None:
        raise PlanError(
            f"there is no {_DEMO_MODEL} here; give --model DIR, a directory with config.json, "
            "*.safetensors, tokenizer.json and a chat template"
        )
    if not (model / "config.json").is_file():
        raise PlanError(f"{model} is no model directory: it has no config.json")
    model = model.resolve()
    # The demo model's directory is called "model", which names nothing.
    is_demo = model.parts[-2:] == _DEMO_MODEL.parts
    return model, name or (model.parent.name if is_demo else model.name)


def is_free(host: str, port: int) -> bool:
    """Tell whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections that a stopped suite left in TIME_WAIT don't hinder a new one.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return False
    return True


def _processor_port(options: UpOptions, taken: set[int]) -> int:
    if options.port is None:
        return _next_free(options.host, PROCESSOR_PORT, taken)
    if not is_free(options.host, options.port):
        raise PlanError(
            f"can't listen on {options.host}:{options.port}: it is taken or not this machine's; "
            "leave --port out to get the next free one"
        )
    taken.add(options.port)
    return options.port


def _next_free(host: str, start: int, taken: set[int]) -> int:
    for port in range(start, _LAST_PORT + 1):
        if port not in taken and is_free(host, port):
            taken.add(port)
            return port
    raise PlanError(f"no port from {start} up is free on {host}")


def _gpu(index: int, gpus: int) -> int | None:
    return index % gpus if gpus > 1 else None


def _vocab_size(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return int((config.get("text_config") or config)["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{model}/config.json has no usable vocab_size") from error
