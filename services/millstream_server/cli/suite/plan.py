"""Plans a suite for `millstream up`: which services, addresses and flags."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from millstream_server.cli.suite.further import DEMOS, FurtherModel, Task, marker
from millstream_server.cli.suite.ports import NoPortError, PortClaims
from millstream_server.cli.suite.running import DEFAULT_LOG_DIR
from millstream_server.media import families
from millstream_server.media.families.family import Family
from millstream_server.routing.policy import PolicyName
from millstream_server.worker.settings import EngineKind

PROCESSOR_PORT = 50051
PREFILL_PORT = 50061
DECODE_PORT = 50071
ENCODE_PORT = 50081
DIFFUSION_PORT = 50091
EMBEDDING_PORT = 50101
BOOTSTRAP_PORT = 8998
METRICS_PORT = 9464
ADMIN_PORT = 9564
LOOPBACK = "127.0.0.1"
"""Workers listen here only: just this machine's Processor needs them."""

_DEMO_MODEL = Path("demo") / "model"
_DEMO_VISION_MODEL = Path("demo") / "vision" / "model"
_DEMO_PICTURE = Path("demo") / "vision" / "pictures" / "red-circle.png"
_PORTS = {
    "encode": ENCODE_PORT,
    "prefill": PREFILL_PORT,
    "decode": DECODE_PORT,
    "diffusion": DIFFUSION_PORT,
    "embedding": EMBEDDING_PORT,
}
_ALL_INTERFACES = ("0.0.0.0", "[::]")  # noqa: S104 - compared with, not bound


class PlanError(Exception):
    """The suite can't be started with these options; the text has advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The user's options; ``port`` None: the default port or the next free one."""

    model: Path
    model_name: str
    topology: str = "disaggregated"
    engine: EngineKind = EngineKind.SGLANG
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

    def check(self) -> None:
        """Check that the options fit together.

        Raises:
            PlanError: two models have the same name.
        """
        names = [self.model_name, *(model.name for model in self.further)]
        for name in names:
            if names.count(name) > 1:
                raise PlanError(
                    f"two models would be called {name!r}: rename a directory, or give --model-name"
                )


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
        """Return the flags that services of all roles have."""
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
        """All but the Processor."""
        return self.services[:-1]

    @property
    def processor(self) -> PlannedService:
        """The Processor."""
        return self.services[-1]

    def first(self, role: str) -> PlannedService | None:
        """Return the first service of a role; None if there is none."""
        return next((service for service in self.services if service.role == role), None)

    def command(self, service: PlannedService) -> list[str]:
        """Return the command line that starts a service."""
        module = [sys.executable, "-m", f"millstream_server.{service.role}"]
        if service.role == "processor":
            return module + self._processor_flags()
        if service.role == "encode":
            return module + self._encode_flags(service)
        if service.further is not None:
            return module + service.flags() + service.further.flags(self.options.engine)
        return module + self._worker_flags(service)

    def weights_record(self, service: PlannedService) -> Path:
        """Return the file that notes a worker's last update of weights for its restarts."""
        return self.options.log_dir.resolve() / f"{service.name}.weights.json"

    def _processor_flags(self) -> list[str]:
        models = [f"{self.options.model_name}={self.options.model}"]
        models += [further.processor_entry for further in self.options.further]
        return [
            *self.processor.flags(),
            *("--workers", ",".join(worker.address for worker in self.workers)),
            *("--models", ",".join(models)),
            *("--policy", self.options.policy.value),
        ]

    def _model_flags(self) -> list[str]:
        return [
            *("--model-path", str(self.options.model)),
            *("--model-name", self.options.model_name),
        ]

    def _encode_flags(self, service: PlannedService) -> list[str]:
        flags = [*service.flags(), *self._model_flags()]
        if self.options.engine is EngineKind.SIMULATED:
            flags += ["--tower", "simulated"]
        return flags

    def _worker_flags(self, service: PlannedService) -> list[str]:
        flags = [
            *service.flags(),
            *self._model_flags(),
            *("--engine", self.options.engine.value),
            *("--weights-record", str(self.weights_record(service))),
        ]
        if service.bootstrap_port is not None:
            flags += ["--bootstrap-port", str(service.bootstrap_port)]
        if service.role == "decode":
            flags += ["--mode", self.options.topology]
        if self.options.engine_args:
            flags += ["--", *self.options.engine_args]
        return flags


def make_plan(options: UpOptions, ports: PortClaims, gpus: int = 0) -> SuitePlan:
    """Plan services and ports; a default port in use is replaced by the next free one.

    Raises:
        PlanError: the counts or the models' names make no suite, or a port is not available.
    """
    options.check()
    roles = ["prefill"] * options.prefill if options.topology == "disaggregated" else []
    if options.decode < 1 or (options.topology == "disaggregated" and not roles):
        raise PlanError("a suite needs --decode 1 or more, and --prefill 1 or more to disaggregate")
    roles = ["encode"] * options.encode + roles + ["decode"] * options.decode
    if options.encode:
        _vision(options.model)  # before anything is started
    try:
        front = _processor(options, ports)
        workers = [
            _worker(role, roles[:i].count(role) + 1, ports, i % gpus if gpus > 1 else None)
            for i, role in enumerate(roles)
        ]
        for further in options.further:
            number = [other.task for other in options.further[: options.further.index(further)]]
            gpu = len(workers) % gpus if gpus > 1 else None
            workers.append(_further(further, number.count(further.task) + 1, ports, gpu))
    except NoPortError as error:
        raise PlanError(str(error)) from error
    return SuitePlan(options, (*workers, front))


def _worker(role: str, number: int, ports: PortClaims, gpu: int | None) -> PlannedService:
    port = ports.next_free(LOOPBACK, _PORTS[role])
    return PlannedService(
        name=f"{role}-{number}",
        role=role,
        address=f"{LOOPBACK}:{port}",
        metrics_port=ports.next_free(LOOPBACK, METRICS_PORT),
        admin_port=ports.next_free(LOOPBACK, ADMIN_PORT),
        bootstrap_port=ports.next_free(LOOPBACK, BOOTSTRAP_PORT) if role == "prefill" else None,
        gpu=gpu,
    )


def _further(
    model: FurtherModel, number: int, ports: PortClaims, gpu: int | None
) -> PlannedService:
    service = _worker(model.task.role, number, ports, gpu)
    return replace(service, name=f"{model.task.value}-{number}", further=model)


def _processor(options: UpOptions, ports: PortClaims) -> PlannedService:
    if options.port is None:
        port = ports.next_free(options.host, PROCESSOR_PORT)
    else:
        port = ports.exactly(options.host, options.port)
    return PlannedService(
        name="processor",
        role="processor",
        address=f"{options.host}:{port}",
        metrics_port=ports.next_free(LOOPBACK, METRICS_PORT),
        admin_port=ports.next_free(LOOPBACK, ADMIN_PORT),
    )


def default_model(*, multimodal: bool = False) -> Path | None:
    """Return the demo model, in this directory or in the repository; None if there is none."""
    demo = _DEMO_VISION_MODEL if multimodal else _DEMO_MODEL
    found = _find(demo / "config.json")
    return found.parent if found else None


def demo_picture() -> Path | None:
    """Return a picture that the demo model knows; None if there is none."""
    return _find(_DEMO_PICTURE)


def _find(file: Path) -> Path | None:
    roots = (Path.cwd(), Path(__file__).resolve().parents[4])
    return next((root / file for root in roots if (root / file).is_file()), None)


def choose_model(given: Path | None, name: str, *, multimodal: bool = False) -> tuple[Path, str]:
    """Return the model's directory and its name in requests.

    Raises:
        PlanError: there is no such model; the text has advice.
    """
    model = given or default_model(multimodal=multimodal)
    if model is None:
        raise PlanError(
            f"there is no {_DEMO_VISION_MODEL if multimodal else _DEMO_MODEL} here; give --model "
            "DIR, a directory with config.json, *.safetensors, tokenizer.json and a chat template"
        )
    if not (model / "config.json").is_file():
        raise PlanError(f"{model} is no model directory: it has no config.json")
    if "," in str(model.resolve()) or any(sign in name for sign in ",="):
        raise PlanError(
            "neither the model's directory nor its name may have a comma (nor = its name)"
        )
    model = model.resolve()
    return model, name or _name(model)


def choose_further(task: Task, given: Path | None) -> FurtherModel:
    """Return a further model; ``given`` None: the demo model.

    Raises:
        PlanError: there is no such model; the text has advice.
    """
    needed = marker(task)
    found = given / needed if given is not None else _find(DEMOS[task] / needed)
    if found is None or not found.is_file():
        where = given if given is not None else DEMOS[task]
        raise PlanError(f"{where} is no model directory: it has no {needed}")
    model = found.parent.resolve()
    if "," in str(model):
        raise PlanError(f"the directory {model} may not have a comma in its name")
    is_demo = model.parts[-3:] == DEMOS[task].parts
    return FurtherModel(task, model, f"demo-{model.parts[-2]}" if is_demo else model.name)


def _name(model: Path) -> str:
    """Return a model's name; the demo models' directories are called "model", which is no use."""
    if model.parts[-3:] == _DEMO_VISION_MODEL.parts:
        return "demo-vision"
    return model.parent.name if model.parts[-2:] == _DEMO_MODEL.parts else model.name


def _vision(model: Path) -> Family:
    """Return how a model takes images."""
    try:
        family = families.load(model)
    except families.UnusableFamilyError as error:
        raise PlanError(str(error)) from error
    if family is None:
        raise PlanError(
            f"{model} takes no images: its config.json is of a text model; leave out --multimodal, "
            "or give --model DIR with a vision-language model"
        )
    return family
