"""EncodeService in an aggregated worker: its engine runs the vision tower, so it takes pixels."""

from __future__ import annotations

from pathlib import Path

from millstream_server.decode.settings import DecodeMode, DecodeSettings
from millstream_server.encoding.encoder import MediaEncoder
from millstream_server.engines.simulated.encoder import SimulatedEncoder
from millstream_server.engines.simulated.settings import SimulatedEncoderSettings, encoder_config
from millstream_server.media import families
from millstream_server.media.items import Content
from millstream_server.worker.encoder_choice import EncoderSettings, make_encoder
from millstream_server.worker.encoding.attach import with_encoding
from millstream_server.worker.encoding.service import Serving
from millstream_server.worker.generation.app import Extend, Plan
from millstream_server.worker.generation.media import EmbeddingSource
from millstream_server.worker.settings import EngineKind


def media_of(settings: DecodeSettings) -> Extend:
    """Return what adds EncodeService to the worker's plan, if it is to encode."""

    def extend(plan: Plan, source: EmbeddingSource | None) -> Plan:
        path = settings.model_path
        if source is None or path is None or not _encodes(settings, path):
            return plan
        hosted = settings.encoding.hosted(_encoder(settings, path))
        serving = Serving()  # nobody else may fetch pixels
        return with_encoding(plan, hosted, serving, source.use_local)

    return extend


def _encodes(settings: DecodeSettings, path: Path) -> bool:
    if settings.mode is not DecodeMode.AGGREGATED or not settings.encode_media:
        return False
    try:
        return families.load(path) is not None
    except families.UnusableFamilyError:
        return False  # the engine says so in the log, and serves text


def _encoder(settings: DecodeSettings, path: Path) -> MediaEncoder:
    defaults = EncoderSettings()
    if settings.engine is EngineKind.SIMULATED:
        simulated = SimulatedEncoderSettings()
        return SimulatedEncoder(encoder_config(simulated, defaults.max_item_tokens, path))
    return make_encoder(defaults, path, Content.PIXELS)
