"""Translates our requests to SGLang's `async_generate` and its output back. No side effects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.generation.output import Finish, FinishReason, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import KNOBS, Sampling
from millstream_server.generation.ticket import Ticket
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    KvTransferError,
    OverloadedError,
    ServingError,
    UnavailableError,
    UnsupportedFeatureError,
)

PARAMETER = "millstream_resumed"
"""Of our plugin (`engines.sglang.resume`); without it SGLang ignores the parameter."""
_KNOB_NAMES = {"seed": "sampling_seed"}
"""Knobs that have another name in SGLang."""

# SGLang puts top_k into an int32 tensor; a larger number crashes its scheduler. This means "all".
_TOP_K_ALL = 1 << 30

# SGLang divides logits by it, then by the temperature, which is 1e-6 or more. A quotient that isn't
# finite ends its scheduler. A little below 1e-6, which is no float32.
_LEAST_REPETITION_PENALTY = 2.0**-20

# Words in SGLang's error texts, lower case. They only select the class of failure; the client gets
# our own message.
_TRANSFER_WORDS = ("kvtransfererror", "kvpoll", "lost connection", "bootstrap", "transfer")
_QUEUE_WORDS = ("queue is full", "queue full")
_GRAMMAR_WORDS = ("grammar", "json_schema", "json schema", "regex", "ebnf", "structural_tag")
_LENGTH_WORDS = ("longer than", "context length", "maximum allowed length", "exceeds")
_GRAMMAR_STUCK = "grammar accept_token failed"
_GRAMMAR_LATE = re.compile("(failed to compile [a-z_]+ grammar: )?grammar preprocessing timed out")
"""The second time it is in SGLang's cache."""


def generate_arguments(request: GenerationRequest, role: Role) -> dict[str, object]:
    """Make the keyword arguments of `Engine.async_generate`, without those of `media_arguments`.

    Raises:
        UnsupportedFeatureError: SGLang would silently ignore a part of the request.
    """
    params = sampling_params(request.sampling, role)
    if request.resumed_tokens:
        params["custom_params"] = {PARAMETER: request.resumed_tokens}
    arguments: dict[str, object] = {
        "input_ids": list(request.token_ids),
        "sampling_params": params,
        "rid": request.engine_id,
        "stream": True,
    }
    if request.logprobs is not None:
        arguments["return_logprob"] = True
        arguments["top_logprobs_num"] = request.logprobs.top
        wants_prompt = request.logprobs.prompt and role is not Role.DECODE
        arguments["logprob_start_len"] = 0 if wants_prompt else -1
    if request.dp_rank is not None:
        arguments["routed_dp_rank"] = request.dp_rank
    if request.cache_salt:
        arguments["cache_salt"] = request.cache_salt
    if request.adapter:
        arguments["lora_path"] = request.adapter
    if request.ticket is not None:
        arguments.update(_ticket_arguments(request.ticket, role))
    if request.trace.traceparent:
        headers = {"traceparent": request.trace.traceparent, "tracestate": request.trace.tracestate}
        arguments["external_trace_header"] = {name: text for name, text in headers.items() if text}
    return arguments


def _ticket_arguments(ticket: Ticket, role: Role) -> dict[str, object]:
    # An older Processor names no rank. SGLang would choose one that decode then can't find.
    rank = ticket.prefill_dp_rank or 0
    arguments: dict[str, object] = {
        "bootstrap_host": ticket.bootstrap_host,
        "bootstrap_port": ticket.bootstrap_port,
        "bootstrap_room": ticket.room,
        # For decode: where the KV cache is. For prefill: that decode knows. Else its scheduler
        # would tell SGLang's bootstrap server with each request, wait for that, and name rank 0.
        "disagg_prefill_dp_rank": rank,
    }
    if role is Role.PREFILL:
        arguments["routed_dp_rank"] = rank
    return arguments


def sampling_params(sampling: Sampling, role: Role) -> dict[str, object]:
    """Make SGLang's sampling parameters. A prefill engine always generates one token.

    Raises:
        UnsupportedFeatureError: stop tokens together with `ignore_eos`, or a repetition penalty
            near 0.
    """
    if sampling.ignore_eos and sampling.stop_token_ids:
        # Req._check_token_based_finish returns before it checks the stop tokens.
        raise UnsupportedFeatureError.of(
            "sampling.stop_token_ids",
            "this engine ignores stop_token_ids when ignore_eos is set; set only one of them",
        )
    if sampling.repetition_penalty < _LEAST_REPETITION_PENALTY:
        raise UnsupportedFeatureError.of(
            "sampling.repetition_penalty", "this engine can't use a value below 0.000001"
        )
    max_new_tokens = 1 if role is Role.PREFILL else sampling.max_new_tokens
    params: dict[str, object] = {
        # Without it SGLang uses 128, not "until the context is full".
        "max_new_tokens": max_new_tokens,
    }
    for knob in KNOBS:
        value = getattr(sampling, knob.name)
        # Knobs that need an ability are sent only when set: without the ability SGLang refuses
        # them.
        if knob.ability is None or value != knob.neutral:
            params[_KNOB_NAMES.get(knob.name, knob.name)] = value
    params["top_k"] = min(sampling.top_k, _TOP_K_ALL) or -1
    if sampling.min_new_tokens:
        params["min_new_tokens"] = min(sampling.min_new_tokens, max_new_tokens)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.constraint is not None:
        params[sampling.constraint.kind.value] = sampling.constraint.source
    return params


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One message of SGLang's stream."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int
    finish_reason: Mapping[str, Any] | None
    weight_version: str = ""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def read_chunk(raw: Mapping[str, Any]) -> Chunk:
    """Read a chunk.

    Tokens of a chunk that reports an abort are dropped, since they can be wrong: SGLang runs a
    request that it refuses late (such as for a bad grammar) with a prompt of one token, and reports
    its output; and a request aborted in the waiting queue repeats its last token.
    """
    meta: Mapping[str, Any] = raw["meta_info"]
    finish_reason = meta.get("finish_reason")
    # Copied: SGLang may append to its list later.
    token_ids = tuple(raw["output_ids"])
    if finish_reason is not None and finish_reason.get("type") == "abort":
        token_ids = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    if finish_reason is not None:
        prompt_logprobs = _logprobs(meta, "input")
    return Chunk(
        token_ids=token_ids,
        logprobs=_logprobs(meta, "output")[: len(token_ids)],
        cached_tokens=meta.get("cached_tokens") or 0,
        finish_reason=finish_reason,
        weight_version=meta.get("weight_version") or "",
        prompt_logprobs=prompt_logprobs,
    )


def _logprobs(meta: Mapping[str, Any], side: str) -> tuple[TokenLogprob, ...]:
    """Read [[logprob, id, text], ...] and, per token, its alternatives in the same form."""
    chosen: Sequence[Any] = meta.get(f"{side}_token_logprobs") or ()
    top: Sequence[Any] = meta.get(f"{side}_top_logprobs") or (None,) * len(chosen)
    return tuple(
        _logprob(entry[0], entry[1], ((likely[1], likely[0]) for likely in likeliest or ()))
        for entry, likeliest in zip(chosen, top, strict=False)
    )


def read_logprobs(batch: Any, i: int, *, top: bool) -> tuple[TokenLogprob, ...]:
    """Read those of the new tokens of one request of a batch; ``top``: their alternatives, too."""
    values: Sequence[float | None] = batch.output_token_logprobs_val[i] or ()
    nothing: Sequence[None] = (None,) * len(values)
    likely = batch.output_top_logprobs_val[i] if top else nothing
    likely_ids = batch.output_top_logprobs_idx[i] if top else nothing
    return tuple(
        _logprob(value, token_id, zip(others or (), other_values or (), strict=True))
        for value, token_id, other_values, others in zip(
            values, batch.output_token_logprobs_idx[i] or (), likely, likely_ids, strict=False
        )
    )


def _logprob(value: float | None, token_id: int, top: Iterable[tuple[int, float]]) -> TokenLogprob:
    return TokenLogprob(token_id, math.nan if value is None else value, tuple(top))


def conclude(
    chunk: Chunk, request: GenerationRequest, *, emitted: int, aborted: bool
) -> Finish | ServingError:
    """Make the terminal report from the last chunk.

    ``emitted`` is the number of tokens delivered. If ``aborted``, we asked SGLang to stop, and the
    result is CANCELLED, whatever SGLang reports (it depends on the stage).
    """
    reason = chunk.finish_reason or {}
    kind = reason.get("type")
    matched = reason.get("matched")
    if isinstance(matched, str):
        # Without stop strings this is SGLang's "NaN happened": the logits were NaN.
        return InternalError("The engine computed an invalid token.")
    finish = replace(
        cancelled(request, emitted=emitted),
        cached_tokens=chunk.cached_tokens,
        weight_version=chunk.weight_version,
    )
    if kind in {"stop", "length"}:
        return replace(
            finish,
            reason=FinishReason.STOP if kind == "stop" else FinishReason.LENGTH,
            matched_token_id=matched if isinstance(matched, int) else None,
            prompt_logprobs=_with_placeholders(chunk.prompt_logprobs, request),
        )
    if aborted or (kind == "abort" and reason.get("status_code") is None):
        return finish
    if kind == "abort":
        return translate_failure(str(reason.get("message")), int(reason["status_code"]))
    return InternalError("The engine ended the request for a reason the worker does not know.")


def _with_placeholders(
    entries: tuple[TokenLogprob, ...], request: GenerationRequest
) -> tuple[TokenLogprob, ...]:
    """Name the tokens in whose place the model reads images and videos.

    SGLang puts numbers of its own there, and reports the logprob of the token 0.
    """
    named = list(entries)
    for item in request.prompt.media if len(entries) == len(request.token_ids) else ():
        for span in item.spans:
            for position in range(span.start, span.start + span.length):
                token_id = request.token_ids[position]
                named[position] = replace(entries[position], token_id=token_id, logprob=math.nan)
    return tuple(named)


def cancelled(request: GenerationRequest, *, emitted: int = 0) -> Finish:
    """Report an abort."""
    return Finish(
        reason=FinishReason.CANCELLED,
        prompt_tokens=len(request.token_ids),
        completion_tokens=emitted,
        cached_tokens=0,
        media_tokens=request.prompt.media_tokens,
    )


def translate_failure(text: str, status_code: int) -> ServingError:
    """Turn SGLang's error text and HTTP status into our failure; the text is not passed on."""
    words = text.lower()
    if status_code == HTTPStatus.BAD_REQUEST:
        return _translate_refusal(words)
    if words.startswith(_GRAMMAR_STUCK):
        # The grammar's source follows. SGLang draws any token when all are forbidden.
        return InvalidRequestError.of(
            "sampling.constraint",
            "no token can follow: the grammar allows none, or none that min_new_tokens allows",
        )
    if any(word in words for word in _TRANSFER_WORDS):
        return KvTransferError("The KV cache could not be handed over from prefill to decode.")
    if status_code == HTTPStatus.SERVICE_UNAVAILABLE:
        if any(word in words for word in _QUEUE_WORDS):
            return OverloadedError("The engine's queue is full.")
        return UnavailableError("The engine could not run the request in time.")
    return InternalError("The engine failed to run the request.")


def _translate_refusal(words: str) -> InvalidRequestError:
    if _GRAMMAR_LATE.match(words):
        return InvalidRequestError.of(
            "sampling.constraint",
            "the engine compiled this grammar for longer than --grammar-timeout-s of its worker "
            "allows; a smaller one may do",
        )
    if any(word in words for word in _GRAMMAR_WORDS):
        return InvalidRequestError.of(
            "sampling.constraint", "the engine cannot compile this grammar"
        )
    if any(word in words for word in _LENGTH_WORDS):
        return InvalidRequestError.of(
            "token_ids", "the prompt and max_new_tokens do not fit into this engine"
        )
    return InvalidRequestError("The engine refused the request.")


def translate_exception(error: Exception) -> ServingError:
    """Turn what `async_generate` raises before it yields anything into our failure."""
    status_code = getattr(error, "status_code", None)
    if isinstance(status_code, int):  # fastapi.HTTPException, without importing it
        return translate_failure(str(getattr(error, "detail", "")), status_code)
    if isinstance(error, ValueError) and "duplicate request id" not in str(error).lower():
        return translate_failure(str(error), HTTPStatus.BAD_REQUEST)
    return InternalError("The engine could not take the request.")
