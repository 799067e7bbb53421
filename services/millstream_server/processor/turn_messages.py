"""One turn's messages: made of deltas, sent at once while the client reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from millstream_server.processor import responses
from millstream_server.processor.choice import Delta
from millstream_server.processor.generation import Generation
from millstream_server.runtime.rpc.call import Call

_USES = 64
"""So often a message is filled again: protobuf frees replaced texts only with the whole message."""


class TurnMessages:
    """Makes a turn's messages. Some it sends itself (`Call.send_now`), `of` returns the others."""

    def __init__(
        self,
        generation: Generation,
        call: Call,
        message: Callable[..., Any],
        notice_due: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send with ``call``. ``message`` makes a message of the turn from its other fields.

        While ``notice_due``, all messages go through `of`.
        """
        self._generation = generation
        self._send_now = call.send_now
        self._message = message
        self._notice_due = notice_due
        self._started: responses.Started = responses.started_to_proto(generation)
        options = generation.options
        extras = options.n > 1 or options.return_token_ids or generation.request.logprobs
        self._plain = not extras
        """Nearly every message has a text and a token count, no more."""
        self._unsent: Any = None
        """The message of deltas that could not be sent, and that `of` gets next."""
        self._uses_left = 0
        self._filled: Any = None
        self._choice: Any = None
        generation.send_through(self._send, call.caller_key, call.fail)

    def of(self, deltas: Sequence[Delta]) -> Iterator[Any]:
        """Make the messages of what `Generation.deltas` returned."""
        if self._unsent is not None:
            yield self._unsent
            self._started = self._unsent = None
            self._uses_left = 0  # who got it may have added a field: the next one is new
            return
        for fields in responses.parts_to_proto(deltas, self._generation):
            yield self._make(fields)
            self._started = None

    def _send(self, deltas: Sequence[Delta]) -> bool:
        """Send deltas, the last one of the turn not among them; see `delivery.Outlet`."""
        if self._notice_due():
            return False
        if self._plain and self._started is None:
            message = self._fill(deltas[0])
        else:
            message = self._make({"choices": responses.choices_to_proto(deltas, self._generation)})
            if len(deltas) > 1 and not responses.fits(message):
                return False
        if not self._send_now(message):
            self._unsent = message
            return False
        self._started = None
        return True

    def _make(self, fields: responses.Fields) -> Any:
        return self._message(started=self._started, **fields)

    def _fill(self, delta: Delta) -> Any:
        """Fill the same message again, which takes a fraction of the time to make one."""
        if not self._uses_left:
            self._uses_left = _USES
            self._filled = self._message(choices=[{}])
            self._choice = self._filled.choices[0]
        self._uses_left -= 1
        self._choice.text = delta.text
        self._choice.token_count = len(delta.token_ids)
        return self._filled
