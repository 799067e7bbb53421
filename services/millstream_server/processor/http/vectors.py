"""Vectors and scores: /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from array import array
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import msgspec

from millstream_server.embedding.request import (
    MAX_DOCUMENTS,
    MAX_INPUTS,
    EmbedRequest,
    Ranking,
    RerankRequest,
    Vectors,
)
from millstream_server.processor.http import bodies
from millstream_server.processor.http import vectors_schema as schema
from millstream_server.processor.http.errors import refusing
from millstream_server.processor.http.forwarded import Pieces, common_fields
from millstream_server.processor.http.output import encode
from millstream_server.processor.http.pipeline import Pipeline
from millstream_server.processor.http.schema import TokenId, decoded, read
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.rpc.http import Endpoint, HttpCall
from millstream_server.runtime.rpc.ledger import Hold

T = TypeVar("T")

_EMBEDDINGS = msgspec.json.Decoder(schema.Embeddings)
_read_rerank = partial(read, msgspec.json.Decoder(schema.Rerank), unsupported=schema.UNSUPPORTED)
_read_score = partial(read, msgspec.json.Decoder(schema.Score), unsupported=schema.UNSUPPORTED)
_LISTS = re.compile(rb"\s*\[\s*\[").match
_TEXTS = re.compile(rb"\s*\[\s*\"").match
_LISTS_OF_IDS: msgspec.json.Decoder[list[list[int]]] = msgspec.json.Decoder(list[list[TokenId]])
_LIST_OF_TEXTS = msgspec.json.Decoder(list[str])
_ONE_INPUT: msgspec.json.Decoder[str | list[int]] = msgspec.json.Decoder(str | list[TokenId])
_FLOAT_BYTES = 4
_NUMBERS_AT_ONCE = 16 << 10
"""Written without giving other requests a turn: some 2 ms."""
_QUERIES_AT_ONCE = 8
"""Of one request that has many: each is a request of its own in the model's queue."""
_DOCUMENT = re.compile(r"documents\[(\d+)\]")
_METHODS = ((re.compile(r"\bcall (?:Rerank|Embed), or name"), "name"),)
_EMBED_NAMES = (
    (re.compile(r"\binputs(\[\d+\])\.(?:text|token_ids)\b"), r"input\1"),
    (re.compile(r"^inputs\b"), "input"),
    *_METHODS,
)
_SCORE_NAMES = (
    (re.compile(r"^documents\b"), "text_2"),
    (re.compile(r"^query\b"), "text_1"),
    *_METHODS,
)
_refuse_embed = refusing(_EMBED_NAMES)
_refuse_rerank = refusing(_METHODS)
_refuse_score = refusing(_SCORE_NAMES)


class VectorEndpoints:
    """Serves them; one per process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._calls = pipeline.calls
        self._core = pipeline.vectors
        self._threads = pipeline.threads

    def endpoints(self) -> list[Endpoint]:
        rank = partial(Endpoint, "POST", serve=self.rerank, refuse=_refuse_rerank)
        score = partial(Endpoint, "POST", serve=self.score, refuse=_refuse_score)
        return [
            Endpoint("POST", "/v1/embeddings", self.embed, _refuse_embed),
            *(rank(path) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
            *(score(path) for path in ("/v1/score", "/score")),
        ]

    # ---- vectors

    async def embed(self, body: bytes, call: HttpCall) -> None:
        asked, inputs = await bodies.read(self._threads, body, _read_embeddings)
        request = EmbedRequest(
            inputs=inputs,
            dimensions=asked.dimensions,
            normalize=asked.normalize is not False,
            prompt_name=asked.prompt_name,
            **common_fields(asked, call),
        )
        with self._calls.call(), closing(Hold(self._calls.held)) as held:
            found = _Found(len(request.inputs), held)
            end = await self._core.embed(request, found)
            write = _base64 if asked.encoding_format == "base64" else _numbers
            usage = _usage(end.input_tokens)
            await call.send_from(Pieces(call, _written(found.rows, write, end.model, usage)))

    # ---- scores

    async def rerank(self, body: bytes, call: HttpCall) -> None:
        asked = await bodies.read(self._threads, body, _read_rerank)
        request = RerankRequest(
            query=asked.query,
            documents=[d if isinstance(d, str) else d.text for d in asked.documents],
            top_n=asked.top_n,
            instruction=asked.instruction,
            return_documents=bool(asked.return_documents),
            **common_fields(asked, call),
        )
        with self._calls.call():
            ranking = await self._core.rerank(request)
        results = [
            schema.Ranked(
                one.index,
                one.score,
                schema.Document(one.document) if request.return_documents else None,
            )
            for one in ranking.results
        ]
        await call.write(
            encode(
                schema.Ranking(
                    ranking.request_id,
                    results,
                    schema.Meta(schema.Tokens(ranking.input_tokens)),
                    ranking.model,
                    _usage(ranking.input_tokens),
                )
            )
        )

    async def score(self, body: bytes, call: HttpCall) -> None:
        asked = await bodies.read(self._threads, body, _read_score)
        queries, documents = _texts(asked.text_1), _texts(asked.text_2)
        _check_pairs(queries, documents)
        if len(queries) == 1:
            queries *= len(documents)
        common = common_fields(asked, call)
        free = asyncio.Semaphore(_QUERIES_AT_ONCE)

        async def rank(query: str, places: Sequence[int]) -> Ranking:
            request = RerankRequest(
                query=query,
                documents=[documents[place] for place in places],
                instruction=asked.instruction,
                **common,
            )
            async with free:
                try:
                    return await self._core.rerank(request)
                except InvalidRequestError as error:
                    raise error.at(partial(_document_at, places)) from error

        asked_of = _by_query(queries)
        with self._calls.call():
            rankings = await _all(rank(*one) for one in asked_of.items())
        data = sorted(
            (
                schema.Scored(at[one.index], one.score)
                for at, ranking in zip(asked_of.values(), rankings, strict=True)
                for one in ranking.results
            ),
            key=lambda scored: scored.index,
        )
        tokens = sum(ranking.input_tokens for ranking in rankings)
        scores = schema.Scores(
            call.request_id, int(time.time()), rankings[0].model, data, _usage(tokens)
        )
        await call.write(encode(scores))


# ---- from bodies ---------------------------------------------------------------------------------


def _read_embeddings(body: bytes) -> tuple[schema.Embeddings, Sequence[str | Sequence[int]]]:
    asked = read(_EMBEDDINGS, body, schema.UNSUPPORTED)
    return asked, _inputs(asked.input)


def _inputs(given: msgspec.Raw) -> Sequence[str | Sequence[int]]:
    """Return a batch's inputs: token ids alone are one.

    Raises:
        InvalidRequestError: they are of several kinds, or too many.
    """
    written = bytes(given)
    if _LISTS(written):
        if (count := written.count(b"[") - 1) > MAX_INPUTS:
            raise InvalidRequestError.of("input", f"has {count}; send 1 to {MAX_INPUTS}")
        return decoded(_LISTS_OF_IDS, given, "input")
    if _TEXTS(written):
        return decoded(_LIST_OF_TEXTS, given, "input")
    one = decoded(_ONE_INPUT, given, "input")
    return [one] if one != [] else []


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _check_pairs(queries: Sequence[str], documents: Sequence[str]) -> None:
    """Check that there are pairs.

    Raises:
        InvalidRequestError: there are none, too many, or texts are left over.
    """
    if not 1 <= len(documents) <= MAX_DOCUMENTS:
        raise InvalidRequestError.of("text_2", f"has {len(documents)}; send 1 to {MAX_DOCUMENTS}")
    if len(queries) not in {1, len(documents)}:
        why = f"has {len(queries)} texts; send 1, or as many as text_2 has, {len(documents)}"
        raise InvalidRequestError.of("text_1", why)


def _by_query(queries: Sequence[str]) -> Mapping[str, Sequence[int]]:
    """Return at which places each query is."""
    found: dict[str, list[int]] = {}
    for place, query in enumerate(queries):
        found.setdefault(query, []).append(place)
    return found


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; the first that fails cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _document_at(places: Sequence[int], field: str) -> str:
    """Return the field of a document among some by its place among all."""
    found = _DOCUMENT.fullmatch(field)
    return f"documents[{places[int(found[1])]}]" if found else field


# ---- to answers ----------------------------------------------------------------------------------


class _Found:
    """An `Output` that keeps the vectors of a batch."""

    stopped = None

    def __init__(self, inputs: int, held: Hold) -> None:
        self.rows = [b""] * inputs
        self._held = held

    def latest(self, entry: Vectors) -> None:
        """Do nothing: vectors are never replaced."""

    async def put(self, entry: Vectors, nbytes: int) -> None:
        """Keep them.

        Raises:
            OverloadedError: there is no memory for them.
        """
        self._held.take(nbytes)
        width = _FLOAT_BYTES * entry.dimensions
        for place, index in enumerate(entry.indices):
            self.rows[index] = entry.values[place * width : (place + 1) * width]


def _numbers(row: bytes) -> list[float]:
    return array("f", row).tolist()


def _base64(row: bytes) -> str:
    return base64.b64encode(row).decode()


def _written(
    rows: Sequence[bytes], write: Callable[[bytes], Any], model: str, usage: schema.Usage
) -> Iterator[bytes]:
    """Write an answer, some vectors at a time."""
    at_once = max(1, _NUMBERS_AT_ONCE * _FLOAT_BYTES // max(1, len(rows[0])))
    before = b'{"object":"list","data":['
    for start in range(0, len(rows), at_once):
        part = enumerate(rows[start : start + at_once], start)
        yield before + encode([schema.Vector(i, write(row)) for i, row in part])[1:-1]
        before = b","
    yield b'],"model":%b,"usage":%b}' % (encode(model), encode(usage))


def _usage(tokens: int) -> schema.Usage:
    return schema.Usage(tokens, tokens)
