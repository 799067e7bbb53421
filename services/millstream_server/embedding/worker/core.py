"""How a worker embeds and ranks: check a request, admit it, run it in batches, make its output."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from millstream_server.embedding.checks import check_embed, check_rerank
from millstream_server.embedding.embedder import Embedder, EmbedderInfo
from millstream_server.embedding.request import (
    EmbedFinished,
    EmbedRequest,
    Ranked,
    Ranking,
    RerankRequest,
    Vectors,
)
from millstream_server.embedding.worker.batcher import Batcher, BatchLimits, Compute, Part
from millstream_server.runtime.errors import DeadlinePassedError
from millstream_server.runtime.rpc.slot_session import Output
from millstream_server.runtime.telemetry.metrics import EMBED_TOKENS
from millstream_server.worker.open_requests import CountedRequest, OpenRequests

_UNREAD_BYTES = 4 << 20
"""Of a request whose caller reads slowly; see `BatchLimits.max_unread`."""
_FLOAT_BYTES = 4


class VectorWorker:
    """Embeds and ranks on one engine."""

    def __init__(
        self,
        engine: Embedder,
        model: str,
        requests: OpenRequests,
        loaded: Callable[[], EmbedderInfo],
        max_batch_tokens: int = 0,
    ) -> None:
        """Count requests in ``requests``; ``loaded`` returns the engine's facts, or raises.

        ``max_batch_tokens`` 0: what the engine runs at once.
        """
        self._engine = engine
        self._model = model
        self._requests = requests
        self._loaded = loaded
        self._max_batch_tokens = max_batch_tokens
        self._batchers: dict[Compute, Batcher] = {}

    async def embed(self, request: EmbedRequest, output: Output[Vectors]) -> EmbedFinished:
        """Embed a batch; cancel it to stop. If it raises, what is in ``output`` is valid."""
        tokens = sum(map(len, request.inputs))
        with self._admitted(request, tokens, lambda info: check_embed(request, info)) as info:
            inputs: Sequence[Sequence[int]] = request.inputs  # type: ignore[assignment]  # checked
            async with contextlib.aclosing(
                self._batcher(self._engine.embed, info).run(inputs)
            ) as parts:
                async for part in parts:
                    vectors = _vectors(part, request)
                    await output.put(vectors, len(vectors.values))
            EMBED_TOKENS.inc(tokens)
        return EmbedFinished(request_id=request.request_id, model=self._model, input_tokens=tokens)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Score pairs; the best first, equal ones by index. Cancel the call to stop it."""
        self._requests.check_accepts()
        tokens = sum(map(len, request.pairs))
        with self._admitted(request, tokens, lambda info: check_rerank(request, info)) as info:
            found: list[Ranked] = []
            async with contextlib.aclosing(
                self._batcher(self._engine.rank, info).run(request.pairs)
            ) as parts:
                async for part in parts:
                    found += map(Ranked, part.indices, part.rows.tolist())
            EMBED_TOKENS.inc(tokens)
        found.sort(key=lambda ranked: (-ranked.logit, ranked.index))
        return Ranking(
            results=found[: request.top_n],
            input_tokens=tokens,
            request_id=request.request_id,
            model=self._model,
        )

    @contextlib.contextmanager
    def _admitted(
        self,
        request: EmbedRequest | RerankRequest,
        tokens: int,
        check: Callable[[EmbedderInfo], None],
    ) -> Iterator[EmbedderInfo]:
        opened = CountedRequest(self._requests, request.request_id, request.trace)
        try:
            info = self._loaded()
            check(info)
            self._requests.check(tokens)
            opened.admit(tokens)
            yield info
        except BaseException as error:
            opened.failed(_reported(error, request.deadline_s))
            raise
        attributes = {"gen_ai.usage.input_tokens": tokens} if opened.traced else {}
        opened.finished("OK", attributes)

    def _batcher(self, compute: Compute, info: EmbedderInfo) -> Batcher:
        if compute not in self._batchers:
            limits = BatchLimits(
                max_tokens=self._max_batch_tokens or info.max_batch_tokens,
                max_inputs=info.max_running_requests,
                max_unread=max(1, _UNREAD_BYTES // (_FLOAT_BYTES * max(1, info.width))),
            )
            self._batchers[compute] = Batcher(compute, limits)
        return self._batchers[compute]


def _vectors(part: Part, request: EmbedRequest) -> Vectors:
    rows = finish(part.rows, request.dimensions, normalize=request.normalize)
    return Vectors(part.indices, rows.shape[1], pack(rows))


def _reported(error: BaseException, deadline_s: float | None) -> BaseException:
    """Return what to count: a request that its deadline stopped was cancelled by its stream."""
    passed = deadline_s is not None and time.monotonic() >= deadline_s
    if passed and not isinstance(error, Exception):
        return DeadlinePassedError("the deadline passed before the request had ended")
    return error


def finish(
    rows: NDArray[np.float32], dimensions: int | None, *, normalize: bool
) -> NDArray[np.float32]:
    """Cut vectors [inputs, width] to ``dimensions``, None: not; give them the length 1 after that.

    A vector of zeros stays one.
    """
    cut = rows if dimensions is None else rows[:, :dimensions]
    if not normalize:
        return cut
    lengths: NDArray[np.float32] = np.sqrt(np.einsum("ij,ij->i", cut, cut))
    lengths[lengths == 0] = 1
    return cut / lengths[:, np.newaxis]


def pack(rows: NDArray[np.float32]) -> bytes:
    """Return the numbers, one vector after another: float32, little endian."""
    return np.ascontiguousarray(rows, "<f4").tobytes()
