"""Requests whose embeddings are on their way: fetch, check, then submit to the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Protocol

from millstream_server.generation.generator import Generator
from millstream_server.generation.media_checks import check_tensors
from millstream_server.generation.output import Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.media.items import EmbeddingTicket, MediaInput
from millstream_server.media.tensor import Tensor
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_server.worker.open_requests import told


class Fetcher(Protocol):
    """Fetches tensors from encode workers."""

    tracing: Tracing | None
    """Makes spans of fetches; set by the worker that uses it."""

    async def fetch(self, ticket: EmbeddingTicket, trace: TraceContext | None = None) -> Tensor:
        """Fetch one tensor, with a span below ``trace``; cancelling the task stops it.

        Raises:
            InvalidRequestError: the ticket is forged or expired.
            EmbeddingTransferError: the tensor didn't arrive.
        """
        ...


class FetchingSink(OutputSink, Protocol):
    """A sink that also learns what was fetched."""

    def fetched(self, nbytes: int) -> None:
        """Note that inputs of so many bytes have come."""
        ...


@dataclass(slots=True, eq=False)
class _Fetch:
    """One request whose tensors are on the way."""

    request: GenerationRequest
    sink: FetchingSink
    task: asyncio.Task[tuple[MediaInput, ...]]
    cancelled: bool = False


class FetchThenSubmit:
    """Runs requests with media on an engine, after fetching their tensors.

    Each request's sink gets exactly one end: from here until the engine has the request, then from
    the engine. All calls come from one event loop.
    """

    def __init__(self, fetcher: Fetcher, engine: Generator) -> None:
        self._fetcher = fetcher
        self._engine = engine
        self._fetches: dict[str, _Fetch] = {}

    def submit(self, request: GenerationRequest, sink: FetchingSink) -> None:
        """Start fetching; ``sink`` is told of it before the engine gets the request.

        Like `Generator.submit`, it returns at once and reports failures to the sink.
        """
        task = asyncio.create_task(
            self._fetch(request.prompt.media, request.trace), name=f"fetch-{request.engine_id}"
        )
        fetch = self._fetches[request.engine_id] = _Fetch(request, sink, task)
        # Not at the end of the task: a task cancelled before its first step runs nothing at all.
        task.add_done_callback(lambda _: self._end(fetch))

    def cancel(self, engine_id: str) -> bool:
        """Stop a request whose tensors are on the way; return whether there was one."""
        fetch = self._fetches.get(engine_id)
        if fetch is None:
            return False
        fetch.cancelled = True
        fetch.task.cancel()
        return True

    async def _fetch(
        self, media: tuple[MediaInput, ...], trace: TraceContext
    ) -> tuple[MediaInput, ...]:
        """Fetch all tensors at once, each ticket's once."""
        tickets = {item.ticket for item in media if item.ticket is not None}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    ticket: group.create_task(self._fetcher.fetch(ticket, trace))
                    for ticket in tickets
                }
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        found = tuple(
            replace(item, tensor=tasks[item.ticket].result()) if item.ticket else item
            for item in media
        )
        check_tensors(found)
        return found

    def _end(self, fetch: _Fetch) -> None:
        """Hand the request to the engine, or report why not."""
        request, task = fetch.request, fetch.task
        del self._fetches[request.engine_id]
        error = None if task.cancelled() else task.exception()
        if fetch.cancelled or task.cancelled():
            fetch.sink.finish(_cancelled(request))
        elif error is not None:
            fetch.sink.fail(told("a request with media failed", error))
        else:
            self._hand_over(fetch, task.result())

    def _hand_over(self, fetch: _Fetch, media: tuple[MediaInput, ...]) -> None:
        request = fetch.request
        fetch.sink.fetched(sum(item.tensor.spec.nbytes for item in media if item.tensor))
        prompt = replace(request.prompt, media=media)
        try:
            self._engine.submit(replace(request, prompt=prompt), fetch.sink)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others
            fetch.sink.fail(told("a request with media failed", error))


def _cancelled(request: GenerationRequest) -> Finish:
    return Finish(
        reason=FinishReason.CANCELLED,
        prompt_tokens=len(request.prompt),
        completion_tokens=0,
        media_tokens=request.prompt.media_tokens,
    )
