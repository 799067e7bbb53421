"""Makes the engine that generates text from the settings."""

from __future__ import annotations

from millstream_server.engines.base import Role
from millstream_server.engines.settings import DllmSettings, EngineContext
from millstream_server.engines.sglang import settings as sglang
from millstream_server.engines.sglang.engine import SglangEngine
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
    context = EngineContext(
        role=role,
        model_path=settings.model_path,
        model_name=settings.served_name,
        common=settings.common,
        metrics=bool(settings.metrics_listen),
        otlp_endpoint=settings.otlp_endpoint,
        dllm=dllm,
    )
    if settings.engine is EngineKind.SIMULATED:
        return SimulatedEngine(simulated.engine_config(settings.simulated, context))
    return SglangEngine(sglang.engine_config(settings.sglang, context))
