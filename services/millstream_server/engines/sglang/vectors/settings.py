"""The settings of SGLang's embedding models and cross-encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

from millstream_server.engines.base import Role
from millstream_server.engines.sglang import managed as managed_arguments
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.follower import SglangFollower
from millstream_server.engines.sglang.nodes import NodeSettings
from millstream_server.engines.sglang.settings import (
    ENGINE_ARGS_HELP,
    OWN_ARGUMENTS,
    model_directory,
    server_argument_list,
)
from millstream_server.engines.sglang.vectors.embedder import SglangEmbedder, with_ability
from millstream_server.engines.sglang.vectors.model import read_model
from millstream_server.runtime.settings import EngineArguments, SettingsError, group, setting
from millstream_server.runtime.settings.arguments import read_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangEmbedderSettings:
    """Settings that only SGLang reads."""

    REMOVED: ClassVar[Mapping[str, str]] = OWN_ARGUMENTS

    device: Literal["auto", "cuda", "cpu"] = setting("auto", help="auto, cuda or cpu")
    max_running_requests: int = setting(
        0, help="most inputs in a batch; 0: the engine decides, 64 on a CPU"
    )
    max_total_tokens: int = setting(0, help="KV cache size in tokens; 0: what fits")
    context_length: int = setting(0, help="most tokens of an input; 0: the model's")
    dimensions: tuple[str, ...] = setting(
        (),
        help="numbers to which requests may cut vectors, such as 64,128,256: for a model that was "
        "trained for that, and whose config.json doesn't say so",
    )
    engine_args: EngineArguments = setting(EngineArguments(), help=ENGINE_ARGS_HELP)
    warm_up_timeout_s: float = setting(120.0, help="longest warm-up before the start fails")
    topology: NodeSettings = group(NodeSettings)

    def checked(self) -> Self:
        """Return the settings with SGLang's own arguments read.

        Raises:
            SettingsError: one is unknown, wrong, or managed by us, or doesn't fit to `topology`.
        """
        known = server_argument_list(self.device, managed_arguments.VECTORS)
        read = read_arguments(self.engine_args, known)
        self.topology.check(read)
        return replace(self, engine_args=read)


def make_embedder(
    settings: SglangEmbedderSettings, model_path: Path | None, model_name: str, *, metrics: bool
) -> SglangEmbedder:
    """Make the embedder that ``settings`` describe; nothing is loaded yet.

    SGLang traces nothing here: one of its batches has inputs of several requests.

    Raises:
        SettingsError: the settings contradict each other.
    """
    config = _config(settings, model_path, model_name, metrics=metrics)
    return SglangEmbedder(config, _numbers(settings.dimensions))


def make_follower(
    settings: SglangEmbedderSettings, model_path: Path | None, model_name: str
) -> SglangFollower:
    """Make what runs a part of a model whose requests another process serves.

    Raises:
        SettingsError: the settings contradict each other.
    """
    config = _config(settings, model_path, model_name, metrics=False)
    return SglangFollower(with_ability(config, read_model(model_directory(model_path))))


def _config(
    settings: SglangEmbedderSettings, model_path: Path | None, model_name: str, *, metrics: bool
) -> SglangEngineConfig:
    own = dict(settings.engine_args.values)
    return SglangEngineConfig(
        model_path=str(model_directory(model_path)),
        role=Role.EMBEDDING,
        device=settings.device,
        dtype=own.pop("dtype", "auto"),
        max_total_tokens=settings.max_total_tokens or None,
        max_running_requests=settings.max_running_requests or None,
        context_length=settings.context_length or None,
        served_model_name=model_name,
        metrics=metrics,
        warm_up_timeout_s=settings.warm_up_timeout_s,
        nodes=settings.topology.nodes,
        node_rank=settings.topology.node_rank,
        leader_address=settings.topology.leader_address,
        log_level=own.pop("log_level", "warning"),
        extra=own,  # what is left
    )


def _numbers(texts: tuple[str, ...]) -> list[int]:
    if wrong := [text for text in texts if not (text.isascii() and text.isdigit())]:
        raise SettingsError(f"--dimensions: {wrong[0]!r} is not a whole number")
    return [int(text) for text in texts]
