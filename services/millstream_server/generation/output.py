"""The output of a generation: tokens, logprobs, one end; and the sink that receives it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millstream_server.runtime.errors import ServingError


class FinishReason(enum.Enum):
    """Why a generation ended; the values are the contract's names."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


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
        """Start empty."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self._changed = asyncio.Event()
        self._result: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Gather."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self._changed.set()

    def finish(self, finish: Finish) -> None:
        """See `OutputSink.finish`."""
        if self._result.done():
            message = "the engine reported two terminal results for one request"
            raise RuntimeError(message)
        self._result.set_result(finish)
        self._changed.set()

    def fail(self, error: ServingError) -> None:
        """See `OutputSink.fail`."""
        if self._result.done():
            message = "the engine reported two terminal results for one request"
            raise RuntimeError(message)
        self._result.set_exception(error)
        self._changed.set()

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
