"""Protobuf to plain types and back, for everything that travels on a worker stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from millstream.v1 import (
    errors_pb2,
    generation_pb2,
    kv_transfer_pb2,
    sampling_pb2,
    usage_pb2,
)
from millstream_server.engines.base import (
    Constraint,
    ConstraintKind,
    Finish,
    FinishReason,
    LogprobOptions,
    Sampling,
    TokenLogprob,
)
from millstream_server.runtime import errors
from millstream_server.runtime.errors import FieldViolation, ServingError
from millstream_server.transfer.ticket import Ticket
from millstream_server.worker_stream.start import NOT_TRACED, GenerationStart, TraceContext

_FINISH_TO_PROTO = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
}
_FINISH_FROM_PROTO = {v: k for k, v in _FINISH_TO_PROTO.items()}

# Knobs whose names and meanings are the same on both sides.
_KNOBS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "ignore_eos",
    "seed",
)


_NEUTRAL = {knob: getattr(Sampling(max_new_tokens=1), knob) for knob in _KNOBS}


def finish_reason_to_proto(reason: FinishReason) -> generation_pb2.FinishReason.ValueType:
    """Map a finish reason to the contract's enum."""
    return _FINISH_TO_PROTO[reason]


# ---- sampling ------------------------------------------------------------------------------------


def sampling_from_proto(
    message: sampling_pb2.SamplingParams, *, unset_max_new_tokens: int, **defaults: Any
) -> Sampling:
    """Read sampling knobs; ``defaults`` replace the neutral values of unset ones."""
    values = {**defaults}
    values.update({knob: getattr(message, knob) for knob in _KNOBS if message.HasField(knob)})  # type: ignore[arg-type]
    kind = message.constraint.WhichOneof("grammar") if message.HasField("constraint") else None
    return Sampling(
        max_new_tokens=message.max_new_tokens
        if message.HasField("max_new_tokens")
        else unset_max_new_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        constraint=Constraint(ConstraintKind(kind), getattr(message.constraint, kind))
        if kind
        else None,
        **values,
    )


def sampling_to_proto(sampling: Sampling) -> sampling_pb2.SamplingParams:
    """Write every knob that isn't neutral."""
    message = sampling_pb2.SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logit_bias=sampling.logit_bias,
        **{
            knob: getattr(sampling, knob)
            for knob in _KNOBS
            if getattr(sampling, knob) != _NEUTRAL[knob]
        },
    )
    if sampling.constraint:
        setattr(message.constraint, sampling.constraint.kind.value, sampling.constraint.source)
    return message


def logprob_options_from_proto(message: Any) -> LogprobOptions | None:
    """Read the `logprobs` field of ``message``, None when unset."""
    if not message.HasField("logprobs"):
        return None
    return LogprobOptions(top=message.logprobs.top, prompt=message.logprobs.prompt)


# ---- start ---------------------------------------------------------------------------------------


def start_from_proto(
    message: generation_pb2.StartGeneration, context_length: int
) -> GenerationStart:
    """Read a start. An unset max_new_tokens becomes what ``context_length`` leaves."""
    token_ids = message.token_ids[:]
    return GenerationStart(
        request_id=message.request_id,
        token_ids=token_ids,
        sampling=sampling_from_proto(
            message.sampling, unset_max_new_tokens=max(1, context_length - len(token_ids))
        ),
        logprobs=logprob_options_from_proto(message),
        ticket=_ticket_from_proto(message.ticket) if message.HasField("ticket") else None,
        trace=TraceContext(
            message.trace.traceparent, message.trace.tracestate, message.trace.baggage
        ),
        timeout_s=message.timeout.ToNanoseconds() / 1e9 if message.HasField("timeout") else None,
    )


def start_to_proto(slot: int, start: GenerationStart) -> generation_pb2.StartGeneration:
    """Write a start."""
    message = generation_pb2.StartGeneration(
        slot=slot,
        request_id=start.request_id,
        token_ids=start.token_ids,
        sampling=sampling_to_proto(start.sampling),
    )
    if start.logprobs is not None:
        message.logprobs.top = start.logprobs.top
        message.logprobs.prompt = start.logprobs.prompt
        message.logprobs.SetInParent()
    if start.ticket is not None:
        message.ticket.CopyFrom(ticket_to_proto(start.ticket))
    if start.trace != NOT_TRACED:  # baggage goes on without a traceparent, too
        message.trace.traceparent = start.trace.traceparent
        message.trace.tracestate = start.trace.tracestate
        message.trace.baggage = start.trace.baggage
    if start.timeout_s is not None:
        message.timeout.FromNanoseconds(int(start.timeout_s * 1e9))
    return message


def _ticket_from_proto(message: kv_transfer_pb2.KvHandoffTicket) -> Ticket:
    # Timestamp's own methods raise on what is no time; here that is just another forged ticket.
    expires_at = message.expires_at
    return Ticket(
        bootstrap_host=message.bootstrap_host,
        bootstrap_port=message.bootstrap_port,
        room=message.room,
        prefill_dp_rank=message.prefill_dp_rank if message.HasField("prefill_dp_rank") else None,
        expires_at_ms=expires_at.seconds * 1000 + expires_at.nanos // 1_000_000,
        signature=message.signature,
    )


def ticket_to_proto(ticket: Ticket) -> kv_transfer_pb2.KvHandoffTicket:
    """Write a ticket."""
    expires_at = Timestamp()
    expires_at.FromMilliseconds(ticket.expires_at_ms)
    return kv_transfer_pb2.KvHandoffTicket(
        bootstrap_host=ticket.bootstrap_host,
        bootstrap_port=ticket.bootstrap_port,
        room=ticket.room,
        prefill_dp_rank=ticket.prefill_dp_rank,
        expires_at=expires_at,
        signature=ticket.signature,
    )


# ---- ends ----------------------------------------------------------------------------------------


def finish_to_proto(slot: int, finish: Finish) -> generation_pb2.SlotFinish:
    """Write a slot's good end."""
    return generation_pb2.SlotFinish(
        slot=slot,
        reason=_FINISH_TO_PROTO[finish.reason],
        matched_token_id=finish.matched_token_id,
        usage=usage_pb2.Usage(
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            cached_tokens=finish.cached_tokens,
        ),
        prompt_logprobs=logprobs_to_proto(finish.prompt_logprobs)
        if finish.prompt_logprobs
        else None,
    )


def finish_from_proto(message: generation_pb2.SlotFinish) -> Finish:
    """Read a slot's good end.

    Raises:
        ValueError: it gives no reason.
    """
    if not message.reason:
        raise ValueError("a finish without a reason")
    return Finish(
        # A newer worker's reason that we don't know: it ended well, so the turn is over.
        reason=_FINISH_FROM_PROTO.get(message.reason, FinishReason.STOP),
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        cached_tokens=message.usage.cached_tokens,
        matched_token_id=message.matched_token_id if message.HasField("matched_token_id") else None,
        prompt_logprobs=tuple(logprobs_from_proto(message.prompt_logprobs)),
    )


_ERRORS_BY_REASON: dict[int, type[ServingError]] = {
    errors_pb2.ErrorReason.Value("ERROR_REASON_" + cls.reason): cls
    for cls in (
        errors.InvalidRequestError,
        errors.UnsupportedFeatureError,
        errors.ModelNotFoundError,
        errors.RequestCancelledError,
        errors.DeadlinePassedError,
        errors.OverloadedError,
        errors.UnavailableError,
        errors.NoWorkerError,
        errors.WorkerLostError,
        errors.WorkerDrainingError,
        errors.EngineFailedError,
        errors.KvTransferError,
        errors.InternalError,
        errors.UnauthenticatedError,
        errors.PermissionDeniedError,
        errors.UnknownMethodError,
    )
}


def error_to_proto(error: ServingError) -> errors_pb2.RequestError:
    """Write one request's failure."""
    message = errors_pb2.RequestError(
        code=error.code.value[0],
        reason=errors_pb2.ErrorReason.Value("ERROR_REASON_" + error.reason),
        message=error.message,
        retryable=error.retryable,
        violations=[
            errors_pb2.FieldViolation(field=v.field, description=v.description)
            for v in error.violations
        ],
        error_id=error.error_id,
    )
    if error.retry_delay_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_delay_s * 1e9))
        message.retry_delay.CopyFrom(delay)
    return message


def error_from_proto(message: errors_pb2.RequestError) -> ServingError:
    """Read one request's failure; a reason from a newer version keeps its retryability."""
    fallback = errors.UnavailableError if message.retryable else errors.InternalError
    cls = _ERRORS_BY_REASON.get(message.reason, fallback)
    return cls(
        message.message,
        violations=tuple(FieldViolation(v.field, v.description) for v in message.violations),
        retry_delay_s=message.retry_delay.ToNanoseconds() / 1e9
        if message.HasField("retry_delay")
        else None,
        error_id=message.error_id,
    )


# ---- logprobs ------------------------------------------------------------------------------------


def logprobs_to_proto(entries: Sequence[TokenLogprob]) -> generation_pb2.TokenLogprobs:
    """Write logprobs as columns."""
    message = generation_pb2.TokenLogprobs(
        token_ids=[e.token_id for e in entries],
        logprobs=[e.logprob for e in entries],
    )
    if any(e.top for e in entries):
        message.top_counts.extend(len(e.top) for e in entries)
        for entry in entries:
            message.top_token_ids.extend(token for token, _ in entry.top)
            message.top_logprobs.extend(logprob for _, logprob in entry.top)
    return message


def logprobs_from_proto(message: generation_pb2.TokenLogprobs) -> list[TokenLogprob]:
    """Read logprobs from columns."""
    tops = list(zip(message.top_token_ids, message.top_logprobs, strict=True))
    counts = message.top_counts or [0] * len(message.token_ids)
    entries, at = [], 0
    for token, logprob, count in zip(message.token_ids, message.logprobs, counts, strict=True):
        entries.append(TokenLogprob(token, logprob, tuple(tops[at : at + count])))
        at += count
    return entries
