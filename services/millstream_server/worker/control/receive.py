"""Receives tensors in pieces, within a limit on their bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from millstream_server.control.operations import NamedTensor, TensorWeights
from millstream_server.runtime.errors import DeadlinePassedError, InvalidRequestError

_SILENCE_S = 60.0
"""Longest wait for the next piece: an operation that waits keeps all others from beginning."""
_MAX_NAME = 512
_MAX_TENSORS = 1 << 17


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of the tensor that began last."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TensorsInCall:
    """Tensors that the caller sends: each begins with a `NamedTensor`; its pieces follow."""

    parts: AsyncIterator[NamedTensor | Piece]
    total_bytes: int = 0
    """Of all tensors together; 0: not known."""


class Received:
    """Tensors of one call; all of them are held in memory, so their bytes are limited."""

    def __init__(self, max_bytes: int, progress: Callable[[int, int], None]) -> None:
        """Hold ``max_bytes`` at most; ``progress`` gets the bytes received and in all."""
        self._max_bytes = max_bytes
        self._progress = progress
        self._tensors: list[tuple[NamedTensor, bytearray]] = []
        self._names: set[str] = set()
        self._announced = 0
        self._done = 0

    async def all_of(self, source: TensorsInCall) -> TensorWeights:
        """Receive all tensors of a call.

        Raises:
            InvalidRequestError: a rule is broken, or the tensors are too large.
            DeadlinePassedError: nothing came for a minute.
        """
        self._check_total(source.total_bytes)
        parts = aiter(source.parts)
        while (part := await _next(parts)) is not None:
            if isinstance(part, NamedTensor):
                self._begin(part)
            else:
                self._add(part)
            self._progress(self._done, source.total_bytes)
        self._check_complete()
        if not self._tensors:
            raise InvalidRequestError.of("tensor", "no tensor came; send at least one")
        if source.total_bytes not in {0, self._done}:
            raise InvalidRequestError.of(
                "start.tensors.total_bytes",
                f"is {source.total_bytes}, but the tensors have {self._done} bytes",
            )
        return TensorWeights(self._tensors)

    def _begin(self, tensor: NamedTensor) -> None:
        self._check_complete()
        check_tensor("tensor", tensor, self._names)
        if len(self._names) > _MAX_TENSORS:
            raise InvalidRequestError.of("tensor", f"is one more than the {_MAX_TENSORS} allowed")
        self._announced += tensor.spec.nbytes
        self._check_total(self._announced)
        # It grows with what comes: gigabytes at once would stop the event loop for seconds.
        self._tensors.append((tensor, bytearray()))

    def _add(self, piece: Piece) -> None:
        if not self._tensors:
            raise InvalidRequestError.of("chunk", "came before the first `tensor`")
        tensor, data = self._tensors[-1]
        if piece.offset != len(data):
            raise InvalidRequestError.of(
                "chunk.offset", f"is {piece.offset}; {tensor.name} goes on at {len(data)}"
            )
        end = len(data) + len(piece.data)
        if end > tensor.spec.nbytes:
            raise InvalidRequestError.of(
                "chunk.data", f"ends at {end}; {tensor.name} has {tensor.spec.nbytes} bytes"
            )
        data += piece.data
        self._done += len(piece.data)

    def _check_complete(self) -> None:
        if not self._tensors:
            return
        tensor, data = self._tensors[-1]
        if len(data) < tensor.spec.nbytes:
            raise InvalidRequestError.of(
                "tensor", f"{tensor.name} has {tensor.spec.nbytes} bytes; only {len(data)} came"
            )

    def _check_total(self, total: int) -> None:
        if total > self._max_bytes:
            raise InvalidRequestError.of(
                "tensor",
                f"the tensors have {total} bytes or more; the worker's --max-weights-bytes allows "
                f"{self._max_bytes}: update from disk or send fewer tensors",
            )


def check_tensor(field: str, tensor: NamedTensor, names: set[str]) -> None:
    """Check a tensor's name and description; add its name to ``names``.

    Raises:
        InvalidRequestError: they can't be, or the name was there already.
    """
    name = tensor.name
    if not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        raise InvalidRequestError.of(f"{field}.name", f"must have 1 to {_MAX_NAME} characters")
    if name in names:
        raise InvalidRequestError.of(f"{field}.name", f"{name} came already; send it once")
    if problem := tensor.spec.problem():
        raise InvalidRequestError.of(f"{field}.spec", f"{name} {problem}")
    names.add(name)


async def _next(parts: AsyncIterator[NamedTensor | Piece]) -> NamedTensor | Piece | None:
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await anext(parts, None)
    except TimeoutError:
        raise DeadlinePassedError(
            f"no message came for {_SILENCE_S:g} s; the worker serves on with the old weights"
        ) from None
