# ruff: noqa: INP001 - a folder for PYTHONPATH, not a package
"""SGLang plugin (entry-point group ``sglang.srt.plugins``): goes on with another engine's request.

A request with the parameter `PARAMETER` = k has k tokens at its prompt's end that were output of
this request elsewhere. Its grammar is advanced over them, and its penalties count them. Budgets
are what the sender left of them.

SGLang loads it in the engine's process, in schedulers and in the detokenizer. It hooks SGLang's own
methods, so it does nothing unless each of them, and what it relies on besides, is what it was
written for (`DIGESTS`). Whether it works is then found out by requests (`engines.sglang.resume`).
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

PARAMETER = "millstream_resumed"
"""In `sampling_params.custom_params`."""
MISFIT = "the resumed tokens don't fit the grammar"

_CREATE = "sglang.srt.managers.scheduler.Scheduler._create_generation_req"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_COUNT = "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
_GRAMMARS = "sglang.srt.constrained.grammar_manager.GrammarManager"
_CACHED = f"{_GRAMMARS}.process_req_with_grammar"
_COMPILED = f"{_GRAMMARS}.get_ready_grammar_requests"
_PENALTIES = "sglang.srt.sampling.penaltylib"
DIGESTS = {
    _CREATE: "9f867d91dee9",
    _SAMPLING: "48352e06affe",
    _COUNT: "dce2467c859a",
    _CACHED: "5341c5932fae",
    _COMPILED: "6681f35d2313",
    # Relied upon only.
    f"{_PENALTIES}.frequency_penalty.BatchedFrequencyPenalizer": "13839176ad8e",
    f"{_PENALTIES}.presence_penalty.BatchedPresencePenalizer": "4fdf236a59d1",
    f"{_PENALTIES}.repetition_penalty.BatchedRepetitionPenalizer": "de1b44de639a",
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.accept_token": "10ac43f0c3da",
    "sglang.srt.disaggregation.decode_schedule_batch_mixin."
    "ScheduleBatchDisaggregationDecodeMixin.process_prebuilt": "735ddcdc5bcd",
    "sglang.srt.layers.sampler.multinomial_with_seed": "5802a0ad7e5f",
    "sglang.srt.managers.schedule_batch.Req.__init__": "95516b226df1",
}
"""First digits of SHA-256 of the sources in SGLang 0.5.23."""
_HOOKED = (_CREATE, _SAMPLING, _COUNT, _CACHED, _COMPILED)

log = logging.getLogger("sglang.millstream_resume")


def register() -> None:
    """Hook SGLang's methods, if they are those that are known."""
    if changed := [name for name, digest in DIGESTS.items() if _digest(name) != digest]:
        log.info("no request is resumed: this SGLang has another %s", changed[0])
        return
    after = HookType.AFTER
    HookRegistry.register(_CREATE, _created, after)
    HookRegistry.register(_SAMPLING, _count_resumed, after)
    HookRegistry.register(_COUNT, _count_first, HookType.AROUND)
    HookRegistry.register(_CACHED, _with_cached_grammar, after)
    HookRegistry.register(_COMPILED, _with_compiled_grammars, after)


def _digest(name: str) -> str:
    try:
        source = inspect.getsource(inspect.unwrap(pkgutil.resolve_name(name)))
    except (AttributeError, ImportError, OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _created(req: Any, scheduler: Any, *_args: object, **_options: object) -> None:
    """Note a new request's resumed tokens."""
    params = req.sampling_params.custom_params
    count = params.get(PARAMETER, 0) if isinstance(params, dict) else 0
    if type(count) is not int or not 0 < count < len(req.origin_input_ids):
        return
    if not HookRegistry._patched.issuperset(_HOOKED):  # noqa: SLF001 - it only logs a failure
        req.set_finish_with_abort("this engine can't resume a request")
        return
    req.millstream_resumed = list(req.origin_input_ids[-count:])
    req.millstream_before = req.origin_input_ids[-count - 1]
    req.millstream_hands_off = scheduler.disaggregation_mode.value != "null"


# ---- penalties -----------------------------------------------------------------------------------


def _overlaps() -> bool:
    """Return whether a step is prepared before the result of the one before is known."""
    from sglang.srt.runtime_context import get_schedule  # noqa: PLC0415 - a GPU's import is long

    return not get_schedule().disable_overlap_schedule


def _counted(req: Any) -> Sequence[int]:
    """Return the tokens that the first engine would have counted before the next one.

    When steps overlap, each counts the token before the last, and the first the prompt's last one;
    a decode engine counts prefill's token in its first two steps.
    """
    resumed: list[int] = req.millstream_resumed
    if not _overlaps():
        return resumed
    first = resumed[0] if req.millstream_hands_off else req.millstream_before
    return [first, *resumed[:-1]]


def _count_resumed(info: Any, _cls: object, batch: Any, _vocab_size: int) -> None:
    """Count resumed tokens in the penalties of a new batch."""
    import torch  # noqa: PLC0415 - not before SGLang asks for the plugin

    orchestrator = info.penalizer_orchestrator
    if not orchestrator.is_required:
        return
    prebuilt = batch.forward_mode is not None and batch.forward_mode.is_prebuilt()
    for row, req in enumerate(batch.reqs):
        if not hasattr(req, "millstream_resumed"):
            continue
        req.millstream_first_step = prebuilt
        ids = torch.tensor(_counted(req), dtype=torch.int64, device=info.device)
        for penalizer in orchestrator.penalizers.values():
            if penalizer.is_prepared():
                _count_in(penalizer, row, ids)


def _count_in(penalizer: Any, row: int, ids: Any) -> None:
    match type(penalizer).__name__:
        case "BatchedFrequencyPenalizer":
            penalty = penalizer.frequency_penalties[row].expand(len(ids))
            penalizer.cumulated_frequency_penalties[row].scatter_add_(0, ids, penalty)
        case "BatchedPresencePenalizer":
            penalizer.cumulated_presence_penalties[row, ids] = penalizer.presence_penalties[row]
        case "BatchedRepetitionPenalizer":
            penalty = penalizer.repetition_penalties[row]
            penalizer.cumulated_repetition_penalties[row, ids] = penalty


def _count_first(original: Callable[[Any], object], batch: Any) -> None:
    """In a decode engine's first step count the last resumed token, not prefill's."""
    swapped = []
    if _overlaps():
        for req in batch.reqs:
            if getattr(req, "millstream_first_step", False):
                req.millstream_first_step = False
                swapped.append((req, req.output_ids[-1]))
                req.output_ids[-1] = req.millstream_resumed[-1]
    try:
        original(batch)
    finally:
        for req, token in swapped:
            req.output_ids[-1] = token


# ---- grammars ------------------------------------------------------------------------------------


def _with_cached_grammar(waits: bool, _manager: object, req: Any) -> None:  # noqa: FBT001
    if not waits:
        _advance(req)


def _with_compiled_grammars(ready: Sequence[Any], _manager: object) -> None:
    for req in ready:
        _advance(req)


def _advance(req: Any) -> None:
    """Advance a request's grammar over its resumed tokens, or end it."""
    from sglang.srt.constrained.base_grammar_backend import (  # noqa: PLC0415 - as torch above
        InvalidGrammarObject,
    )

    grammar = req.grammar
    if grammar is None or not hasattr(req, "millstream_resumed"):
        return
    if req.finished() or req.to_finish or isinstance(grammar, InvalidGrammarObject):
        return
    try:
        for token in req.millstream_resumed:
            if grammar.is_terminated():
                req.set_finish_with_abort(f"{MISFIT}: it ended before them")
                return
            grammar.accept_token(token)
    except ValueError as error:
        req.set_finish_with_abort(f"{MISFIT}: {error}")
        return
    # Else a decode engine takes the request for a retracted one, and skips prefill's token.
    grammar.current_token = None
