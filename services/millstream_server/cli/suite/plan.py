"""Plans a suite for `millstream up`: which services, addresses and flags."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from millstream_server.cli.flags import DEFAULT_LOG_DIR
from millstream_server.cli.suite.models import FurtherModel, PlanError, check_vision
from millstream_server.engines.registry import adapter, encoder_for
from millstream_server.engines.torch_on_cpu import gpu_present
from millstream_server.routing.policy import PolicyName
from millstream_server.runtime.settings import SettingsError

_LAST_PORT = 65535
PORTS = {
    "processor": 50051,
    "prefill": 50061,
    "decode": 50071,
    "encode": 50081,
    "diffusion": 50091,
    "embedding": 50101,
}
"""By role, from which on the first free one is taken."""
BOOTSTRAP_PORT = 8998
_DEFAULT_PORTS = {**PORTS, "bootstrap": BOOTSTRAP_PORT, "metrics": 9464, "admin": 9564}
_STEPS = {
    **{role: port - PORTS["processor"] for role, port in PORTS.items()},
    "bootstrap": 60,
    "metrics": 70,
    "admin": 90,
}
"""Where each kind begins above the Processor's port, if that is given: all others move with it."""
LOOPBACK = "127.0.0.1"
"""Workers listen here only: just this machine's Processor needs them."""
_ALL_INTERFACES = ("0.0.0.0", "[::]")  # noqa: S104 - compared with, not bound


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A stopped suite's connections in TIME_WAIT don't make a port unavailable.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return False
    return True


class PortClaims(contextlib.ExitStack):
    """Ports that no other `millstream up` on this machine will use; a context manager.

    A service listens only after it has loaded its code, and a second suite may choose its ports in
    the meantime. So each port is also claimed with an abstract Unix socket, whose name only one
    process can bind, and which ends with the process. (Linux only; elsewhere the race remains.)
    """

    def next_free(self, host: str, start: int) -> int:
        """Claim the first free port from ``start`` up."""
        if not is_free(host, 0):
            raise PlanError(f"{host} is no address of this machine")
        for port in range(start, _LAST_PORT + 1):
            if self._claim(host, port):
                return port
        raise PlanError(f"no port from {start} up is free on {host}")

    def exactly(self, host: str, port: int) -> int:
        if not self._claim(host, port):
            raise PlanError(f"can't listen on {host}:{port}: it is taken or not this machine's")
        return port

    def _claim(self, host: str, port: int) -> bool:
        if sys.platform == "linux":
            name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                name.bind(f"\0millstream/port/{port}")
            except OSError:
                name.close()
                return False
            self.enter_context(name)
        return is_free(host, port)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The user's options; ``port`` None: the default ports, or the next free ones."""

    model: Path
    model_name: str
    topology: str = "disaggregated"
    engine: str = "sglang"
    encode: int = 0
    """Encode workers; with one or more the suite is multimodal."""
    prefill: int = 1
    decode: int = 1
    host: str = LOOPBACK
    port: int | None = None
    log_dir: Path = DEFAULT_LOG_DIR
    policy: PolicyName = PolicyName.LEAST_LOADED
    further: tuple[FurtherModel, ...] = ()
    """Models for other tasks than chats."""
    engine_args: tuple[str, ...] = ()
    """The engine's own arguments, for prefill and decode workers."""

    def first_port(self, kind: str) -> int:
        """Return the port from which on a role, "bootstrap", "metrics" or "admin" takes its own.

        Raises:
            PlanError: there is none above the one that was given.
        """
        if self.port is None:
            return _DEFAULT_PORTS[kind]
        if self.port > _LAST_PORT - 100:
            raise PlanError(f"--port {self.port} leaves no room for the suite's other ports above")
        return self.port + _STEPS[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedService:
    """One process to start. ``gpu`` is its device where there are several."""

    name: str
    role: str
    address: str
    metrics_port: int
    admin_port: int
    bootstrap_port: int | None = None
    gpu: int | None = None
    further: FurtherModel | None = None
    """Its model, if that isn't the one for chats."""

    @property
    def client_address(self) -> str:
        """Its address for clients on this machine."""
        host, _, port = self.address.rpartition(":")
        return f"{LOOPBACK}:{port}" if host in _ALL_INTERFACES else self.address

    @property
    def admin_address(self) -> str:
        """Its admin address; only this machine reaches it."""
        return f"{LOOPBACK}:{self.admin_port}"

    def flags(self) -> list[str]:
        return [
            *("--listen", self.address),
            *("--metrics-listen", f"{LOOPBACK}:{self.metrics_port}"),
            *("--admin-listen", self.admin_address),
            *("--log-format", "text"),  # `up` reads the phases of a start from it
        ]


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """The services of a suite, workers first, the Processor last."""

    options: UpOptions
    services: tuple[PlannedService, ...]

    @property
    def workers(self) -> tuple[PlannedService, ...]:
        return self.services[:-1]

    @property
    def processor(self) -> PlannedService:
        return self.services[-1]

    def first(self, role: str) -> PlannedService | None:
        return next((service for service in self.services if service.role == role), None)

    def command(self, service: PlannedService) -> list[str]:
        module = [self._python(service), "-m", f"millstream_server.{service.role}"]
        if service.role == "processor":
            return module + self._processor_flags()
        if service.role == "encode":
            own = [*self._model_flags(), *self._flags_of_engine(service)]
            return module + service.flags() + own
        if service.further is not None:
            return module + service.flags() + service.further.flags(self.options.engine)
        return module + self._worker_flags(service)

    def _python(self, service: PlannedService) -> str:
        """Return the Python that runs a service: an engine may have an environment of its own."""
        return sys.executable if service.role == "processor" else python_of(self._engine(service))

    def _engine(self, worker: PlannedService) -> str:
        chats = self.options.engine
        if worker.role == "encode" and chats != "simulated":
            return encoder_for(self.options.model)
        return worker.further.engine(chats) if worker.further else chats

    def preload(self, service: PlannedService) -> str:
        """Return what the fork server imports that starts a service; empty: none does.

        With a GPU none does: a process that has used CUDA can't be forked.
        """
        if service.role == "processor" or sys.platform != "linux" or gpu_present():
            return ""
        return adapter(self._engine(service)).preload

    def weights_record(self, service: PlannedService) -> Path:
        """Return the file that notes a worker's last update of weights for its restarts."""
        return self.options.log_dir.resolve() / f"{service.name}.weights.json"

    def _processor_flags(self) -> list[str]:
        models = [f"{self.options.model_name}={self.options.model}"]
        models += [further.processor_entry for further in self.options.further]
        defaults = [further.default_entry for further in self.options.further]
        return [
            *self.processor.flags(),
            *("--workers", ",".join(worker.address for worker in self.workers)),
            *("--models", ",".join(models)),
            *("--policy", self.options.policy.value),
            *(("--default-models", ",".join(defaults)) if defaults else ()),
        ]

    def _model_flags(self) -> list[str]:
        return [
            *("--model-path", str(self.options.model)),
            *("--model-name", self.options.model_name),
        ]

    def _worker_flags(self, service: PlannedService) -> list[str]:
        flags = [
            *service.flags(),
            *self._model_flags(),
            *("--engine", self.options.engine),
            *("--weights-record", str(self.weights_record(service))),
        ]
        if service.bootstrap_port is not None:
            flags += ["--bootstrap-port", str(service.bootstrap_port)]
        if service.role == "decode":
            flags += ["--mode", self.options.topology]
        flags += self._flags_of_engine(service)
        if self.options.engine_args:
            flags += ["--", *self.options.engine_args]
        return flags

    def _flags_of_engine(self, service: PlannedService) -> Sequence[str]:
        try:
            return adapter(self.options.engine).suite_flags(service.role, self.options.model)
        except SettingsError as error:
            raise PlanError(str(error)) from error


def python_of(engine: str) -> str:
    """Return the Python that an engine's workers run in.

    Raises:
        PlanError: it isn't there; the text says what makes it.
    """
    own = adapter(engine).environment
    if own is None or importlib.util.find_spec(own.package) is not None:
        return sys.executable
    beside = (Path(__file__).resolve().parents[4], Path(sys.prefix).parent)
    for folder in beside:  # a checkout, and wherever this environment is
        if (python := folder / own.folder / "bin" / "python").is_file():
            return str(python)
    raise PlanError(
        f"--engine {engine}: {own.package} isn't installed here, and there is no {own.folder}; run "
        f"`{own.command}` in a checkout of Millstream first (docs/install.md)"
    )


def make_plan(options: UpOptions, ports: PortClaims, gpus: int = 0) -> SuitePlan:
    """Plan services and ports; a default port in use is replaced by the next free one.

    Raises:
        PlanError: the counts or the models' names make no suite, or a port is not available.
    """
    names = [options.model_name, *(model.name for model in options.further)]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(
                f"two models would be called {name!r}: rename a directory, or give --model-name"
            )
    python_of(options.engine)  # before anything is started
    roles = ["prefill"] * options.prefill if options.topology == "disaggregated" else []
    if options.decode < 1 or (options.topology == "disaggregated" and not roles):
        raise PlanError("a suite needs --decode 1 or more, and --prefill 1 or more to disaggregate")
    roles = ["encode"] * options.encode + roles + ["decode"] * options.decode
    if options.encode:
        check_vision(options.model)  # before anything is started
    front = _service(options, ports, "processor", "processor", options.host)
    wanted: list[tuple[str, str, FurtherModel | None]] = [(role, role, None) for role in roles]
    wanted += [(model.task.value, model.task.role, model) for model in options.further]
    workers = []
    for i, (kind, role, further) in enumerate(wanted):
        number = 1 + sum(other == kind for other, _, _ in wanted[:i])
        worker = _service(options, ports, f"{kind}-{number}", role, LOOPBACK)
        gpu = i % gpus if gpus > 1 else None
        workers.append(replace(worker, further=further, gpu=gpu))
    return SuitePlan(options, (*workers, front))


def _service(
    options: UpOptions, ports: PortClaims, name: str, role: str, host: str
) -> PlannedService:
    def claimed(kind: str, host: str = LOOPBACK) -> int:
        return ports.next_free(host, options.first_port(kind))

    exactly = role == "processor" and options.port is not None
    port = ports.exactly(host, options.first_port(role)) if exactly else claimed(role, host)
    return PlannedService(
        name=name,
        role=role,
        address=f"{host}:{port}",
        metrics_port=claimed("metrics"),
        admin_port=claimed("admin"),
        bootstrap_port=claimed("bootstrap") if role == "prefill" else None,
    )
