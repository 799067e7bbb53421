"""Pure translation between our requests and what SGLang's `async_generate` takes and yields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_server.engines.base import (
    ConstraintKind,
    Finish,
    FinishReason,
    GenerationRequest,
    KvHandoff,
    Role,
    Sampling,
    TokenLogprob,
)
from millstream_server.runtime.errors import (
    FieldViolation,
    InternalError,
    InvalidRequestError,
    KvTransferError,
    OverloadedError,
    ServingError,
    UnavailableError,
    UnsupportedFeatureError,
)

_CONSTRAINT_FIELDS = {
    ConstraintKind.JSON_SCHEMA: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.EBNF: "ebnf",
}

# SGLang puts top_k into an int32 tensor; a larger number ends its scheduler. This one is its "all".
_TOP_K_ALL = 1 << 30

_BAD_REQUEST = 400
_SERVICE_UNAVAILABLE = 503

# Words in SGLang's error texts, lower case. Only the class of failure is taken from them; the
# client gets our own sentence.
_TRANSFER_WORDS = ("kvtransfererror", "kvpoll", "lost connection", "bootstrap", "transfer")
_QUEUE_WORDS = ("queue is full", "queue full")
_GRAMMAR_WORDS = ("grammar", "json_schema", "json schema", "regex", "ebnf")
_LENGTH_WORDS = ("longer than", "context length", "maximum allowed length", "exceeds")


def generate_arguments(request: GenerationRequest, role: Role) -> dict[str, object]:
    """Make the keyword arguments of `Engine.async_generate`.

    Raises:
        UnsupportedFeatureError: SGLang would silently ignore a part of the request.
    """
    arguments: dict[str, object] = {
        "input_ids": list(request.token_ids),
        "sampling_params": sampling_params(request.sampling, role),
        "rid": request.engine_id,
        "stream": True,
    }
    if request.logprobs is not None:
        arguments["return_logprob"] = True
        arguments["top_logprobs_num"] = request.logprobs.top
        wants_prompt = request.logprobs.prompt and role is not Role.DECODE
        arguments["logprob_start_len"] = 0 if wants_prompt else -1
    if request.handoff is not None:
        arguments.update(_handoff_arguments(request.handoff, role))
    if request.trace_headers:
        arguments["external_trace_header"] = dict(request.trace_headers)
    return arguments


def _handoff_arguments(handoff: KvHandoff, role: Role) -> dict[str, object]:
    arguments: dict[str, object] = {
        "bootstrap_host": handoff.bootstrap_host,
        "bootstrap_port": handoff.bootstrap_port,
        "bootstrap_room": handoff.room,
    }
    if handoff.prefill_dp_rank is not None:
        # Prefill runs on that rank; decode is told where to fetch from.
        name = "routed_dp_rank" if role is Role.PREFILL else "disagg_prefill_dp_rank"
        arguments[name] = handoff.prefill_dp_rank
    return arguments


def sampling_params(sampling: Sampling, role: Role) -> dict[str, object]:
    """Make SGLang's sampling parameters. A prefill engine makes one token, whatever is asked.

    Raises:
        UnsupportedFeatureError: stop tokens together with `ignore_eos`.
    """
    if sampling.ignore_eos and sampling.stop_token_ids:
        # Req._check_token_based_finish returns before it looks at the stop tokens.
        text = "this engine ignores stop_token_ids when ignore_eos is set; set only one of them"
        violation = FieldViolation("sampling.stop_token_ids", text)
        message = f"{violation.field}: {text}"
        raise UnsupportedFeatureError(message, violations=(violation,))
    max_new_tokens = 1 if role is Role.PREFILL else sampling.max_new_tokens
    params: dict[str, object] = {
        # Left out it means 128, not "until the context is full".
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": min(sampling.top_k, _TOP_K_ALL) or -1,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.min_new_tokens:
        params["min_new_tokens"] = min(sampling.min_new_tokens, max_new_tokens)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.constraint is not None:
        params[_CONSTRAINT_FIELDS[sampling.constraint.kind]] = sampling.constraint.source
    return params


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One message of SGLang's stream, without what was already delivered."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int
    finish_reason: Mapping[str, Any] | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def read_chunk(raw: Mapping[str, Any]) -> Chunk:
    """Take a chunk apart.

    Tokens of a chunk that reports an abort are dropped. They can be noise: SGLang runs a request
    it refuses late (a bad grammar, say) once with a prompt of one token, and reports what came
    out; and a request aborted in the waiting queue repeats its last token.
    """
    meta: Mapping[str, Any] = raw["meta_info"]
    finish_reason = meta.get("finish_reason")
    # Copied: SGLang may keep appending to the list it handed out.
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
        prompt_logprobs=prompt_logprobs,
    )


def _logprobs(meta: Mapping[str, Any], side: str) -> tuple[TokenLogprob, ...]:
    """Read [[logprob, id, text], ...] and, per token, the likeliest in the same form."""
    chosen: Sequence[Any] = meta.get(f"{side}_token_logprobs") or ()
    top: Sequence[Any] = meta.get(f"{side}_top_logprobs") or (None,) * len(chosen)
    return tuple(
        TokenLogprob(
            token_id=entry[1],
            logprob=math.nan if entry[0] is None else entry[0],
            top=tuple((likely[1], likely[0]) for likely in likeliest or ()),
        )
        for entry, likeliest in zip(chosen, top, strict=False)
    )


def conclude(
    chunk: Chunk, request: GenerationRequest, *, emitted: int, aborted: bool
) -> Finish | ServingError:
    """Make the terminal report from the last chunk.

    ``emitted`` counts all delivered tokens, ``aborted`` tells that we asked SGLang to stop: then
    whatever it calls that (it depends on the stage), the answer is CANCELLED.
    """
    reason = chunk.finish_reason or {}
    kind = reason.get("type")
    matched = reason.get("matched")
    if isinstance(matched, str):
        # Without stop strings that is SGLang's "NaN happened": the logits were not numbers.
        return InternalError("The engine computed an invalid token.")
    if kind in {"stop", "length"}:
        return Finish(
            reason=FinishReason.STOP if kind == "stop" else FinishReason.LENGTH,
            prompt_tokens=len(request.token_ids),
            completion_tokens=emitted,
            cached_tokens=chunk.cached_tokens,
            matched_token_id=matched if isinstance(matched, int) else None,
            prompt_logprobs=chunk.prompt_logprobs,
        )
    if aborted or (kind == "abort" and reason.get("status_code") is None):
        return cancelled(request, emitted=emitted, cached_tokens=chunk.cached_tokens)
    if kind == "abort":
        return translate_failure(str(reason.get("message")), int(reason["status_code"]))
    return InternalError("The engine ended the request for a reason the worker does not know.")


def cancelled(request: GenerationRequest, *, emitted: int = 0, cached_tokens: int = 0) -> Finish:
    """Report an abort."""
    return Finish(
        reason=FinishReason.CANCELLED,
        prompt_tokens=len(request.token_ids),
        completion_tokens=emitted,
        cached_tokens=cached_tokens,
    )


def translate_failure(text: str, status_code: int) -> ServingError:
    """Turn SGLang's error text and HTTP status into our failure; the text itself stays here."""
    words = text.lower()
    if status_code == _BAD_REQUEST:
        return _translate_refusal(words)
    if any(word in words for word in _TRANSFER_WORDS):
        return KvTransferError("The KV cache could not be handed over from prefill to decode.")
    if status_code == _SERVICE_UNAVAILABLE:
        if any(word in words for word in _QUEUE_WORDS):
            return OverloadedError("The engine's queue is full.")
        return UnavailableError("The engine could not run the request in time.")
    return InternalError("The engine failed to run the request.")


def _translate_refusal(words: str) -> InvalidRequestError:
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
    if isinstance(status_code, int):  # fastapi.HTTPException, not imported for its name only
        return translate_failure(str(getattr(error, "detail", "")), status_code)
    if isinstance(error, ValueError) and "duplicate request id" not in str(error).lower():
        return translate_failure(str(error), _BAD_REQUEST)
    return InternalError("The engine could not take the request.")
