"""The output of a generation: tokens, logprobs, one end; and the sink that receives it."""

from __future__ import annotations

import asyncio
import enum
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, overload

from millstream_server.generation.ticket import EngineData
from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.frozen import dataclass

_TOKEN_BYTES = 40
"""A token in a list: an `int` and the pointer to it."""
_ENTRY_BYTES = 120
"""A logprob in a `TokenLogprob`: its numbers, and the tuples around them."""


class FinishReason(enum.Enum):
    """Why a generation ended; the values are the contract's names."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TOOL_CALLS = "tool_calls"
    """Only a Processor's choice ends so, never a worker's request."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Logprob (natural log) of one token; ``top`` has (token id, logprob), likeliest first.

    The first prompt token and the placeholders of media have no logprob: NaN.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of a request that did not fail. Token counts are exact."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    media_tokens: int = 0
    """Prompt tokens that stand for images and videos."""
    matched_token_id: int | None = None
    """The EOS or stop token that ended it; it is the last token emitted."""
    prompt_logprobs: Sequence[TokenLogprob] = ()
    weight_version: str = ""
    """Version of the weights that made it; empty: not known."""
    engine_data: EngineData | None = None
    """Prefill with `KvTransfer.prefill_first`: what the decode engine needs for its leg."""


class OutputSink(Protocol):
    """Receives one request's output from an engine.

    Called on the event loop that called `submit`; must not block or raise. Any number of `emit`,
    then exactly one of `finish` or `fail`, then nothing. For an aborted request it is `finish` with
    CANCELLED, once the engine has released the request.
    """

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Receive one or more new tokens, each once; with a logprob for each if requested.

        The sink may keep both sequences and extend them.
        """
        ...

    def finish(self, finish: Finish) -> None:
        """Receive the end of a request that did not fail."""
        ...

    def fail(self, error: ServingError) -> None:
        """Receive the failure that ended the request."""
        ...


class CollectingSink:
    """A sink that collects one request's output; for warm-ups, canaries and tests."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self._changed = asyncio.Event()
        self._result: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self._changed.set()

    def finish(self, finish: Finish) -> None:
        self._check_open()
        self._result.set_result(finish)
        self._changed.set()

    def fail(self, error: ServingError) -> None:
        self._check_open()
        self._result.set_exception(error)
        self._changed.set()

    def _check_open(self) -> None:
        if self._result.done():
            raise RuntimeError("the engine reported two terminal results for one request")

    async def result(self) -> Finish:
        """Wait for the end.

        Raises:
            ServingError: the request failed.
        """
        return await asyncio.shield(self._result)

    async def first_token(self) -> int:
        """Wait for the first token.

        Raises:
            ServingError: the request failed before its first token.
        """
        while not self.token_ids:
            if self._result.done():
                finish = self._result.result()
                message = f"the request ended ({finish.reason.value}) before its first token"
                raise RuntimeError(message)
            self._changed.clear()
            await self._changed.wait()
        return self.token_ids[0]


def output_bytes(token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> int:
    """Return about what tokens with their logprobs take in memory."""
    return _TOKEN_BYTES * len(token_ids) + logprob_bytes(logprobs)


def logprob_bytes(logprobs: Sequence[TokenLogprob]) -> int:
    """Return about what logprobs take in memory."""
    if isinstance(logprobs, LogprobColumns):
        return logprobs.nbytes
    return sum(_ENTRY_BYTES * (1 + len(entry.top)) for entry in logprobs)


class LogprobColumns(Sequence[TokenLogprob]):
    """A growing sequence of logprobs: a tenth of the memory of as many `TokenLogprob` objects.

    They are kept for as long as a client doesn't read: 12 bytes a token and 8 for each alternative.
    Their values are 32-bit floats, as on the wire.
    """

    __slots__ = ("logprobs", "token_ids", "top_counts", "top_logprobs", "top_token_ids")

    def __init__(self, entries: Sequence[TokenLogprob] = ()) -> None:
        self.token_ids = array("I")
        self.logprobs = array("f")
        self.top_counts = array("I")
        """How many alternatives each token has."""
        self.top_token_ids = array("I")
        """Alternatives of all tokens, concatenated."""
        self.top_logprobs = array("f")
        if entries:
            self.extend(entries)

    def extend(self, entries: Sequence[TokenLogprob]) -> None:
        if isinstance(entries, LogprobColumns):
            self.token_ids += entries.token_ids
            self.logprobs += entries.logprobs
            self.top_counts += entries.top_counts
            self.top_token_ids += entries.top_token_ids
            self.top_logprobs += entries.top_logprobs
            return
        for entry in entries:
            self.token_ids.append(entry.token_id)
            self.logprobs.append(entry.logprob)
            self.top_counts.append(len(entry.top))
            for token_id, logprob in entry.top:
                self.top_token_ids.append(token_id)
                self.top_logprobs.append(logprob)

    @property
    def nbytes(self) -> int:
        """About what it holds: arrays that grow have an eighth of room."""
        return 14 * len(self.token_ids) + 9 * len(self.top_token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[TokenLogprob]:
        at = 0
        for token_id, logprob, count in zip(
            self.token_ids, self.logprobs, self.top_counts, strict=True
        ):
            end = at + count
            top = zip(self.top_token_ids[at:end], self.top_logprobs[at:end], strict=True)
            yield TokenLogprob(token_id, logprob, tuple(top))
            at = end

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobColumns: ...
    def __getitem__(self, index: int | slice) -> TokenLogprob | LogprobColumns:
        """Return an entry, or a copy of consecutive ones."""
        if isinstance(index, int):
            found = range(len(self))[index]
            return next(iter(self[found : found + 1]))
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError("only consecutive entries")
        at, end = sum(self.top_counts[:start]), sum(self.top_counts[:stop])
        part = LogprobColumns()
        part.token_ids = self.token_ids[start:stop]
        part.logprobs = self.logprobs[start:stop]
        part.top_counts = self.top_counts[start:stop]
        part.top_token_ids = self.top_token_ids[at:end]
        part.top_logprobs = self.top_logprobs[at:end]
        return part

    def __eq__(self, other: object) -> bool:
        """Compare the entries; a NaN equals none."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def usage_attributes(finish: Finish) -> dict[str, Any]:
    """Return the token counts as span attributes."""
    return {
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": finish.cached_tokens,
        "gen_ai.response.finish_reasons": (finish.reason.value,),
    }
