"""vLLM's own `vllm:` metrics, unchanged: its logger for Prometheus, fed as `AsyncLLM` feeds it.

vLLM makes them in the process of its client, in the library's default registry. What only
`AsyncLLM` knows isn't there: what clients asked for (`vllm:request_params_*`), aborted requests.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from prometheus_client import REGISTRY as DEFAULT_REGISTRY
from prometheus_client.core import Metric

from millstream_server.engines.vllm.launch import BuiltEngine

_PREFIX = "vllm:"


class VllmMetrics:
    """Turns what each step of vLLM says into its metrics. One per process, as in vLLM."""

    def __init__(self, built: BuiltEngine) -> None:
        """Start at zero."""
        loggers: Any = importlib.import_module("vllm.v1.metrics.loggers")
        self._vendor: Any = importlib.import_module("vllm.v1.metrics.stats")
        self._queued: Any = importlib.import_module("vllm.v1.engine").EngineCoreEventType.QUEUED
        self._logger = loggers.PrometheusStatLogger(built.config, list(range(built.ranks)))
        self._logger.log_engine_initialized()
        self._adapters = self._vendor.LoRARequestStates(log_stats=False)
        self._states: dict[str, tuple[Any, Any]] = {}
        """Statistics of each request with output, and those of its prefill."""

    def step(self, outputs: Any) -> None:
        """Count a message of vLLM's core, an `EngineCoreOutputs`."""
        made = self._vendor.IterationStats()
        for output in outputs.outputs:
            known = self._states.get(output.request_id)
            if known is None:
                known = self._states[output.request_id] = self._first(outputs, output, made)
                fresh = True
            else:
                fresh = False
            state, prefill = known
            made.update_from_output(
                output, outputs.timestamp, fresh, state, self._adapters, lora_name=None
            )
            if output.finish_reason is not None:
                del self._states[output.request_id]
                made.update_from_finished_request(
                    output.finish_reason,
                    output.request_id,
                    prefill.num_prompt_tokens,
                    max_tokens_param=None,
                    req_stats=state,
                    num_cached_tokens=prefill.num_cached_tokens,
                )
        self._logger.record(outputs.scheduler_stats, made, engine_idx=outputs.engine_index)

    def _first(self, outputs: Any, output: Any, made: Any) -> tuple[Any, Any]:
        # Its arrival by this process's clock, from the core's, which says how long ago it was.
        queued = (event.timestamp for event in output.events or () if event.type == self._queued)
        waited_s = outputs.timestamp - next(queued, outputs.timestamp)
        state = self._vendor.RequestStateStats(arrival_time=made.iteration_timestamp - waited_s)
        return state, output.prefill_stats or self._vendor.PrefillStats()

    def forget(self, core_id: str) -> None:
        """Stop counting a request, which gets no last output; may be called of any."""
        self._states.pop(core_id, None)


def collect() -> Iterable[Metric]:
    """Return every `vllm:` family."""
    return [each for each in DEFAULT_REGISTRY.collect() if each.name.startswith(_PREFIX)]
