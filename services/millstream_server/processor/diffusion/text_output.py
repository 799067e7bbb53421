"""The texts of one GenerateText stream that its client has not read, counted in `UnreadOutput`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from millstream_server.generation.logprobs import logprob_bytes, output_bytes
from millstream_server.generation.output import Finish, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.links.unread import UnreadOutput, overflow
from millstream_server.runtime.errors import ServingError
from millstream_server.worker.generation.session import RequestRunner


class CountedTexts:
    """Runs a stream's requests and counts their output until it is taken to be sent.

    A `worker.generation.session.RequestRunner`, and a `links.unread.Gathering`.
    """

    def __init__(
        self,
        runner: RequestRunner,
        unread: UnreadOutput,
        payer: Hashable,
        end_call: Callable[[ServingError], None],
    ) -> None:
        """Run requests with ``runner``; ``end_call`` ends the stream if too much gathers."""
        self.role = runner.role
        self.work = runner.work
        self.streams = runner.streams
        self.context_length_of = runner.context_length_of
        self.cancel = runner.cancel
        self.payer = payer
        self._runner = runner
        self._unread = unread
        self._end_call = end_call
        self._nbytes = 0
        self._closed = False

    def submit(self, request: GenerationRequest, sink: OutputSink) -> str:
        """See `RequestRunner.submit`."""
        return self._runner.submit(request, _CountedSink(sink, self.add))

    def add(self, nbytes: int) -> None:
        """Count output that has come."""
        if not self._closed:
            self._nbytes += nbytes
            self._unread.add(self, nbytes)

    def taken(self, left: int) -> None:
        """Note that a message was taken to be sent; ``left`` bytes wait for the next ones."""
        sent, self._nbytes = self._nbytes - left, left
        self._unread.remove(self, sent)

    def close(self) -> None:
        """Count nothing any more."""
        self._closed = True
        self.taken(0)

    def overflowed(self) -> None:
        """See `Gathering.overflowed`."""
        self.close()
        self._end_call(overflow())


class _CountedSink:
    __slots__ = ("_add", "_sink")

    def __init__(self, sink: OutputSink, add: Callable[[int], None]) -> None:
        self._sink = sink
        self._add = add

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        self._sink.emit(token_ids, logprobs)
        self._add(output_bytes(token_ids, logprobs))

    def finish(self, finish: Finish) -> None:
        self._sink.finish(finish)
        self._add(logprob_bytes(finish.prompt_logprobs))

    def fail(self, error: ServingError) -> None:
        self._sink.fail(error)
