"""A decode worker's settings, and EncodeService in an aggregated one.

Its engine runs the vision tower, so it takes pixels.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from millstream_server.control.engine import Role
from millstream_server.encode.fetching.fetch import EmbeddingFetcher
from millstream_server.encode.worker.core import EncodeOptions
from millstream_server.encode.worker.servicer import with_encoding
from millstream_server.encode.worker.settings import EncodingSettings
from millstream_server.engines.registry import adapter
from millstream_server.generation.worker.app import Extend, Plan
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.media import families
from millstream_server.runtime.settings import group, setting


class DecodeMode(enum.Enum):
    """Where the prompt's KV cache comes from."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """Read by `python -m millstream_server.decode`."""

    mode: DecodeMode = setting(
        DecodeMode.AGGREGATED,
        help="aggregated: run prompts here; disaggregated: take their KV from prefill workers",
    )
    encode_media: bool = setting(
        default=True,
        help="aggregated: encode the images and videos of its own prompts, if the model takes any "
        "and MILLSTREAM_TICKET_KEY is set; not used while encode workers are connected",
    )
    encoding: EncodingSettings = group(EncodingSettings)

    @property
    def role(self) -> Role:
        return Role.AGGREGATED if self.mode is DecodeMode.AGGREGATED else Role.DECODE


def media_of(settings: DecodeSettings) -> Extend:
    """Return what adds EncodeService to the worker's plan, if it is to encode."""

    def extend(plan: Plan, fetcher: EmbeddingFetcher | None) -> Plan:
        path, pixels = settings.model_path, adapter(settings.engine).pixels
        if fetcher is None or path is None or pixels is None or not _encodes(settings, path):
            return plan
        hosted = settings.encoding.hosted(pixels(path))
        options = EncodeOptions()  # nobody else may fetch pixels
        return with_encoding(plan, hosted, options, fetcher.use_local)

    return extend


def _encodes(settings: DecodeSettings, path: Path) -> bool:
    if settings.mode is not DecodeMode.AGGREGATED or not settings.encode_media:
        return False
    try:
        return families.load(path) is not None
    except families.UnusableFamilyError:
        return False  # the engine says so in the log, and serves text
