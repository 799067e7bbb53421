"""What goes between a test and its engine in another process: plain JSON."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.v1 import media_pb2, worker_pb2
from millstream_server.control.engine import EngineLoad, RankLoad, Role, WorkerDescription
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import Finish, FinishReason, TokenLogprob
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import Ability, Constraint, ConstraintKind, Sampling
from millstream_server.generation.ticket import Ticket
from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Medium,
)
from millstream_server.media.items import MediaInput
from millstream_server.media.tensor import Tensor
from millstream_server.protobuf.media import item_from_proto, item_to_proto
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.worker_info import description_from_proto, description_to_proto

LINE_LIMIT = 64 * 2**20
"""Bytes of a line."""


def to_json(value: object) -> str:
    """Write dataclasses and enums as plain JSON."""

    def encode(item: object) -> object:
        if isinstance(item, (Role, FinishReason, Ability, ConstraintKind, Medium)):
            return item.value
        if isinstance(item, frozenset):
            return list(item)
        if isinstance(item, bytes):
            return item.hex()
        message = f"cannot send {item!r}"
        raise TypeError(message)

    return json.dumps(value, default=encode)


def read_request(raw: Mapping[str, Any]) -> GenerationRequest:
    sampling = dict(raw["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    sampling["logit_bias"] = {int(key): bias for key, bias in sampling["logit_bias"].items()}
    if sampling["constraint"]:
        sampling["constraint"] = Constraint(
            ConstraintKind(sampling["constraint"]["kind"]), sampling["constraint"]["source"]
        )
    return GenerationRequest(
        engine_id=raw["engine_id"],
        prompt=Prompt(raw["prompt"]["token_ids"], tuple(map(_item, raw["prompt"]["media"]))),
        sampling=Sampling(**sampling),
        logprobs=LogprobOptions(**raw["logprobs"]) if raw["logprobs"] else None,
        **{name: raw[name] for name in ("adapter", "dp_rank", "cache_salt")},
        ticket=_ticket(raw["ticket"]) if raw["ticket"] else None,
        trace=TraceContext(**raw["trace"]),
    )


def plain_item(item: MediaInput) -> dict[str, str]:
    return {
        "message": item_to_proto(item).SerializeToString().hex(),
        "bytes": base64.b64encode(item.tensor.data).decode() if item.tensor else "",
    }


def _item(raw: Mapping[str, str]) -> MediaInput:
    message = media_pb2.MediaItem.FromString(bytes.fromhex(raw["message"]))
    item = item_from_proto(message, "item")
    if item.ticket is None:
        return item
    data = memoryview(bytearray(base64.b64decode(raw["bytes"])))
    return dataclasses.replace(item, tensor=Tensor(item.ticket.tensor, data))


def _ticket(raw: Mapping[str, Any]) -> Ticket:
    return Ticket(**{**raw, "signature": bytes.fromhex(raw["signature"])})


def read_finish(raw: Mapping[str, Any]) -> Finish:
    values = dict(raw)
    values["reason"] = FinishReason(values["reason"])
    values["prompt_logprobs"] = read_logprobs(values["prompt_logprobs"])
    return Finish(**values)


def read_logprobs(raw: Sequence[Mapping[str, Any]]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            entry["token_id"],
            entry["logprob"],
            tuple((token, logprob) for token, logprob in entry["top"]),
        )
        for entry in raw
    )


def read_load(raw: Mapping[str, Any]) -> EngineLoad:
    return EngineLoad(**{**raw, "ranks": tuple(RankLoad(**each) for each in raw["ranks"])})


_KV_EVENTS = {kind.__name__: kind for kind in (BlocksStored, BlocksRemoved, CacheCleared)}


def read_kv_event(raw: Mapping[str, Any]) -> KvEvent:
    values = dict(raw)
    kind = _KV_EVENTS[values.pop("kind")]
    if "medium" in values:
        values["medium"] = Medium(values["medium"])
    return kind(**values)


def plain_info(info: GeneratorInfo) -> str:
    described = WorkerDescription(role=Role.AGGREGATED, model="", engine=info)
    return description_to_proto(described).SerializeToString().hex()


def read_info(raw: str) -> GeneratorInfo:
    message = worker_pb2.WorkerInfo.FromString(bytes.fromhex(raw))
    engine = description_from_proto(message).engine
    assert isinstance(engine, GeneratorInfo)
    return engine
