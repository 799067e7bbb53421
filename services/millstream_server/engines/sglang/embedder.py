"""SGLang as a `embedding.embedder.Embedder`."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric

from millstream_server.control.engine import EngineLoad, warm_up_by_probe
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.embedding.model_files import Answers
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.describe import running_limit
from millstream_server.engines.sglang.launch import BuiltEngine
from millstream_server.engines.sglang.lifetime import SglangLifetime
from millstream_server.engines.sglang.loads import KvBlocks, RankProgress
from millstream_server.engines.sglang.requests.translate import translate_exception
from millstream_server.engines.sglang.vector_model import VectorModel, read_model, with_ability
from millstream_server.engines.vectors import as_array, check_length
from millstream_server.runtime.errors import (
    EngineFailedError,
    ServingError,
    UnavailableError,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_PROBE = (0,)
_POOL_RESERVE = 6
"""Tokens of its KV cache that SGLang keeps from a prompt."""


class SglangEmbedder:
    """Satisfies `embedding.embedder.Embedder`; one per process, as `SglangEngine`.

    It refuses what would end SGLang's scheduler: empty inputs and those over the model's positions.
    """

    def __init__(
        self,
        config: SglangEngineConfig,
        dimensions: Sequence[int] = (),
        answers: Sequence[str] = (),
    ) -> None:
        """Start nothing yet, import nothing of SGLang.

        ``dimensions``, to which vectors may be cut, and ``answers``, of a generative model that
        ranks, are used instead of what the model's files name.
        """
        self._config = config
        self._dimensions = dimensions
        self._named_answers = answers
        self._answers: Answers | None = None
        self._progress = RankProgress()
        self._lifetime: SglangLifetime[EmbedderInfo] = SglangLifetime(
            self._end_calls, self._progress
        )
        self._calls: set[asyncio.Task[list[Any]]] = set()
        self._inputs = 0
        self._probe: asyncio.Task[list[Any]] | None = None
        self._request: Callable[..., Any] | None = None

    async def start(self, on_failure: Callable[[ServingError], None]) -> EmbedderInfo:
        path = Path(self._config.model_path)
        model = read_model(path, self._dimensions, self._named_answers)
        built = await self._lifetime.start(with_ability(self._config, model))
        self._answers = model.answers
        structs = importlib.import_module("sglang.srt.managers.io_struct")
        self._request = (
            structs.EmbeddingReqInput if model.answers is None else structs.GenerateReqInput
        )
        size = int(built.server_args.get("page_size") or 1)
        blocks = self._lifetime.blocks = KvBlocks(size, built.total_tokens // size)
        info = _describe(built, model, blocks, await running_limit(built))
        self._lifetime.started(built, info, on_failure)
        return info

    async def warm_up(self) -> None:
        await warm_up_by_probe(self, self._config.warm_up_timeout_s)

    def progress(self, dp_rank: int) -> int:
        return self._progress.of(dp_rank)

    async def probe(self, dp_rank: int) -> None:
        """Run one token through.

        A cancelled probe stays until a scheduler that hung has let go of it, and the next call
        waits for the same one: so a long hang doesn't pile them up.
        """
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._run([_PROBE]))
            self._probe.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._probe)

    async def embed(self, inputs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """See `Embedder.embed`; SGLang gives all vectors the length 1."""
        rows = await self._run(inputs)
        return as_array(rows, (len(inputs), self._lifetime.ready()[1].width))

    async def rank(self, pairs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        return as_array(await self._run(pairs), (len(pairs),))

    async def _run(self, inputs: Sequence[Sequence[int]]) -> list[Any]:
        """Return what SGLang makes of each input; cancel the call to drop them."""
        _, info = self._lifetime.ready()
        for index, ids in enumerate(inputs):
            check_length(index, ids, info.max_input_tokens)
        call = asyncio.create_task(self._call(inputs))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        self._inputs += len(inputs)
        try:
            return await call
        except asyncio.CancelledError as error:
            if self._lifetime.failure and not _cancelling():
                raise EngineFailedError(self._lifetime.failure) from error
            raise
        except ServingError:
            raise
        except Exception as error:
            log.warning("SGLang refused inputs", inputs=len(inputs), error=error)
            raise translate_exception(error) from error
        finally:
            self._inputs -= len(inputs)

    async def _call(self, inputs: Sequence[Sequence[int]]) -> list[Any]:
        built, _ = self._lifetime.ready()
        assert self._request is not None  # noqa: S101 - set before it is ready
        request = self._request(input_ids=[list(ids) for ids in inputs], **self._asked(len(inputs)))
        manager = built.engine.tokenizer_manager
        rows: list[Any] = []
        async for results in manager.generate_request(request, None):  # one, for all of them
            rows = [self._row(result) for result in results]
            self._progress.note_result(0)
        if len(rows) != len(inputs) or None in rows:
            raise UnavailableError("The engine dropped the inputs; send them again.")
        return rows

    def _asked(self, count: int) -> dict[str, Any]:
        """Return what is asked besides: of a model that answers the logits of its first token."""
        if self._answers is None:
            return {}
        return {
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "token_ids_logprob": [[self._answers.yes, self._answers.no]] * count,
        }

    def _row(self, result: Any) -> Any:
        """Return a vector, a logit, or the difference of two; None: the input was dropped."""
        if self._answers is None:
            return result.get("embedding")
        positions = result["meta_info"].get("output_token_ids_logprobs")
        if not positions:
            return None
        logits = {token: value for value, token, *_ in positions[0]}
        return logits[self._answers.yes] - logits[self._answers.no]

    async def load(self) -> EngineLoad:
        return await self._lifetime.load(self._inputs)

    def metrics(self) -> Iterable[Metric]:
        return self._lifetime.metrics()

    def _end_calls(self, _why: str) -> None:
        for call in list(self._calls):
            call.cancel()

    async def close(self) -> None:
        """Stop SGLang's processes, also while they start; see `Engine.close`."""
        await self._lifetime.close(lambda: [*self._calls, *([self._probe] if self._probe else [])])


def _describe(
    built: BuiltEngine, model: VectorModel, blocks: KvBlocks, running: int
) -> EmbedderInfo:
    """Read what the worker tells its callers."""
    manager = built.engine.tokenizer_manager
    batch = min(int(built.server_args["max_prefill_tokens"]), built.total_tokens)
    chunk = int(built.server_args.get("chunked_prefill_size") or 0)
    # SGLang keeps room for an answer even where none is asked for; see `launch.BuiltEngine`.
    context = int(manager.context_len) if model.answers is None else built.context_length - 4
    return EmbedderInfo(
        engine="sglang",
        engine_version=built.version,
        device=str(built.server_args.get("device") or ""),
        max_running_requests=running,
        weight_version=str(built.server_args.get("weight_version") or ""),
        embeds=model.embeds,
        ranks=not model.embeds,
        width=model.width,
        dimensions=model.dimensions,
        max_input_tokens=_longest(context, blocks, model.positions),
        vocab_size=built.vocab_size,
        max_batch_tokens=min(batch, chunk) if chunk > 0 else batch,
        normalizes=model.embeds,
        answers=model.answers is not None,
    )


def _longest(context: int, blocks: KvBlocks, positions: int | None) -> int:
    """Return the longest input that SGLang answers.

    It refuses one of the context's length, lets one wait for ever, and all that follow it, that its
    KV cache can't hold beside a block and its reserve, and dies of one with more tokens than the
    model has positions.
    """
    longest = min(context - 1, blocks.size * (blocks.total - 1) - _POOL_RESERVE)
    return longest if positions is None else min(longest, positions)


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
