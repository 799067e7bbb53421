"""Conversion of requests, output and ends of generations to messages and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from millstream.v1 import generation_pb2, kv_transfer_pb2, sampling_pb2
from millstream_server.generation.output import Finish, FinishReason, LogprobColumns, TokenLogprob
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import (
    KNOBS,
    MAX_BIASES,
    Constraint,
    ConstraintKind,
    Sampling,
    given_knobs,
)
from millstream_server.generation.ticket import EngineData, Ticket
from millstream_server.generation.validation import MAX_TOP_LOGPROBS
from millstream_server.media.items import MAX_MEDIA_ITEMS, MediaInput
from millstream_server.protobuf.common import context_of, deadline_of
from millstream_server.protobuf.media import item_from_proto, item_to_proto
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext

_FINISH_TO_PROTO = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    FinishReason.TOOL_CALLS: generation_pb2.FINISH_REASON_TOOL_CALLS,
}
_FINISH_FROM_PROTO = {v: k for k, v in _FINISH_TO_PROTO.items()}

_MAX_VERSION_CHARS = 1024
_SAME_NAME = frozenset((*(knob.name for knob in KNOBS), "max_new_tokens", "seed_best_effort"))


def finish_reason_to_proto(reason: FinishReason) -> generation_pb2.FinishReason.ValueType:
    """Map a finish reason to the contract's enum."""
    return _FINISH_TO_PROTO[reason]


# ---- sampling ------------------------------------------------------------------------------------


def sampling_fields(message: sampling_pb2.SamplingParams, path: str) -> dict[str, Any]:
    """Return the set fields as fields of `Sampling`; ``path`` is the message's, for errors.

    Raises:
        InvalidRequestError: a constraint that names no grammar this version knows, or too many
            biases.
    """
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        name = field.name
        if name in _SAME_NAME:
            values[name] = value
        elif name == "stop_token_ids":
            values[name] = tuple(value)
        elif name == "logit_bias":
            if len(value) > MAX_BIASES:
                raise InvalidRequestError.of(f"{path}.{name}", f"at most {MAX_BIASES} tokens")
            values[name] = dict(value)
        elif name == "constraint":
            values[name] = _constraint_from_proto(value, f"{path}.{name}")
    return values


def sampling_from_proto(
    message: sampling_pb2.SamplingParams, *, unset_max_new_tokens: int, path: str = "sampling"
) -> Sampling:
    """Read sampling knobs; unset ones become neutral.

    Raises:
        InvalidRequestError: a constraint that names no grammar this version knows.
    """
    values = sampling_fields(message, path)
    values.setdefault("max_new_tokens", unset_max_new_tokens)
    return Sampling(**values)


def _constraint_from_proto(message: sampling_pb2.Constraint, path: str) -> Constraint:
    kind = message.WhichOneof("grammar")
    if kind is None:
        names = ", ".join(kind.value for kind in ConstraintKind)
        raise InvalidRequestError.of(
            path, f"set one of {names}; this server knows no other grammar"
        )
    return Constraint(ConstraintKind(kind), getattr(message, kind))


def write_sampling(message: sampling_pb2.SamplingParams, sampling: Sampling) -> None:
    """Write every knob that isn't neutral into an empty message."""
    message.max_new_tokens = sampling.max_new_tokens
    for knob, value in given_knobs(sampling):
        setattr(message, knob.name, value)
    if sampling.stop_token_ids:
        message.stop_token_ids.extend(sampling.stop_token_ids)
    if sampling.logit_bias:
        message.logit_bias.update(sampling.logit_bias)
    if sampling.constraint:
        setattr(message.constraint, sampling.constraint.kind.value, sampling.constraint.source)


def logprob_options_from_proto(message: Any) -> LogprobOptions | None:
    """Read the `logprobs` field of ``message``, None when unset."""
    if not message.HasField("logprobs"):
        return None
    return LogprobOptions(top=message.logprobs.top, prompt=message.logprobs.prompt)


# ---- start ---------------------------------------------------------------------------------------


def start_from_proto(
    message: generation_pb2.StartGeneration,
    context_length: int,
    stream: TraceContext = NOT_TRACED,
) -> GenerationRequest:
    """Convert a start. An unset max_new_tokens becomes what ``context_length`` leaves.

    ``stream`` is the trace of a request that has none of its own.

    Raises:
        InvalidRequestError: a part of it can't be read.
    """
    token_ids = message.token_ids[:]
    trace = context_of(message.trace) if message.HasField("trace") else NOT_TRACED
    if stream is not NOT_TRACED and not trace.traceparent:
        trace = stream
    return GenerationRequest(
        request_id=message.request_id,
        model=message.model,
        prompt=Prompt(token_ids, _media_from_proto(message) if message.media else ()),
        sampling=sampling_from_proto(
            message.sampling, unset_max_new_tokens=max(1, context_length - len(token_ids))
        ),
        logprobs=logprob_options_from_proto(message),
        ticket=_ticket_from_proto(message.ticket) if message.HasField("ticket") else None,
        trace=trace,
        deadline_s=deadline_of(message),
        adapter=message.adapter,
        dp_rank=message.dp_rank if message.HasField("dp_rank") else None,
        cache_salt=message.cache_salt,
        resumed_tokens=message.resumed_tokens,
    )


def write_start(
    message: generation_pb2.StartGeneration, slot: int, request: GenerationRequest
) -> None:
    """Write a start into an empty message, which avoids a copy."""
    message.slot = slot
    message.request_id = request.request_id
    message.token_ids.extend(request.token_ids)
    write_sampling(message.sampling, request.sampling)
    if request.logprobs is not None:
        message.logprobs.top = request.logprobs.top
        message.logprobs.prompt = request.logprobs.prompt
        message.logprobs.SetInParent()
    if request.prompt.media:
        message.media.extend(map(item_to_proto, request.prompt.media))
    if request.ticket is not None:
        message.ticket.CopyFrom(ticket_to_proto(request.ticket))
    if request.adapter:
        message.adapter = request.adapter
    if request.dp_rank is not None:
        message.dp_rank = request.dp_rank
    if request.cache_salt:
        message.cache_salt = request.cache_salt
    if request.resumed_tokens:
        message.resumed_tokens = request.resumed_tokens
    trace = request.trace
    if trace is not NOT_TRACED and trace != NOT_TRACED:  # also baggage without a traceparent
        message.trace.traceparent = trace.traceparent
        message.trace.tracestate = trace.tracestate
        message.trace.baggage = trace.baggage
    if (left_s := request.time_left_s) is not None:
        message.timeout.FromNanoseconds(int(left_s * 1e9))


def _media_from_proto(message: generation_pb2.StartGeneration) -> tuple[MediaInput, ...]:
    if len(message.media) > MAX_MEDIA_ITEMS:
        raise InvalidRequestError.of(
            "media", f"has {len(message.media)} items; a prompt has at most {MAX_MEDIA_ITEMS}"
        )
    spans, tokens = sum(len(item.spans) for item in message.media), len(message.token_ids)
    if spans > tokens:
        raise InvalidRequestError.of(
            "media", f"has {spans} spans; a prompt of {tokens} tokens has fewer"
        )
    return tuple(
        item_from_proto(item, f"media[{index}]") for index, item in enumerate(message.media)
    )


def _ticket_from_proto(message: kv_transfer_pb2.KvHandoffTicket) -> Ticket:
    # Timestamp's own methods raise on invalid times; here an invalid one counts as a forged ticket.
    expires_at = message.expires_at
    return Ticket(
        bootstrap_host=message.bootstrap_host,
        bootstrap_port=message.bootstrap_port,
        room=message.room,
        prefill_dp_rank=message.prefill_dp_rank if message.HasField("prefill_dp_rank") else None,
        expires_at_ms=expires_at.seconds * 1000 + expires_at.nanos // 1_000_000,
        signature=message.signature,
        engine_data=_engine_data(message),
    )


def _engine_data(
    message: kv_transfer_pb2.KvHandoffTicket | generation_pb2.SlotFinish,
) -> EngineData | None:
    if not message.HasField("engine_data"):
        return None
    return EngineData(message.engine_data.kind, message.engine_data.data)


def ticket_to_proto(ticket: Ticket) -> kv_transfer_pb2.KvHandoffTicket:
    """Write a ticket."""
    expires_at = Timestamp()
    expires_at.FromMilliseconds(ticket.expires_at_ms)
    message = kv_transfer_pb2.KvHandoffTicket(
        bootstrap_host=ticket.bootstrap_host,
        bootstrap_port=ticket.bootstrap_port,
        room=ticket.room,
        prefill_dp_rank=ticket.prefill_dp_rank,
        expires_at=expires_at,
        signature=ticket.signature,
    )
    if ticket.engine_data is not None:
        message.engine_data.kind = ticket.engine_data.kind
        message.engine_data.data = ticket.engine_data.data
    return message


# ---- ends ----------------------------------------------------------------------------------------


def write_finish(message: generation_pb2.SlotFinish, finish: Finish) -> None:
    """Write a slot's finish into ``message``, whose slot is set already."""
    message.reason = _FINISH_TO_PROTO[finish.reason]
    if finish.matched_token_id is not None:
        message.matched_token_id = finish.matched_token_id
    usage = message.usage
    usage.prompt_tokens = finish.prompt_tokens
    usage.completion_tokens = finish.completion_tokens
    usage.cached_tokens = finish.cached_tokens
    if finish.media_tokens:
        usage.media_tokens = finish.media_tokens
    if finish.weight_version:
        message.weight_version = finish.weight_version
    if finish.engine_data is not None:
        message.engine_data.kind = finish.engine_data.kind
        message.engine_data.data = finish.engine_data.data
    if finish.prompt_logprobs:
        message.prompt_logprobs.CopyFrom(logprobs_to_proto(finish.prompt_logprobs))


def finish_from_proto(message: generation_pb2.SlotFinish) -> Finish:
    """Convert a slot's finish.

    Raises:
        ValueError: it has no reason, or a part of it is too large.
    """
    if not message.reason:
        raise ValueError("a finish without a reason")
    if len(message.weight_version) > _MAX_VERSION_CHARS:
        raise ValueError("a weight version of more characters than operators can give")
    usage = message.usage
    return Finish(
        # An unknown, newer reason: the request didn't fail, so the turn is over.
        reason=_FINISH_FROM_PROTO.get(message.reason, FinishReason.STOP),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        media_tokens=usage.media_tokens,
        matched_token_id=message.matched_token_id if message.HasField("matched_token_id") else None,
        prompt_logprobs=logprobs_from_proto(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else (),
        weight_version=message.weight_version,
        engine_data=_engine_data(message),
    )


# ---- logprobs ------------------------------------------------------------------------------------


def logprobs_to_proto(entries: Sequence[TokenLogprob]) -> generation_pb2.TokenLogprobs:
    """Write logprobs as columns."""
    columns = entries if isinstance(entries, LogprobColumns) else LogprobColumns(entries)
    message = generation_pb2.TokenLogprobs(token_ids=columns.token_ids, logprobs=columns.logprobs)
    if columns.top_token_ids:
        message.top_counts.extend(columns.top_counts)
        message.top_token_ids.extend(columns.top_token_ids)
        message.top_logprobs.extend(columns.top_logprobs)
    return message


def logprobs_from_proto(message: generation_pb2.TokenLogprobs) -> LogprobColumns:
    """Read logprobs from columns.

    Raises:
        ValueError: the columns don't fit together, or have too many alternatives.
    """
    columns = LogprobColumns()
    columns.token_ids.extend(message.token_ids[:])
    columns.logprobs.extend(message.logprobs[:])
    tokens = len(columns.token_ids)
    columns.top_counts.extend(message.top_counts[:] or [0] * tokens)
    columns.top_token_ids.extend(message.top_token_ids[:])
    columns.top_logprobs.extend(message.top_logprobs[:])
    tops = len(columns.top_token_ids)
    if (
        not len(columns.logprobs) == len(columns.top_counts) == tokens
        or not sum(columns.top_counts) == len(columns.top_logprobs) == tops
        or tops > MAX_TOP_LOGPROBS * tokens
    ):
        raise ValueError("columns of logprobs that don't fit together")
    return columns
