"""Translates our requests to vLLM's, and its outputs back. No side effects.

vLLM checks requests in a part that isn't used here, and what isn't checked ends its core process:
`generation.validation` has checked ids, lengths and media before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.generation.output import Finish, FinishReason, LogprobColumns, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import Constraint, ConstraintKind, Sampling
from millstream_server.generation.ticket import EngineData
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    KvTransferError,
    ServingError,
    UnavailableError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.priority import Priority

MAX_TEMPERATURE = 2.0
_LEAST_REPETITION_PENALTY = 2.0**-20
"""Logits are divided by it; a quotient that isn't finite makes probabilities NaN."""
_NO_SEED = -1
"""What vLLM takes for no seed."""
_OTHER_SEED = -(2**63) + 1
_STRUCTURES = {
    ConstraintKind.JSON_SCHEMA: "json",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.EBNF: "grammar",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
}


def sampling_params(
    built: BuiltEngine, request: GenerationRequest, role: Role, transfer: Mapping[str, Any]
) -> Any:
    """Make vLLM's sampling parameters. A prefill engine always generates one token.

    Raises:
        UnsupportedFeatureError: a value that vLLM doesn't take.
        InvalidRequestError: it can't use the grammar.
    """
    sampling = request.sampling
    _check(sampling)
    prefill = role is Role.PREFILL
    max_tokens = 1 if prefill else sampling.max_new_tokens
    # Prefill's one token is computed by decode again: nothing may end it, or has to shape it.
    ends = () if prefill else _ends(built.eos, sampling)
    constraint = None if prefill else sampling.constraint
    logprobs = request.logprobs
    params = built.vllm.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=_OTHER_SEED if sampling.seed == _NO_SEED else sampling.seed,
        stop_token_ids=list(ends),
        ignore_eos=sampling.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=0 if prefill else min(sampling.min_new_tokens, max_tokens),
        logprobs=None if logprobs is None else logprobs.top,
        prompt_logprobs=(
            logprobs.top if logprobs and logprobs.prompt and role is not Role.DECODE else None
        ),
        logit_bias=dict(sampling.logit_bias) or None,
        structured_outputs=_structure(built, constraint),
        extra_args={"kv_transfer_params": dict(transfer)} if transfer else None,
        detokenize=False,
        output_kind=built.vllm.RequestOutputKind.DELTA,
        skip_clone=True,
    )
    if constraint is not None:
        _check_grammar(built, params)
    return params


def _check(sampling: Sampling) -> None:
    if sampling.temperature > MAX_TEMPERATURE:
        raise UnsupportedFeatureError.of(
            "sampling.temperature", f"this engine takes temperatures up to {MAX_TEMPERATURE:g}"
        )
    if sampling.repetition_penalty < _LEAST_REPETITION_PENALTY:
        raise UnsupportedFeatureError.of(
            "sampling.repetition_penalty", "this engine can't use a value below 0.000001"
        )


def _ends(eos: frozenset[int], sampling: Sampling) -> Sequence[int]:
    """Return the ids that end the answer; min_new_tokens suppresses all of them until then."""
    if sampling.ignore_eos:
        return sampling.stop_token_ids
    return (*sampling.stop_token_ids, *eos)


def _structure(built: BuiltEngine, constraint: Constraint | None) -> Any:
    if constraint is None:
        return None
    return built.vllm.StructuredOutputsParams(**{_STRUCTURES[constraint.kind]: constraint.source})


def _check_grammar(built: BuiltEngine, params: Any) -> None:
    """Let vLLM read the grammar, and choose what compiles it; call it in a thread."""
    config = built.config
    try:
        params.verify(
            config.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            built.tokenizer,
        )
    except Exception as error:  # the vendor's seam: its own errors and those of the compiler
        raise InvalidRequestError.of(
            "sampling.constraint", "the engine cannot compile this grammar"
        ) from error


def core_request(
    built: BuiltEngine,
    request: GenerationRequest,
    core_id: str,
    params: Any,
    *,
    adapter: Any = None,
    features: Sequence[Any] = (),
) -> Any:
    """Make vLLM's request."""
    return built.vllm.EngineCoreRequest(
        request_id=core_id,
        prompt_token_ids=list(request.token_ids),
        mm_features=list(features) or None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter,
        cache_salt=request.cache_salt or None,
        data_parallel_rank=request.dp_rank,
        # vLLM runs smaller numbers first.
        priority=int(Priority.NORMAL) - int(request.priority),
        external_req_id=core_id,
    )


# ---- output --------------------------------------------------------------------------------------


def read_logprobs(lists: Any, top: int) -> LogprobColumns:
    """Read the logprobs of new tokens: per row the chosen token, then the likeliest, in order."""
    found = LogprobColumns()
    ids, values = lists.logprob_token_ids, lists.logprobs
    found.token_ids.extend(ids[:, 0].tolist())
    found.logprobs.extend(values[:, 0].tolist())
    found.top_counts.extend([top] * len(ids))
    if top:
        found.top_token_ids.extend(ids[:, 1 : top + 1].ravel().tolist())
        found.top_logprobs.extend(values[:, 1 : top + 1].ravel().tolist())
    return found


def read_prompt_logprobs(tensors: Any, top: int) -> list[TokenLogprob]:
    """Read those of prompt tokens, from the second on."""
    ids, values = tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist()
    return [
        TokenLogprob(
            row[0], numbers[0], tuple(zip(row[1 : top + 1], numbers[1 : top + 1], strict=True))
        )
        for row, numbers in zip(ids, values, strict=True)
    ]


def with_first_and_placeholders(
    entries: Sequence[TokenLogprob], request: GenerationRequest
) -> Sequence[TokenLogprob]:
    """Add the first prompt token, which has none, and take those of placeholders away."""
    if not entries:
        return ()
    named = [TokenLogprob(request.token_ids[0], math.nan), *entries]
    for item in request.prompt.media if len(named) == len(request.token_ids) else ():
        for span in item.spans:
            for position in range(span.start, span.start + span.length):
                named[position] = TokenLogprob(request.token_ids[position], math.nan)
    return named


@dataclass(slots=True)
class Progress:
    """What has come of a request."""

    emitted: int = 0
    """Tokens that the sink got."""
    cached: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    weight_version: str = ""


def conclude(
    output: Any, request: GenerationRequest, progress: Progress, data: EngineData | None
) -> Finish | ServingError:
    """Make the end of a request from vLLM's last output for it."""
    match str(output.finish_reason):
        case "stop" | "repetition":
            reason = FinishReason.STOP
        case "length":
            reason = FinishReason.LENGTH
        case "abort":
            # We didn't ask for it: a core process does that as it shuts down.
            return UnavailableError("The engine dropped the request.")
        case _:
            return _failure(request)
    stop = output.stop_reason
    return Finish(
        reason=reason,
        matched_token_id=stop if isinstance(stop, int) else None,
        engine_data=data,
        **_counts(request, progress),
        prompt_logprobs=with_first_and_placeholders(progress.prompt_logprobs, request),
    )


def _failure(request: GenerationRequest) -> ServingError:
    """Name what can end a single request with an error: vLLM doesn't say."""
    if request.sampling.constraint is not None:
        return InvalidRequestError.of(
            "sampling.constraint",
            "the engine cannot compile this grammar, or no token can follow: it allows none, or "
            "none that min_new_tokens allows",
        )
    if request.ticket is not None:
        return KvTransferError("The KV cache could not be handed over from prefill to decode.")
    return InternalError("The engine failed to run the request.")


def cancelled(request: GenerationRequest, progress: Progress) -> Finish:
    """Report an abort."""
    return Finish(reason=FinishReason.CANCELLED, **_counts(request, progress))


def _counts(request: GenerationRequest, progress: Progress) -> dict[str, Any]:
    return {
        "prompt_tokens": len(request.token_ids),
        "completion_tokens": progress.emitted,
        "cached_tokens": progress.cached,
        "media_tokens": request.prompt.media_tokens,
        "weight_version": progress.weight_version,
    }
