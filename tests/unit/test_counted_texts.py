"""The bound on what a GenerateText stream's client doesn't read."""

from __future__ import annotations

from typing import Any, cast

from millstream_server.generation.output import OutputSink
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor.diffusion.text import CountedTexts
from millstream_server.runtime.errors import OverloadedError, ServingError
from tests.support.processor.played_worker import Sink


class Runner:
    """Satisfies `RequestRunner` as far as it is used; keeps where output goes."""

    role = work = streams = context_length_of = cancel = cast("Any", None)
    sink: OutputSink

    def submit(self, _request: object, sink: OutputSink) -> str:
        self.sink = sink
        return "id"


def test_what_is_taken_counts_no_more_and_too_much_ends_the_stream() -> None:
    unread, runner, ended = UnreadOutput(1000), Runner(), list[ServingError]()
    texts = CountedTexts(cast("Any", runner), unread, "client", ended.append)
    received = Sink()
    assert texts.submit(cast("Any", None), received) == "id"
    runner.sink.emit([1] * 20)
    assert unread.used == 800
    texts.taken(200)
    assert unread.used == 200
    runner.sink.emit([2] * 20)
    assert (unread.used, ended) == (1000, [])
    runner.sink.emit([3])
    assert [type(error) for error in ended] == [OverloadedError]
    runner.sink.emit([4])
    assert unread.used == 0
    assert received.token_ids == [1] * 20 + [2] * 20 + [3, 4]
    texts.close()
    assert unread.used == 0
