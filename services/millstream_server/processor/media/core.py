"""A turn's images and videos: encoded on workers, and placed in its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.generation.request import Prompt
from millstream_server.media.families.family import Family
from millstream_server.media.families.placing import place
from millstream_server.media.items import Content, EncodedItem, MediaFile, MediaInput
from millstream_server.processor.conversation import Caller
from millstream_server.processor.media.intake import Intake
from millstream_server.processor.media.uploads import MediaBudget, Uploads
from millstream_server.processor.telemetry import RequestSpan, TurnTelemetry
from millstream_server.processor.text.messages import MediaPart
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.router import Router
from millstream_server.runtime.errors import (
    Failure,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
)

_ATTEMPTS = 3
"""Workers that an item is sent to, when each is lost or shuts down."""


class ProcessorMedia:
    """Makes the parts that take in and encode conversations' media; one per process."""

    def __init__(
        self,
        router: Router,
        encoders: Encoders,
        intake: Intake,
        budget: MediaBudget,
        *,
        tickets: EmbeddingTickets | None = None,
        shared_cache: bool = False,
    ) -> None:
        """Encode on ``encoders``; all conversations' bytes count in ``budget``.

        ``tickets`` signs where a worker fetches the results; None: without a key. With
        ``shared_cache`` callers share cached results, otherwise each has its own.
        """
        self._tickets = tickets
        self._shared_cache = shared_cache
        self.intake = intake
        self._router = router
        self._encoders = encoders
        self._budget = budget

    def uploads(self) -> Uploads:
        """Make the uploads of a new conversation; `close` frees the bytes of all its media."""
        return Uploads(self._budget, self.intake.max_item_bytes)

    def of_turn(
        self,
        request: RoutingRequest,
        request_id: str,
        caller: Caller,
        telemetry: TurnTelemetry,
    ) -> TurnMedia:
        """Make what encodes one turn's media; ``request`` has its model and session."""

        def file_of(part: MediaPart, span: RequestSpan) -> MediaFile:
            return MediaFile(
                modality=part.modality,
                data=part.data,
                sha256=part.sha256,
                salt="" if self._shared_cache else caller.name,
                request_id=request_id,
                trace=span.carry(caller.trace),
                deadline_s=caller.deadline_s,
            )

        return TurnMedia(
            self._router, self._encoders, request, file_of, telemetry, tickets=self._tickets
        )


class Encoding(Protocol):
    """One item on its way (`links.encode_stream.Encoding`)."""

    async def result(self) -> EncodedItem:
        """Wait for the result; to cancel this call cancels the item.

        Raises:
            ServingError: it wasn't encoded.
        """
        ...

    def cancel(self) -> None:
        """Stop the item."""
        ...


class Encoders(Protocol):
    """Encodes files on workers (`links.fleet.Fleet`)."""

    def encode(self, address: str, file: MediaFile) -> Encoding:
        """Start to encode a file on a worker.

        Raises:
            WorkerLostError: the worker isn't connected.
        """
        ...

    def release(self, address: str, lease: str) -> None:
        """Give a result back; no effect if its worker is gone."""
        ...


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part's result, and the address of the worker that has it."""

    part: MediaPart
    item: EncodedItem
    address: str


class TurnMedia:
    """The media of one turn: encoded, then held on their workers until `release`.

    While they are encoded it is what a conversation cancels (`conversation.Stoppable`).
    """

    def __init__(
        self,
        router: Router,
        encoders: Encoders,
        request: RoutingRequest,
        file_of: Callable[[MediaPart, RequestSpan], MediaFile],
        telemetry: TurnTelemetry,
        *,
        tickets: EmbeddingTickets | None = None,
    ) -> None:
        """``file_of`` makes what a worker gets of a part; the span is the item's."""
        self.encoded: tuple[EncodedPart, ...] = ()
        self.cancelled = False
        self._router = router
        self._encoders = encoders
        self._request = request
        self._file_of = file_of
        self._tickets = tickets
        self._telemetry = telemetry
        self._held: list[tuple[str, str]] = []
        self._released = False
        self._task: asyncio.Future[None] | None = None
        self._error: Failure | None = None

    @property
    def held_at(self) -> str:
        """Address of the worker that must run the request too; empty: any may."""
        return self._request.media_at

    async def encode(
        self, parts: Sequence[MediaPart], prepare: Callable[[], Awaitable[None]]
    ) -> None:
        """Call ``prepare`` (`Intake.prepare`), then encode the parts, all at the same time.

        Sets `encoded`, unless `cancel` was called.

        Raises:
            ServingError: one of them can't be encoded; it is named by its field.
        """
        if self.cancelled or self._error:
            self._stop()
            return
        self._task = asyncio.ensure_future(self._encode_all(parts, prepare))
        try:
            await self._task
        except asyncio.CancelledError:
            if not self.cancelled and self._error is None:  # the RPC's task was cancelled
                self._task.cancel()
                raise
        if self.cancelled or self._error:
            self._stop()

    def _stop(self) -> None:
        self.release()
        if self._error:
            raise self._error

    async def _encode_all(
        self, parts: Sequence[MediaPart], prepare: Callable[[], Awaitable[None]]
    ) -> None:
        await prepare()
        tasks = [asyncio.ensure_future(self._encode(part)) for part in parts]
        try:
            self.encoded = tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _encode(self, part: MediaPart) -> EncodedPart:
        failed: set[str] = set()
        while True:
            workers = self._router.of(self._request.model)
            planned = workers.encoder(self._request, part.sha256, failed)
            if planned.own:  # the turn's other files, and the turn itself, go there too
                self._request = replace(self._request, media_at=planned.worker.address)
            address = planned.worker.address
            try:
                return await self._encode_at(address, part)
            except UnavailableError:
                failed.add(address)
                if len(failed) >= _ATTEMPTS or planned.own:
                    raise
            except InvalidRequestError as error:
                raise at_path(error, part.field) from error

    async def _encode_at(self, address: str, part: MediaPart) -> EncodedPart:
        span = self._telemetry.at_worker("encode", address)
        file = self._file_of(part, span)
        try:
            item = await self._encoders.encode(address, file).result()
        except BaseException as error:
            span.failed(error)
            raise
        span.ended()
        if self._released:  # another item has failed meanwhile
            self._encoders.release(address, item.lease)
            raise RequestCancelledError("the turn ended before its media were encoded")
        self._held.append((address, item.lease))
        return EncodedPart(part, item, address)

    def with_tickets(self, prompt: Prompt) -> Prompt:
        """Name in ``prompt`` where the worker that runs it fetches its media.

        Raises:
            UnavailableError: this server can't make tickets.
        """
        if self._tickets is None:
            raise UnavailableError("this server has no ticket key and can't use media")
        media = tuple(
            replace(item, ticket=self._tickets.mint(source.address, source.item))
            for item, source in zip(prompt.media, self.encoded, strict=True)
        )
        return replace(prompt, media=media)

    # ---- for the conversation --------------------------------------------------------------------

    def cancel(self) -> None:
        """Stop; `encode` then returns with nothing encoded."""
        self.cancelled = True
        if self._task:
            self._task.cancel()

    def fail(self, error: Failure) -> None:
        """Stop; `encode` then raises ``error``."""
        self._error = self._error or error
        if self._task:
            self._task.cancel()

    def release(self) -> None:
        """Give the results back to their workers. May be called twice."""
        self._released = True
        held, self._held = self._held, []
        for address, lease in held:
            self._encoders.release(address, lease)


def at_path(error: InvalidRequestError, field: str) -> InvalidRequestError:
    """Return an encode worker's refusal with the path of the client's field."""
    if not error.violations:
        return error
    return type(error).of_all([FieldViolation(field, v.description) for v in error.violations])


# ---- the prompt ----------------------------------------------------------------------------------


def media_prompt(
    text: str,
    family: Family,
    encoded: Sequence[EncodedPart],
    encode: Callable[[str], Sequence[int]],
    field: str,
) -> Prompt:
    """Replace the placeholders in ``text`` and tokenize it. Takes milliseconds: use a thread.

    Raises:
        InvalidRequestError: the text has more or fewer placeholders than there are media.
    """
    items = [entry.item for entry in encoded]
    for index, item in enumerate(items):
        _check_item(index, item, family)
    token_ids, spans = place(text, family, items, encode, field)
    media = [
        MediaInput(
            modality=item.modality,
            spans=own,
            geometry=item.geometry,
            digest=item.digest,
            content=item.content,
        )
        for item, own in zip(items, spans, strict=True)
    ]
    return Prompt(token_ids, tuple(media))


def _check_item(index: int, item: EncodedItem, family: Family) -> None:
    """Check what an encode worker returned against the model.

    Raises:
        InternalError: the worker serves other weights, or has a bug.
    """
    if item.content is Content.PIXELS:
        return
    wanted = (item.tokens, family.embedding_width)
    if item.tensor.shape != wanted:
        raise InternalError(
            f"the encode worker returned a tensor of the shape {list(item.tensor.shape)} for the "
            f"conversation's image or video {index}; the model needs {list(wanted)}: tokens x width"
        )
