"""Conversion of a worker's description and load to messages and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from millstream.v1 import kv_events_pb2, media_pb2, worker_pb2
from millstream_server.control.adapters import LoraAdapter
from millstream_server.encoding.encoder import EncoderInfo
from millstream_server.engines.base import EngineInfo, EngineLoad, RankLoad, Role, WorkerDescription
from millstream_server.generation.generator import GeneratorInfo, MediaModel
from millstream_server.generation.sampling import Ability
from millstream_server.media.items import MediaLimits, Modality
from millstream_server.protobuf.diffusion_model import (
    diffuser_from_proto,
    diffusion_model_to_proto,
)
from millstream_server.protobuf.media import (
    CONTENTS,
    CONTENTS_TO_PROTO,
    MODALITIES,
    MODALITIES_TO_PROTO,
)
from millstream_server.protobuf.worker_info import ENGINE_FIELDS, ROLES_TO_PROTO, info_to_proto
from millstream_server.synthesis.diffuser import DiffuserInfo
from millstream_server.vectors.embedder import EmbedderInfo

__all__ = ["ROLES_TO_PROTO", "description_from_proto", "description_to_proto"]

# Fields of WorkerInfo with the same name in GeneratorInfo.
_GENERATOR_FIELDS = (
    "vocab_size",
    "context_length",
    "block_size",
    "total_blocks",
    "bootstrap_host",
    "bootstrap_port",
    "model_hash",
    "max_batched_tokens",
    "dp_start",
    "tool_call_parser",
    "reasoning_parser",
    "takes_adapters",
)
_MAX_RANKS = 4096
"""Most data-parallel ranks of one worker: routing keeps each of them apart."""
_MAX_ADAPTER_NAME = 128
"""In characters; the contract allows no longer ones."""
_ABILITIES = {worker_pb2.EngineAbility.Value(f"ENGINE_ABILITY_{a.name}"): a for a in Ability}
_ROLES = {value: role for role, value in ROLES_TO_PROTO.items()}


def abilities_to_proto(abilities: Collection[Ability]) -> list[worker_pb2.EngineAbility.ValueType]:
    """Convert an engine's or a model's abilities, in the contract's order."""
    return [value for value, ability in _ABILITIES.items() if ability in abilities]


def description_to_proto(description: WorkerDescription) -> worker_pb2.WorkerInfo:
    """Convert the description of a worker of any ability."""
    info = info_to_proto(description)
    engine, encoder = description.engine, description.encoder
    if isinstance(engine, GeneratorInfo):
        info.abilities.extend(abilities_to_proto(engine.abilities))
        info.batched_controls = True
        for name in _GENERATOR_FIELDS:
            setattr(info, name, getattr(engine, name))
        info.refused_fields.extend(sorted(engine.refused_fields))
        info.adapters.extend(
            worker_pb2.LoraAdapter(name=adapter.name, rank=adapter.rank)
            for adapter in engine.adapters
        )
        if engine.tells_kv:
            info.block_hashing = kv_events_pb2.BLOCK_HASHING_SHA256_CHAIN
        if engine.media is not None:
            info.media_model.CopyFrom(_media_model_to_proto(engine.media))
    elif isinstance(engine, EncoderInfo):
        encoder = encoder or engine
    elif isinstance(engine, DiffuserInfo):
        info.diffusion_model.CopyFrom(diffusion_model_to_proto(engine))
    elif isinstance(engine, EmbedderInfo):
        info.vocab_size = engine.vocab_size
        info.embedding_model.CopyFrom(embedding_model_to_proto(engine))
    if isinstance(encoder, EncoderInfo):
        info.encoder.CopyFrom(_encoder_to_proto(encoder))
    return info


def description_from_proto(info: worker_pb2.WorkerInfo) -> WorkerDescription:
    """Convert a worker's info; unknown, newer abilities and modalities are left out.

    Of an ENCODE worker `engine` is an `EncoderInfo`, of an EMBEDDING worker an `EmbedderInfo`, of
    a DIFFUSION worker that makes images or videos a `DiffuserInfo`, of others a `GeneratorInfo`.

    Raises:
        ValueError: its role is unknown, it says nothing that is known about what it does, or its
            ranks can't be.
    """
    if info.role not in _ROLES:
        message = f"the worker has the unknown role {info.role}"
        raise ValueError(message)
    role = _ROLES[info.role]
    encoder = _encoder_from_proto(info) if info.HasField("encoder") else None
    engine: EngineInfo | None
    if role is Role.ENCODE:
        engine = encoder
    elif role is Role.EMBEDDING:
        engine = _embedder_from_proto(info) if info.HasField("embedding_model") else None
    elif role is Role.DIFFUSION and info.HasField("diffusion_model"):
        engine = diffuser_from_proto(info)
    else:
        engine = _generator_from_proto(info)
    if engine is None:
        message = f"the {role.value} worker doesn't say what it takes"
        raise ValueError(message)
    return WorkerDescription(
        worker_id=info.worker_id,
        role=role,
        model=info.model,
        engine=engine,
        encoder=encoder,
        batched_controls=info.batched_controls,
    )


def _generator_from_proto(info: worker_pb2.WorkerInfo) -> GeneratorInfo:
    """Read what generates; what the contract forbids is left out where that is possible."""
    if info.dp_size > _MAX_RANKS or info.dp_start + info.dp_size > 1 << 32:
        message = (
            f"the worker has {info.dp_size} ranks from {info.dp_start} on; at most {_MAX_RANKS}"
        )
        raise ValueError(message)
    hashing = info.block_hashing == kv_events_pb2.BLOCK_HASHING_SHA256_CHAIN
    return GeneratorInfo(
        abilities=frozenset(_ABILITIES[a] for a in info.abilities if a in _ABILITIES),
        media=_media_model_from_proto(info.media_model) if info.HasField("media_model") else None,
        refused_fields=frozenset(info.refused_fields),
        adapters=tuple(
            LoraAdapter(adapter.name, adapter.rank)
            for adapter in info.adapters
            if len(adapter.name) <= _MAX_ADAPTER_NAME
        ),
        tells_kv=hashing and info.block_size > 0,
        **{name: getattr(info, name) for name in (*ENGINE_FIELDS, *_GENERATOR_FIELDS)},
    )


# ---- vectors -------------------------------------------------------------------------------------


def embedding_model_to_proto(engine: EmbedderInfo) -> worker_pb2.EmbeddingModelInfo:
    """Convert what a worker embeds or ranks."""
    return worker_pb2.EmbeddingModelInfo(
        embeds=engine.embeds,
        ranks=engine.ranks,
        width=engine.width,
        dimensions=engine.dimensions,
        max_input_tokens=engine.max_input_tokens,
    )


def _embedder_from_proto(info: worker_pb2.WorkerInfo) -> EmbedderInfo:
    model = info.embedding_model
    return EmbedderInfo(
        embeds=model.embeds,
        ranks=model.ranks,
        width=model.width,
        dimensions=tuple(model.dimensions),
        max_input_tokens=model.max_input_tokens,
        vocab_size=info.vocab_size,
        max_batch_tokens=0,  # the worker's own business
        **{name: getattr(info, name) for name in ENGINE_FIELDS},
    )


# ---- media ---------------------------------------------------------------------------------------


def _modalities_to_proto(modalities: frozenset[Modality]) -> list[media_pb2.Modality.ValueType]:
    return [value for modality, value in MODALITIES_TO_PROTO.items() if modality in modalities]


def _modalities(values: Iterable[media_pb2.Modality.ValueType]) -> frozenset[Modality]:
    return frozenset(MODALITIES[value] for value in values if value in MODALITIES)


def _media_model_to_proto(media: MediaModel) -> worker_pb2.MediaModelInfo:
    return worker_pb2.MediaModelInfo(
        modalities=_modalities_to_proto(media.modalities),
        family=media.family,
        embedding_width=media.embedding_width,
        takes_pixels=media.takes_pixels,
    )


def _media_model_from_proto(message: worker_pb2.MediaModelInfo) -> MediaModel | None:
    modalities = _modalities(message.modalities)
    if not modalities:
        return None
    return MediaModel(
        modalities=modalities,
        family=message.family,
        embedding_width=message.embedding_width,
        takes_pixels=message.takes_pixels,
    )


def _encoder_to_proto(encoder: EncoderInfo) -> worker_pb2.EncoderInfo:
    limits = encoder.limits
    message = worker_pb2.EncoderInfo(
        modalities=_modalities_to_proto(encoder.modalities),
        max_item_bytes=limits.max_item_bytes,
        max_pixels=limits.max_pixels,
        max_frames=limits.max_frames,
        max_item_tokens=encoder.max_item_tokens,
        content=CONTENTS_TO_PROTO[encoder.content],
    )
    message.max_video.FromNanoseconds(int(limits.max_video_s * 1e9))
    return message


def _encoder_from_proto(info: worker_pb2.WorkerInfo) -> EncoderInfo | None:
    """Read `WorkerInfo.encoder`; None if nothing in it is known."""
    message = info.encoder
    modalities = _modalities(message.modalities)
    if not modalities or message.content not in CONTENTS:
        return None
    return EncoderInfo(
        modalities=modalities,
        content=CONTENTS[message.content],
        max_item_tokens=message.max_item_tokens,
        limits=MediaLimits(
            max_item_bytes=message.max_item_bytes,
            max_pixels=message.max_pixels,
            max_frames=message.max_frames,
            max_video_s=message.max_video.ToNanoseconds() / 1e9,
        ),
        **{name: getattr(info, name) for name in ENGINE_FIELDS},
    )


# ---- load ----------------------------------------------------------------------------------------


def load_from_proto(load: worker_pb2.LoadReport) -> EngineLoad:
    """Convert a load report."""
    return EngineLoad(
        running_requests=load.running_requests,
        queued_requests=load.queued_requests,
        used_blocks=load.used_blocks,
        total_blocks=load.total_blocks,
        ranks=tuple(
            RankLoad(
                running_requests=rank.running_requests,
                queued_requests=rank.queued_requests,
                queued_tokens=rank.queued_tokens,
                used_blocks=rank.used_blocks,
                total_blocks=rank.total_blocks,
            )
            for rank in load.ranks
        ),
    )
