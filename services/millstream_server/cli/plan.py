"""What `millstream up` starts: which services, where, with which flags."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from millstream_server.cli.ports import NoPortError, PortClaims
from millstream_server.routing.policy import PolicyName
from millstream_server.worker.settings import EngineKind

PROCESSOR_PORT = 50051
PREFILL_PORT = 50061
DECODE_PORT = 50071
BOOTSTRAP_PORT = 8998
METRICS_PORT = 9464
ADMIN_PORT = 9564
LOOPBACK = "127.0.0.1"
"""Workers listen here only: nobody but this machine's Processor needs them."""

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
    policy: PolicyName = PolicyName.LEAST_LOADED


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One process to start. ``gpu`` is its device where there are several."""

    name: str
    role: str
    address: str
    metrics_port: int
    admin_port: int
    bootstrap_port: int | None = None
    gpu: int | None = None

    @property
    def client_address(self) -> str:
        """Where this machine reaches it."""
        host, _, port = self.address.rpartition(":")
        return f"{LOOPBACK}:{port}" if host in _ALL_INTERFACES else self.address

    def flags(self) -> list[str]:
        """Give the flags that services of all roles have."""
        return [
            *("--listen", self.address),
            *("--metrics-listen", f"{LOOPBACK}:{self.metrics_port}"),
            *("--admin-listen", f"{LOOPBACK}:{self.admin_port}"),
            *("--log-format", "text"),  # `up` reads the phases of a start in it
        ]


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
            *self.processor.flags(),
            *("--workers", ",".join(worker.address for worker in self.workers)),
            *("--models", f"{self.options.model_name}={self.options.model}"),
            *("--policy", self.options.policy.value),
        ]

    def _worker_flags(self, service: Service) -> list[str]:
        flags = [
            *service.flags(),
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


def make_plan(options: UpOptions, ports: PortClaims, gpus: int = 0) -> Plan:
    """Decide on services and ports; a default port that is taken becomes the next free one.

    Raises:
        PlanError: the counts make no suite, or a port is not to be had.
    """
    roles = ["prefill"] * options.prefill if options.topology == "disaggregated" else []
    if options.decode < 1 or (options.topology == "disaggregated" and not roles):
        raise PlanError("a suite needs --decode 1 or more, and --prefill 1 or more to disaggregate")
    roles += ["decode"] * options.decode
    try:
        front = _processor(options, ports)
        workers = [
            _worker(role, roles[:i].count(role) + 1, ports, i % gpus if gpus > 1 else None)
            for i, role in enumerate(roles)
        ]
    except NoPortError as error:
        raise PlanError(str(error)) from error
    return Plan(options, (*workers, front))


def _worker(role: str, number: int, ports: PortClaims, gpu: int | None) -> Service:
    is_prefill = role == "prefill"
    port = ports.next_free(LOOPBACK, PREFILL_PORT if is_prefill else DECODE_PORT)
    return Service(
        name=f"{role}-{number}",
        role=role,
        address=f"{LOOPBACK}:{port}",
        metrics_port=ports.next_free(LOOPBACK, METRICS_PORT),
        admin_port=ports.next_free(LOOPBACK, ADMIN_PORT),
        bootstrap_port=ports.next_free(LOOPBACK, BOOTSTRAP_PORT) if is_prefill else None,
        gpu=gpu,
    )


def _processor(options: UpOptions, ports: PortClaims) -> Service:
    if options.port is None:
        port = ports.next_free(options.host, PROCESSOR_PORT)
    else:
        port = ports.exactly(options.host, options.port)
    return Service(
        name="processor",
        role="processor",
        address=f"{options.host}:{port}",
        metrics_port=ports.next_free(LOOPBACK, METRICS_PORT),
        admin_port=ports.next_free(LOOPBACK, ADMIN_PORT),
    )


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
    if "," in str(model.resolve()) or any(sign in name for sign in ",="):
        raise PlanError(
            "neither the model's directory nor its name may have a comma (nor = its name)"
        )
    model = model.resolve()
    # The demo model's directory is called "model", which names nothing.
    is_demo = model.parts[-2:] == _DEMO_MODEL.parts
    return model, name or (model.parent.name if is_demo else model.name)


def _vocab_size(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return int((config.get("text_config") or config)["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{model}/config.json has no usable vocab_size") from error
