"""Takes tokens out of SGLang's batches where they arrive, in its response loop.

SGLang's scheduler sends one batch a step, with the new tokens of all requests. SGLang makes a
dictionary of each request's part, puts it into a list, sets an event and wakes a task, which costs
more than all else that a token costs this process. Here a request's sink gets them at once.

Only tokens are taken, and most of a request's batches have nothing else. Its start, its end and its
prompt's logprobs stay SGLang's own, and so do requests that aren't ours: its `async_generate`
registers and sends a request, waits in a pause, holds the lock of weight updates, acquires and
releases its LoRA adapter, and reports how it ended. Lost is only what SGLang's crash dump
(`--crash-dump-folder`) has of answers that haven't ended.

Of SGLang's private names these are used here, and `rid_to_state` in `requests.runs`:

- `TokenizerManager._handle_batch_output`: replaced; its `handle_loop` looks it up for each batch.
- `TokenizerManager.rid_to_state`, and of its `ReqState`: `out_list`, `obj`, `time_stats`,
  `ttft_observed`, `last_completion_tokens`.
- `TokenizerManager.enable_metrics`, `enable_priority_scheduling`, `collect_metrics` and
  `metrics_collector`, of that `observe_inter_token_latency`.
- `BatchTokenIDOutput` and, if SGLang has the tokenizer, `BatchStrOutput`: parallel lists, whose
  `output_ids` are new tokens only.
- `HEALTH_CHECK_RID_PREFIX`: an unknown id that starts so is passed over in silence.

A new SGLang: `test_the_names_we_use_are_there` (tests/integration/sglang_engine/test_stand_in.py)
says which of them are gone, and compares a digest of `_handle_batch_output`. When that differs,
read it again: what it does for a request that goes on and asked for nothing but tokens and their
logprobs must be done here.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from millstream_server.engines.sglang.loads import RankProgress
from millstream_server.engines.sglang.requests.translate import read_logprobs
from millstream_server.generation.output import TokenLogprob


class Taker(Protocol):
    """A request that takes its tokens here."""

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Take tokens that are new, if any; more will come."""

    def give_up(self, error: Exception) -> None:
        """End the request: `take` has raised this."""


class BatchReader:
    """Stands in front of SGLang's `_handle_batch_output`; works from its creation on."""

    def __init__(self, manager: Any, takers: Mapping[str, Taker], progress: RankProgress) -> None:
        """``takers`` are the open requests, by SGLang's request id; it is looked at, not copied."""
        messages = importlib.import_module("sglang.srt.managers.io_struct")
        constants = importlib.import_module("sglang.srt.constants")
        self._kinds = (messages.BatchTokenIDOutput, messages.BatchStrOutput)
        self._taken = constants.HEALTH_CHECK_RID_PREFIX
        self._manager = manager
        self._takers = takers
        self._progress = progress
        self._times = _Times(manager)
        self._handle_rest = manager._handle_batch_output  # noqa: SLF001 - see above
        manager._handle_batch_output = self._on_batch  # noqa: SLF001

    async def _on_batch(self, batch: Any) -> None:
        if not isinstance(batch, self._kinds) or batch.output_ids is None:
            await self._handle_rest(batch)
            return
        # Parallel to the other lists, so what was taken is passed over, not left out.
        batch.rids = self._take(batch)
        if batch.rids.count(self._taken) < len(batch.rids):
            await self._handle_rest(batch)
        # The loop doesn't wait if the next batch has come already: other tasks would get no turn.
        await asyncio.sleep(0)

    def _take(self, batch: Any) -> list[str]:
        """Hand out what is only tokens; return the ids, `_taken` in the place of those."""
        takers, states = self._takers, self._manager.rid_to_state
        rest: list[str] = []
        self._times.begin()
        for i, rid in enumerate(batch.rids):
            taker, state = takers.get(rid), states.get(rid)
            if taker is None or state is None or _more_than_tokens(batch, i, state):
                rest.append(rid)
                continue
            rest.append(self._taken)
            try:
                token_ids = tuple(batch.output_ids[i])
                logprobs: tuple[TokenLogprob, ...] = ()
                if state.obj.return_logprob:
                    logprobs = read_logprobs(batch, i, top=state.obj.top_logprobs_num > 0)
                taker.take(token_ids, logprobs[: len(token_ids)])
            except Exception as error:  # noqa: BLE001 - it would end the loop, so all requests
                taker.give_up(error)
            self._times.note(state, batch, i)
        self._times.end()
        # A batch is one scheduler's.
        if self._taken in rest and any(batch.output_ids):
            self._progress.note_result((batch.dp_ranks and batch.dp_ranks[0]) or 0)
        return rest


def _more_than_tokens(batch: Any, i: int, state: Any) -> bool:
    prompts = batch.input_token_logprobs_val
    return bool(
        batch.finished_reasons[i] is not None
        or (prompts and prompts[i])
        # What came before is still to be handed out by SGLang's task.
        or state.out_list
    )


class _Times:
    """Keeps SGLang's times of each request, and its metrics made from them, as it does itself.

    A batch has one time, so that most requests of a batch have waited equally long for it, and are
    observed together: one by one the metrics cost as much as everything else here.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._now = 0.0
        self._waits: Counter[float] = Counter()
        """How many tokens of the batch came after so many seconds."""

    def begin(self) -> None:
        self._now = time.perf_counter()

    def note(self, state: Any, batch: Any, i: int) -> None:
        times, manager = state.time_stats, self._manager
        if not times.first_token_time:
            times.set_first_token_time(self._now)
            times.set_response_sent_to_client_time(self._now)
        if not manager.enable_metrics:
            return
        if not state.ttft_observed or manager.enable_priority_scheduling:
            manager.collect_metrics(state, batch, i)  # the priority is one of its labels
            return
        tokens = batch.completion_tokens[i] - state.last_completion_tokens
        if tokens > 0:
            self._waits[(self._now - times.last_time) / tokens] += tokens
        if tokens:  # fewer: SGLang has taken the request back
            times.set_last_time(self._now)
            state.last_completion_tokens = batch.completion_tokens[i]

    def end(self) -> None:
        for wait_s, tokens in self._waits.items():
            collector = self._manager.metrics_collector
            collector.observe_inter_token_latency(collector.labels, wait_s * tokens, tokens)
        self._waits.clear()
