"""Makes the engine that generates text from the settings."""

from __future__ import annotations

from millstream_server.engines.base import Role
from millstream_server.engines.settings import DllmSettings, EngineContext
from millstream_server.engines.sglang import settings as sglang
from millstream_server.engines.sglang.engine import SglangEngine
from millstream_server.engines.sglang.follower import SglangFollower
from millstream_server.engines.simulated import settings as simulated
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.generation.generator import GeneratorEngine
from millstream_server.worker.settings import EngineKind, WorkerSettings


def make_engine(
    settings: WorkerSettings, role: Role, dllm: DllmSettings | None = None
) -> GeneratorEngine:
    """Make the engine that ``settings`` name; nothing is loaded yet. ``dllm``: role DIFFUSION.

    Raises:
        SettingsError: the settings contradict each other.
    """
    context = _context(settings, role, dllm)
    if settings.engine is EngineKind.SIMULATED:
        own = simulated.SimulatedSettings(**settings.sglang.engine_args.values)
        return SimulatedEngine(simulated.engine_config(own, context))
    return SglangEngine(sglang.engine_config(settings.sglang, context))


def make_follower(
    settings: WorkerSettings, role: Role, dllm: DllmSettings | None = None
) -> SglangFollower | None:
    """Make what runs a part of a model that another process serves; None: this one serves it.

    Raises:
        SettingsError: the settings contradict each other.
    """
    if not settings.sglang.topology.follows:
        return None
    config = sglang.engine_config(settings.sglang, _context(settings, role, dllm))
    return SglangFollower(config)


def _context(settings: WorkerSettings, role: Role, dllm: DllmSettings | None) -> EngineContext:
    return EngineContext(
        role=role,
        model_path=settings.model_path,
        model_name=settings.served_name,
        common=settings.common,
        metrics=bool(settings.metrics_listen),
        otlp_endpoint=settings.otlp_endpoint,
        dllm=dllm,
    )
