"""vLLM as a `embedding.embedder.Embedder`: its pooling runner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream_server.control.engine import (
    EngineLoad,
    LoadProgress,
    warm_up_by_probe,
)
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.embedding.model_files import (
    UnusableModulesError,
    dimensions_of,
    read_use,
)
from millstream_server.engines.vectors import (
    as_array,
    check_length,
    check_ranker,
    read_config,
    table_positions,
)
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.engines.vllm.lifetime import VllmLifetime
from millstream_server.engines.vllm.outputs import Outputs
from millstream_server.generation.request import new_engine_id
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_PROBE = (0,)


class VllmEmbedder:
    """Satisfies `embedding.embedder.Embedder`. Each input is a request of vLLM's."""

    def __init__(self, config: VllmEngineConfig, dimensions: Sequence[int] = ()) -> None:
        """Start nothing yet, import nothing of vLLM.

        ``dimensions``: to which vectors may be cut, instead of those that the model's files name.
        """
        self._config = config
        self._dimensions = dimensions
        self._outputs = Outputs(self._received, self._lose)
        self._lifetime: VllmLifetime[EmbedderInfo] = VllmLifetime(config, self._fail_all)
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        """The result of each input, by vLLM's id."""
        self._params: Any = None
        self._padding: int | None = None
        """The id of padding, if it has no position: vLLM counts it as any other."""

    def _lose(self, what: str) -> None:
        self._lifetime.lose(what)

    async def start(self, on_failure: Callable[[ServingError], None]) -> EmbedderInfo:
        path = Path(self._config.model_path)
        config = read_config(path / "config.json")
        _check_use(path)
        if _has_positions(config) and config.get("position_embedding_type") is None:
            # transformers no longer writes it, and vLLM's check of it fails without.
            extra = {"hf_overrides": {"position_embedding_type": "absolute"}}
            self._config = replace(self._config, extra={**extra, **self._config.extra})
        self._padding = config.get("pad_token_id") if _skips_padding(config) else None
        built = await self._lifetime.start(self._config)
        tasks = await built.client.get_supported_tasks_async()
        embeds = "embed" in tasks
        if not embeds and "classify" not in tasks:
            raise EngineFailedError("vLLM neither embeds nor ranks with this model.")
        if not embeds:
            check_ranker(
                config,
                bert=config.get("model_type") == "bert",
                segments="which token ids don't say",
            )
        self._params = built.vllm.PoolingParams(
            task="embed" if embeds else "classify",
            # Vectors of their own length, and plain logits.
            use_activation=False,
        )
        self._params.verify(built.config.model_config)
        info = _describe(built, config, self._dimensions, embeds=embeds)
        self._lifetime.started(built, info, on_failure)
        self._outputs.start(built)
        return info

    def load_progress(self) -> LoadProgress:
        """See `control.engine.LoadObserved`."""
        return self._lifetime.load_progress()

    async def warm_up(self) -> None:
        await warm_up_by_probe(self, self._config.warm_up_timeout_s)

    def progress(self, dp_rank: int) -> int:
        return self._outputs.steps(dp_rank)

    async def probe(self, dp_rank: int) -> None:
        await self._run([_PROBE])

    async def embed(self, inputs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        rows = await self._run(inputs)
        return as_array(rows, (len(inputs), self._lifetime.ready()[1].width))

    async def rank(self, pairs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        rows = await self._run(pairs)
        return as_array([row.reshape(-1)[:1] for row in rows], (len(pairs), 1))[:, 0]

    async def _run(self, inputs: Sequence[Sequence[int]]) -> list[Any]:
        """Return what vLLM makes of each input; cancel the call to drop them."""
        built, info = self._lifetime.ready()
        _check(inputs, info, self._padding)
        loop = asyncio.get_running_loop()
        ids = [new_engine_id() for _ in inputs]
        results = [loop.create_future() for _ in inputs]
        self._waiting |= dict(zip(ids, results, strict=True))
        try:
            for name, token_ids in zip(ids, inputs, strict=True):
                await built.client.add_request_async(self._request(built, name, token_ids))
            return await asyncio.gather(*results)
        except ServingError:
            raise
        except Exception as error:
            log.warning("vLLM refused inputs", inputs=len(inputs), error=error)
            self._lifetime.ready()
            raise InternalError("The engine could not take the inputs.") from error
        finally:
            left = [name for name in ids if self._waiting.pop(name, None) is not None]
            if left and not self._lifetime.ended.is_set():
                await built.client.abort_requests_async(left)

    def _request(self, built: BuiltEngine, name: str, token_ids: Sequence[int]) -> Any:
        return built.vllm.EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(token_ids),
            mm_features=None,
            sampling_params=None,
            pooling_params=self._params,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=name,
        )

    def _received(self, output: Any, _version: str) -> None:
        if output.finish_reason is None:
            return
        result = self._waiting.pop(output.request_id, None)
        if result is None or result.done():
            return
        if output.pooling_output is None:
            result.set_exception(
                UnavailableError("The engine dropped the inputs; send them again.")
            )
        else:
            result.set_result(output.pooling_output.float().numpy())

    def _fail_all(self, message: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for result in waiting.values():
            if not result.done():
                result.set_exception(EngineFailedError(message))
                result.exception()  # whoever waits may have another one's

    async def load(self) -> EngineLoad:
        """Return the load in inputs; see `Engine.load`."""
        self._lifetime.ready()
        stats = self._outputs.stats.get(0)
        running = min(stats.num_running_reqs if stats else 0, len(self._waiting))
        return EngineLoad(running_requests=running, queued_requests=len(self._waiting) - running)

    async def close(self) -> None:
        if self._lifetime.closed:
            return
        await self._lifetime.close()
        await self._outputs.close()


def _check_use(path: Path) -> None:
    """Refuse what nobody has compared; vLLM itself follows the pooling that the files name."""
    try:
        use = read_use(path)
    except UnusableModulesError as error:
        raise EngineFailedError(f"The model can't be used: {error}.") from error
    if use.answers is not None:
        raise EngineFailedError(
            "The model ranks by its answer, which vLLM workers can't; use --engine sglang or "
            "--engine transformers."
        )
    if more := sorted({module.kind for module in use.further}):
        raise EngineFailedError(
            f"The model's modules.json has a layer {', '.join(more)} after pooling, which nobody "
            "has compared on vLLM; use --engine transformers."
        )


def _describe(
    built: BuiltEngine, config: Mapping[str, Any], dimensions: Sequence[int], *, embeds: bool
) -> EmbedderInfo:
    """Read what the worker tells its callers."""
    model, scheduler = built.config.model_config, built.config.scheduler_config
    longest = int(model.max_model_len)
    if built.config.cache_config.num_gpu_blocks and built.rank_blocks > 1:  # it has a KV cache
        longest = min(longest, built.rank_blocks * built.block_size)
    if (positions := _positions(config)) is not None:
        longest = min(longest, positions)
    width = int(model.hf_text_config.hidden_size) if embeds else 0
    return EmbedderInfo(
        engine="vllm",
        engine_version=built.vllm.version,
        device=str(built.config.device_config.device_type),
        max_running_requests=int(scheduler.max_num_seqs),
        embeds=embeds,
        ranks=not embeds,
        width=width,
        dimensions=_dimensions(config, width, dimensions),
        max_input_tokens=longest,
        vocab_size=built.vocab_size,
        max_batch_tokens=max(int(scheduler.max_num_batched_tokens), longest),
    )


def _dimensions(config: Mapping[str, Any], width: int, chosen: Sequence[int]) -> tuple[int, ...]:
    try:
        return dimensions_of(config, width, chosen)
    except UnusableModulesError as error:
        raise EngineFailedError(f"The model can't be used: {error}.") from error


def _has_positions(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in {"bert", "roberta", "xlm-roberta"}


def _skips_padding(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in {"roberta", "xlm-roberta"}


def _positions(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a table of positions has room for; None: there is no table."""
    if not _has_positions(config):
        return None
    return table_positions(config, after_padding=_skips_padding(config))


def _check(inputs: Sequence[Sequence[int]], info: EmbedderInfo, padding: int | None) -> None:
    """Refuse what would end vLLM's core process; callers have checked it before."""
    for index, ids in enumerate(inputs):
        check_length(index, ids, info.max_input_tokens)
        if min(ids) < 0 or max(ids) >= info.vocab_size:
            raise InvalidRequestError.of(f"inputs[{index}]", "has an id outside the vocabulary")
        if padding in ids:
            raise UnsupportedFeatureError.of(
                f"inputs[{index}]",
                f"has the id {padding}, this model's padding, which vLLM gives a position",
            )
