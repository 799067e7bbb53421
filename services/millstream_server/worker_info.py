"""Conversion of a worker's description and load to messages and back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from millstream.v1 import kv_events_pb2, kv_transfer_pb2, worker_pb2
from millstream_server.control.engine import (
    EngineInfo,
    EngineLoad,
    RankLoad,
    Role,
    WorkerDescription,
)
from millstream_server.control.operations import LoraAdapter
from millstream_server.diffusion.diffuser import DiffuserInfo
from millstream_server.diffusion.wire import (
    diffuser_from_proto,
    diffusion_model_to_proto,
)
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.embedding.wire import embedder_from_proto, embedding_model_to_proto
from millstream_server.encode.encoder import EncoderInfo
from millstream_server.encode.wire import encoder_from_proto, encoder_to_proto
from millstream_server.generation.generator import GeneratorInfo, MediaModel
from millstream_server.generation.sampling import Ability
from millstream_server.generation.ticket import KvTransfer
from millstream_server.protobuf.common import ROLES_TO_PROTO, info_to_proto, same_fields, values
from millstream_server.protobuf.media import modalities_from_proto, modalities_to_proto

_GENERATOR_FIELDS = same_fields(worker_pb2.WorkerInfo, GeneratorInfo)
_MEDIA_FIELDS = same_fields(worker_pb2.MediaModelInfo, MediaModel)
_LOAD_FIELDS = same_fields(worker_pb2.LoadReport, EngineLoad)
_RANK_FIELDS = same_fields(worker_pb2.RankLoad, RankLoad)
_MAX_RANKS = 4096
"""Most data-parallel ranks of one worker: routing keeps each of them apart."""
_MAX_ADAPTER_NAME = 128
"""In characters; the contract allows no longer ones."""
_MAX_KIND_BYTES = 64
_MAX_TRANSFER_BYTES = 4 << 10
"""Most data of a `KvTransfer`."""
_PREFILL_FIRST = kv_transfer_pb2.LEG_ORDER_PREFILL_FIRST
_CONCURRENT = kv_transfer_pb2.LEG_ORDER_CONCURRENT
_ABILITIES = {worker_pb2.EngineAbility.Value(f"ENGINE_ABILITY_{a.name}"): a for a in Ability}
_ROLES = {value: role for role, value in ROLES_TO_PROTO.items()}


def abilities_to_proto(abilities: Collection[Ability]) -> list[worker_pb2.EngineAbility.ValueType]:
    """Convert an engine's or a model's abilities, in the contract's order."""
    return [value for value, ability in _ABILITIES.items() if ability in abilities]


def description_to_proto(description: WorkerDescription) -> worker_pb2.WorkerInfo:
    """Convert the description of a worker of any ability."""
    info = info_to_proto(description)
    for engine in (description.engine, description.encoder):
        if engine is not None:
            _WRITE[type(engine)](info, engine)
    return info


def description_from_proto(info: worker_pb2.WorkerInfo) -> WorkerDescription:
    """Convert a worker's info; unknown, newer abilities and modalities are left out.

    Of an ENCODE worker `engine` is an `EncoderInfo`, of an EMBEDDING worker an `EmbedderInfo`, of
    a DIFFUSION worker that makes images or videos a `DiffuserInfo`, of others a `GeneratorInfo`.

    Raises:
        ValueError: its role is unknown, it says nothing that is known about what it does, or its
            ranks or its way of handing off can't be.
    """
    if info.role not in _ROLES:
        message = f"the worker has the unknown role {info.role}"
        raise ValueError(message)
    role = _ROLES[info.role]
    encoder = encoder_from_proto(info) if info.HasField("encoder") else None
    engine: EngineInfo | None
    if role is Role.ENCODE:
        engine = encoder
    elif role is Role.EMBEDDING:
        engine = embedder_from_proto(info) if info.HasField("embedding_model") else None
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


def _write(message: Any, plain: Any, names: Collection[str]) -> None:
    for name in names:
        setattr(message, name, getattr(plain, name))


def _write_generator(info: worker_pb2.WorkerInfo, engine: GeneratorInfo) -> None:
    info.abilities.extend(abilities_to_proto(engine.abilities))
    info.batched_controls = True
    _write(info, engine, _GENERATOR_FIELDS)
    info.refused_fields.extend(sorted(engine.refused_fields))
    info.adapters.extend(
        worker_pb2.LoraAdapter(name=adapter.name, rank=adapter.rank) for adapter in engine.adapters
    )
    if engine.kv_transfer is not None:
        info.kv_transfer.kind = engine.kv_transfer.kind
        info.kv_transfer.data = engine.kv_transfer.data
        first = engine.kv_transfer.prefill_first
        info.kv_transfer.order = _PREFILL_FIRST if first else _CONCURRENT
    if engine.tells_kv:
        info.block_hashing = kv_events_pb2.BLOCK_HASHING_SHA256_CHAIN
    if engine.media is not None:
        info.media_model.modalities.extend(modalities_to_proto(engine.media.modalities))
        _write(info.media_model, engine.media, _MEDIA_FIELDS)


def _write_embedder(info: worker_pb2.WorkerInfo, engine: EmbedderInfo) -> None:
    info.vocab_size = engine.vocab_size
    info.embedding_model.CopyFrom(embedding_model_to_proto(engine))


_WRITE: dict[type[EngineInfo], Callable[[worker_pb2.WorkerInfo, Any], None]] = {
    GeneratorInfo: _write_generator,
    EncoderInfo: lambda info, engine: info.encoder.CopyFrom(encoder_to_proto(engine)),
    DiffuserInfo: lambda info, engine: info.diffusion_model.CopyFrom(
        diffusion_model_to_proto(engine)
    ),
    EmbedderInfo: _write_embedder,
}


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
        media=_media_from_proto(info.media_model),
        refused_fields=frozenset(info.refused_fields),
        adapters=tuple(
            LoraAdapter(adapter.name, adapter.rank)
            for adapter in info.adapters
            if len(adapter.name) <= _MAX_ADAPTER_NAME
        ),
        tells_kv=hashing and info.block_size > 0,
        kv_transfer=_transfer_from_proto(info.kv_transfer)
        if info.HasField("kv_transfer")
        else None,
        **values(info, _GENERATOR_FIELDS),
    )


def _media_from_proto(message: worker_pb2.MediaModelInfo) -> MediaModel | None:
    modalities = modalities_from_proto(message.modalities)
    if not modalities:
        return None
    return MediaModel(modalities=modalities, **values(message, _MEDIA_FIELDS))


def _transfer_from_proto(message: kv_transfer_pb2.KvTransfer) -> KvTransfer:
    if not 0 < len(message.kind.encode()) <= _MAX_KIND_BYTES:
        error = f"a kind of KV transfer has 1 to {_MAX_KIND_BYTES} bytes"
        raise ValueError(error)
    if len(message.data) > _MAX_TRANSFER_BYTES:
        error = f"{len(message.data)} bytes about KV transfer; at most {_MAX_TRANSFER_BYTES}"
        raise ValueError(error)
    if message.order > _PREFILL_FIRST:
        error = f"its hand-offs have the unknown order {message.order}"
        raise ValueError(error)
    return KvTransfer(message.kind, message.data, prefill_first=message.order == _PREFILL_FIRST)


# ---- load ----------------------------------------------------------------------------------------


def load_from_proto(load: worker_pb2.LoadReport) -> EngineLoad:
    """Convert a load report."""
    ranks = tuple(RankLoad(**values(rank, _RANK_FIELDS)) for rank in load.ranks)
    return EngineLoad(ranks=ranks, **values(load, _LOAD_FIELDS))
