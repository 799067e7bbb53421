"""What an SGLang engine that has just started is, and the smallest request that shows it works."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.sglang.config import SglangEngineConfig, data_parallel_ranks
from millstream_server.engines.sglang.launch import BuiltEngine
from millstream_server.generation.generator import GeneratorInfo, MediaModel, read_media_model
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.ticket import KvTransfer, Ticket
from millstream_server.generation.validation import REFUSED_IN_DIFFUSION
from millstream_server.media.families import UnusableFamilyError
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.trace_context import TraceContext

log = get_log(__name__)

_LIMITS_WAIT_S = 10.0
_LIMITS_POLL_S = 0.02
# Our own requests belong to no trace; without a parent SGLang would start one for each.
_NOT_SAMPLED = TraceContext(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00")


def with_media_model(
    config: SglangEngineConfig,
) -> tuple[SglangEngineConfig, MediaModel | None]:
    """Find out what the model takes besides text, and whether SGLang does.

    A model whose images aren't supported here serves text: SGLang must not give a meaning to its
    placeholder tokens, which nobody could check.
    """
    if config.role is Role.DIFFUSION:
        return replace(config, multimodal=False), None
    if config.multimodal is False:
        return config, None
    try:
        media = read_media_model(
            Path(config.model_path), takes_pixels=config.role is not Role.DECODE
        )
    except UnusableFamilyError as error:
        log.warning("the model takes text only", reason=str(error))
        return replace(config, multimodal=False), None
    return (config if media is None else replace(config, multimodal=True)), media


async def running_limit(built: BuiltEngine) -> int:
    """Ask how many requests run at once; the scheduler publishes it when first idle.

    Raises:
        EngineFailedError: it did not.
    """
    configured = built.server_args.get("max_running_requests")
    if configured:
        # Of each replica; data-parallel attention divides it between its ranks.
        return int(configured) * int(built.server_args.get("dp_size") or 1)
    for _ in range(math.ceil(_LIMITS_WAIT_S / _LIMITS_POLL_S)):
        loads = await built.engine.tokenizer_manager.get_loads()
        if loads and all(load.max_running_requests for load in loads):
            return sum(int(load.max_running_requests) for load in loads)
        await asyncio.sleep(_LIMITS_POLL_S)
    raise EngineFailedError("SGLang's scheduler did not report its limits.")


def describe(
    built: BuiltEngine,
    config: SglangEngineConfig,
    max_running_requests: int,
    media: MediaModel | None,
    *,
    model_hash: str,
    tells_kv: bool,
) -> GeneratorInfo:
    """Read what the worker tells its callers."""
    arguments = built.server_args
    page_size = int(arguments.get("page_size") or 1)
    dp_size = data_parallel_ranks(arguments)
    is_prefill = config.role is Role.PREFILL
    return GeneratorInfo(
        engine="sglang",
        engine_version=built.version,
        device=config.resolved_device(),
        vocab_size=built.vocab_size,
        context_length=built.context_length,
        block_size=page_size,
        total_blocks=dp_size * (built.total_tokens // page_size),
        max_running_requests=max_running_requests,
        # All ranks, also those on other machines: the leader serves their requests.
        dp_size=dp_size,
        weight_version=str(arguments.get("weight_version") or ""),
        abilities=config.abilities(),
        bootstrap_host=config.bootstrap_host if is_prefill else "",
        bootstrap_port=config.bootstrap_port if is_prefill else 0,
        kv_transfer=(
            KvTransfer(f"sglang.{config.transfer_backend}") if config.role.hands_off else None
        ),
        media=media,
        takes_adapters=config.max_loras_per_batch > 0,
        refused_fields=_refused_fields(config.role, arguments),
        model_hash=model_hash,
        max_batched_tokens=_batched_tokens(arguments),
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        tells_kv=tells_kv and not arguments.get("disable_radix_cache"),
    )


def _refused_fields(role: Role, arguments: Mapping[str, Any]) -> frozenset[str]:
    if role is Role.DIFFUSION:
        return REFUSED_IN_DIFFUSION
    if arguments.get("enable_deterministic_inference"):
        # An assertion in SGLang's sampler, which ends its scheduler.
        return frozenset({"sampling.min_p"})
    return frozenset()


def _batched_tokens(arguments: Mapping[str, Any]) -> int:
    """Return how many prompt tokens a step computes: a chunk, unless prompts aren't cut."""
    chunk = int(arguments.get("chunked_prefill_size") or 0)
    return chunk if chunk > 0 else int(arguments.get("max_prefill_tokens") or 0)


def probe_request(built: BuiltEngine, role: Role) -> GenerationRequest:
    """Make a request of two tokens; in a P/D role its peer is SGLang's fake one."""
    ticket = None
    if role.hands_off:
        ticket = Ticket(built.fake_bootstrap_host, 0, secrets.randbits(63))
    return GenerationRequest(
        prompt=Prompt((0,) * 4),
        sampling=Sampling(max_new_tokens=2, temperature=0.0, ignore_eos=True),
        ticket=ticket,
        trace=_NOT_SAMPLED,
    )
