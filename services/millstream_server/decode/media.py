"""EncodeService in an aggregated worker: its engine runs the vision tower, so it takes pixels."""

from __future__ import annotations

from pathlib import Path

from millstream_server.decode.settings import DecodeMode, DecodeSettings
from millstream_server.engines.registry import adapter
from millstream_server.media import families
from millstream_server.worker.encoding.attach import with_encoding
from millstream_server.worker.encoding.service import Serving
from millstream_server.worker.generation.app import Extend, Plan
from millstream_server.worker.generation.media import EmbeddingSource


def media_of(settings: DecodeSettings) -> Extend:
    """Return what adds EncodeService to the worker's plan, if it is to encode."""

    def extend(plan: Plan, source: EmbeddingSource | None) -> Plan:
        path, pixels = settings.model_path, adapter(settings.engine).pixels
        if source is None or path is None or pixels is None or not _encodes(settings, path):
            return plan
        hosted = settings.encoding.hosted(pixels(path))
        serving = Serving(options=settings.encoding.options)  # nobody else may fetch pixels
        return with_encoding(plan, hosted, serving, source.use_local)

    return extend


def _encodes(settings: DecodeSettings, path: Path) -> bool:
    if settings.mode is not DecodeMode.AGGREGATED or not settings.encode_media:
        return False
    try:
        return families.load(path) is not None
    except families.UnusableFamilyError:
        return False  # the engine says so in the log, and serves text
