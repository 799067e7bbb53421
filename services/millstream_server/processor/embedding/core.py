"""Vectors and scores: tokenized and checked here, computed by the workers of their model."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from millstream_server.control.engine import Task
from millstream_server.embedding.checks import check_embed, check_rerank
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.embedding.request import (
    MAX_DOCUMENTS,
    EmbedFinished,
    EmbedRequest,
    Ranked,
    Ranking,
    RerankRequest,
    Vectors,
)
from millstream_server.links.unread import not_asked_for
from millstream_server.processor.embedding.prompts import pair_form, prompt_named
from millstream_server.processor.embedding.tokens import BatchTokenizer
from millstream_server.processor.front import Fit, Front, FrontRequest
from millstream_server.processor.losses import run_on_a_worker
from millstream_server.runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from millstream_server.control.engine import EngineInfo
    from millstream_server.links.fleet import Fleet
    from millstream_server.processor.prompts import Prompts
    from millstream_server.runtime.rpc.slot_session import Output

_WORKERS_FIELD = re.compile(r"(inputs|pairs)\[(\d+)\](?:\.token_ids)?")
_SECONDS_PER_ID = 30e-9
_MANY_IDS = 16 << 10
"""More are checked in a thread."""
_FLOAT_BYTES = 4
_ANY_IDS = (0,)
"""Stands for an input while all else of a request is checked."""


class VectorsCore:
    """Forwards batches of texts, and queries with documents; one per process."""

    def __init__(self, front: Front, prompts: Prompts, workers: Fleet) -> None:
        self._front = front
        self._threads = prompts.threads
        self._workers = workers
        self._tokenizer = BatchTokenizer(prompts.threads, front.limits.max_request_tokens)

    # ---- Embed -----------------------------------------------------------------------------------

    async def embed(self, request: EmbedRequest, output: Output[Vectors]) -> EmbedFinished:
        """Embed a batch on one worker; its vectors go to ``output``.

        Raises:
            ServingError: it failed; errors of inputs name the client's fields.
        """
        texts = {i for i, part in enumerate(request.inputs) if isinstance(part, str)}
        with self._open(Task.EMBED, request) as asked:
            asked.hold(4 * sum(map(len, request.inputs)))  # of texts about, then of their ids
            await asked.find(request.model)
            request, fit = await self._embed_request(request, texts, asked)
            await asked.admit(request.priority, tokens=sum(map(len, request.inputs)))
            try:
                end = await run_on_a_worker(
                    asked,
                    fit,
                    request,
                    lambda address, engine: self._embedded(request, address, engine, asked, output),
                )
            except InvalidRequestError as error:
                raise error.at(partial(_clients_field, texts)) from error
            asked.end(input_tokens=end.input_tokens)
            return replace(end, request_id=request.request_id, model=asked.model)

    async def _embedded(
        self,
        request: EmbedRequest,
        address: str,
        engine: EngineInfo,
        asked: FrontRequest,
        output: Output[Vectors],
    ) -> EmbedFinished:
        """Embed it on one worker."""
        dimensions = request.dimensions or _embedder(engine).width
        promised = PromisedVectors(len(request.inputs), dimensions, address)
        sent = replace(request, trace=asked.leg(address))
        batch = asked.follow(self._workers.embed(address, sent))
        async for vectors, _ in batch.entries():
            promised.check(vectors)
            asked.given = True
            await output.put(vectors, len(vectors.values))
        promised.check_all()
        return batch.end

    def _open(self, task: Task, request: EmbedRequest | RerankRequest) -> FrontRequest:
        return FrontRequest(
            self._front,
            task,
            request.trace,
            request_id=request.request_id,
            deadline_s=request.deadline_s,
        )

    async def _embed_request(
        self, request: EmbedRequest, texts: Container[int], asked: FrontRequest
    ) -> tuple[EmbedRequest, Fit]:
        """Check and tokenize a batch.

        Raises:
            InvalidRequestError: none of the workers can take it.
        """
        _, text = self._front.models.text(asked.model)
        prompt = prompt_named(text.use, request.prompt_name)
        request = replace(request, prompt_name=None)
        outline = replace(request, inputs=[_ANY_IDS] * len(request.inputs))
        engines = asked.engines()
        Fit(lambda engine: check_embed(outline, _embedder(engine))).require(engines)
        ids = await self._tokenizer.inputs(text, request.inputs, _most_tokens(engines), prompt)
        request = replace(request, inputs=ids, model=asked.model)
        fit = Fit(lambda engine: check_embed(request, _embedder(engine), texts=texts))
        await self._require(fit, ids, asked)
        return request, fit

    # ---- Rerank ----------------------------------------------------------------------------------

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Rank documents on one worker.

        Raises:
            ServingError: it failed; errors of documents name the client's fields.
        """
        documents = request.documents
        texts = range(len(documents))
        with self._open(Task.RERANK, request) as asked:
            await asked.find(request.model)
            sent, fit = await self._rerank_request(request, texts, asked)
            await asked.admit(request.priority, tokens=sum(map(len, sent.pairs)))

            async def ranked_at(address: str, _: EngineInfo) -> Ranking:
                ranking = await self._workers.rerank(
                    address, replace(sent, trace=asked.leg(address))
                )
                check_ranked(ranking.results, len(sent.pairs), sent.top_n, address)
                return ranking

            try:
                ranking = await run_on_a_worker(asked, fit, sent, ranked_at)
            except InvalidRequestError as error:
                raise error.at(partial(_clients_field, texts)) from error
            asked.end(input_tokens=ranking.input_tokens)
            returned = documents if request.return_documents else [""] * len(sent.pairs)
            results = [replace(one, document=returned[one.index]) for one in ranking.results]
            return replace(
                ranking, results=results, request_id=request.request_id, model=asked.model
            )

    async def _rerank_request(
        self, request: RerankRequest, texts: Sequence[int], asked: FrontRequest
    ) -> tuple[RerankRequest, Fit]:
        """Check and tokenize a request; the result has pairs only.

        Raises:
            InvalidRequestError: none of the workers can take it.
        """
        _check_form(request)
        pairs: Sequence[Sequence[int]] = request.pairs
        sent = request
        if texts:
            sent = replace(
                request, query="", documents=(), return_documents=False, instruction=None
            )
            outline = replace(sent, pairs=[_ANY_IDS] * len(texts))
            engines = asked.engines()
            Fit(lambda engine: check_rerank(outline, _embedder(engine), texts=texts)).require(
                engines
            )
            _, text = self._front.models.text(asked.model)
            answers = any(_embedder(engine).answers for engine in engines)
            join = pair_form(text, request.instruction, answers=answers)
            pairs = await self._tokenizer.pairs(
                text, request.query, request.documents, _most_tokens(engines), join
            )
        sent = replace(sent, pairs=pairs, model=asked.model)
        fit = Fit(lambda engine: check_rerank(sent, _embedder(engine), texts=texts))
        await self._require(fit, pairs, asked)
        return sent, fit

    async def _require(self, fit: Fit, ids: Sequence[Sequence[int]], asked: FrontRequest) -> None:
        """Check token ids, many of them in a thread.

        Raises:
            InvalidRequestError: none of the workers can take them.
        """
        engines = asked.engines()
        count = sum(map(len, ids))
        if count <= _MANY_IDS:
            fit.require(engines)
        else:
            seconds = count * _SECONDS_PER_ID
            await self._threads.run(lambda: fit.require(engines), seconds, batch=True)


def _check_form(request: RerankRequest) -> None:
    """Check that there are either texts or pairs.

    Raises:
        InvalidRequestError: there are both, neither, or half of the texts.
    """
    if request.pairs and (request.query or request.documents):
        raise InvalidRequestError.of("pairs", "send either query and documents, or pairs")
    if request.pairs and request.instruction:
        raise InvalidRequestError.of("instruction", "needs query and documents: pairs have theirs")
    if request.pairs:
        return
    if not request.documents:
        raise InvalidRequestError.of("documents", f"has 0; send 1 to {MAX_DOCUMENTS}")
    if not request.query:
        raise InvalidRequestError.of("query", "must not be empty")


def _clients_field(texts: Container[int], field: str) -> str:
    """Return what the client calls a field of the worker's."""
    found = _WORKERS_FIELD.fullmatch(field)
    if found is None or int(found[2]) not in texts:
        return field
    return f"inputs[{found[2]}].text" if found[1] == "inputs" else f"documents[{found[2]}]"


def _most_tokens(engines: Sequence[EngineInfo]) -> int:
    """Return the most tokens of an input that one of the workers takes."""
    return max(_embedder(engine).max_input_tokens for engine in engines)


def _embedder(engine: EngineInfo) -> EmbedderInfo:
    return cast("EmbedderInfo", engine)  # whose task it is


# ---- has a worker sent what was asked of it? A client must not get a part as the whole ----------


class PromisedVectors:
    """The vectors of one batch: each input's once, of the right size."""

    def __init__(self, inputs: int, dimensions: int, worker: str) -> None:
        self._missing = set(range(inputs))
        self._dimensions = dimensions
        self._worker = worker

    def check(self, vectors: Vectors) -> None:
        """Check some of them.

        Raises:
            WorkerLostError: they are others than those that were asked for.
        """
        indices = set(vectors.indices)
        expected = _FLOAT_BYTES * self._dimensions * len(vectors.indices)
        if len(indices) < len(vectors.indices) or not indices <= self._missing:
            raise not_asked_for(self._worker, f"vectors of inputs {sorted(vectors.indices)[-8:]}")
        if vectors.dimensions != self._dimensions or len(vectors.values) != expected:
            got = f"{vectors.dimensions} dimensions and {len(vectors.values)} bytes"
            raise not_asked_for(self._worker, f"{len(indices)} vectors of {got}")
        self._missing -= indices

    def check_all(self) -> None:
        """Check that none is missing at the end.

        Raises:
            WorkerLostError: some are.
        """
        if self._missing:
            raise not_asked_for(self._worker, f"an end, with {len(self._missing)} vectors missing")


def check_ranked(results: Sequence[Ranked], documents: int, top_n: int | None, worker: str) -> None:
    """Check that a ranking has the right number of documents, each once.

    Raises:
        WorkerLostError: it hasn't.
    """
    indices = {ranked.index for ranked in results}
    expected = min(documents, documents if top_n is None else top_n)
    valid = indices <= set(range(documents))
    if not valid or len(indices) != len(results) or len(results) != expected:
        raise not_asked_for(worker, f"{len(results)} scores, of {expected}")
