"""The output of several turns as one: a call that asks for several prompts has one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millstream_server.processor.http.output import Events, Whole
from millstream_server.processor.telemetry import Usage
from millstream_server.runtime.rpc.call import Call

if TYPE_CHECKING:
    from millstream_server.processor.turn import Turn


class JoinedOutput:
    """A `runtime.rpc.call.Source` that takes what the turns' outputs have made.

    Order of calls: `call_of` for each turn, which is then added to ``turns``; `Call.send_from` with
    it, until ``over``; `close` always.
    """

    def __init__(self, outputs: Sequence[Events | Whole], call: Call) -> None:
        """Send ``outputs``, each of its own choices, in this order where they come whole."""
        self.turns: list[Turn] = []
        self.over = False
        self._outputs = outputs
        self._call = call
        self._asked: dict[Events | Whole, None] = {}
        """Those that have something to send, in the order in which they said so."""
        self._whole: dict[Events | Whole, bytes] = {}

    def call_of(self, output: Events | Whole) -> _PartOfCall:
        """Return what ``output`` has for a call."""
        return _PartOfCall(self, output, self._call)

    @property
    def gathers(self) -> bool:
        return any(output.gathers for output in self._outputs)

    @gathers.setter
    def gathers(self, gathers: bool) -> None:
        for output in self._outputs:
            output.gathers = gathers

    def ask(self, output: Events | Whole) -> None:
        self._asked[output] = None
        self._call.ready()

    def next(self) -> bytes | None:
        """Make one message of all that has come; see `Source.next`."""
        asked, self._asked = self._asked, {}
        made = {output: message for output in asked if (message := output.next()) is not None}
        self.over = all(output.over for output in self._outputs)
        first = self._outputs[0]
        if isinstance(first, Events):
            end = first.end(self._usage()) if self.over else b""
            return b"".join([*made.values(), end]) or None
        self._whole |= made
        if not self.over:
            return None
        choices = b",".join([self._whole[output] for output in self._outputs])
        return first.body(choices, self.turns[0], self._usage())

    def _usage(self) -> Usage:
        used = [turn.usage() for turn in self.turns]
        return Usage(
            sum(each.prompt_tokens for each in used),
            sum(each.completion_tokens for each in used),
            sum(each.cached_tokens for each in used),
        )

    def close(self) -> None:
        """Forget the outputs, which know this object."""
        self._outputs, self._asked, self._whole = (), {}, {}


class _PartOfCall:
    """A call, to one of the outputs that it sends."""

    def __init__(self, joined: JoinedOutput, output: Events | Whole, call: Call) -> None:
        self.caller_key = call.caller_key
        self.fail = call.fail
        self._joined = joined
        self._output = output

    def ready(self) -> None:
        self._joined.ask(self._output)
