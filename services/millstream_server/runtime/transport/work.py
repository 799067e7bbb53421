"""How much of the event loop's time one connection's frames may take."""

from __future__ import annotations

TURN_S = 0.002
"""Of one turn of the loop, for the bytes of all connections together: above it each has one piece
of bytes handled, and the rest waits. A message for somebody else waits for a few turns, however
many connections have much to say."""
_SAVED_S = 0.1
"""Most time that a connection saves up: some 400 requests at once are served without a pause."""
_FIRST_S = 0.005
"""What a new connection has, a dozen requests: else a caller would get more by connecting anew."""
_REQUEST_S = 0.0002
"""What a request costs besides its frames, whatever its handler does."""
_NEIGHBOUR_S = 1.0
"""So long after others were served, connections that take much are held back for them."""


class WorkShare:
    """How many connections take more than their share; one per server."""

    def __init__(self, of_loop: float = 0.5) -> None:
        """Give all of them together this share of the loop's time."""
        self.of_loop = of_loop
        self.greedy = 0
        self.modest_s = -_NEIGHBOUR_S
        """When a connection within its share was served last."""
        self.turn_s = TURN_S
        """What is left of this turn of the loop."""

    def new_turn(self) -> None:
        """Begin the next turn of the loop."""
        self.turn_s = TURN_S


class Work:
    """Time that one connection's frames have taken. Times are in seconds, the event loop's.

    HTTP/2 lets a caller send frames that cost the server far more than the caller: requests that
    are reset at once, settings, pings. Whatever they are, the time is counted, and the connection
    is read later when it has used up its share and others are there: callers that behave notice
    nothing, and the only caller gets all.
    """

    __slots__ = ("_at_s", "_greedy", "_left_s", "share")

    def __init__(self, share: WorkShare, now_s: float) -> None:
        """Start with little time saved."""
        self.share = share
        self._left_s = _FIRST_S
        self._at_s = now_s
        self._greedy = False

    def took(self, seconds: float, requests: int, now_s: float) -> float:
        """Count work; return how long to read nothing from this connection, mostly 0."""
        rate = self.share.of_loop / max(1, self.share.greedy)
        self._left_s = min(_SAVED_S, self._left_s + (now_s - self._at_s) * rate)
        self._left_s -= seconds + requests * _REQUEST_S
        self._at_s = now_s
        self._set_greedy(self._left_s < 0)
        if not self._greedy:
            self.share.modest_s = now_s
            return 0.0
        if now_s - self.share.modest_s > _NEIGHBOUR_S:
            self._left_s = 0.0
            return 0.0
        return -self._left_s / rate

    def close(self) -> None:
        """Count the connection no more."""
        self._set_greedy(False)  # noqa: FBT003

    def _set_greedy(self, greedy: bool) -> None:  # noqa: FBT001
        if greedy is not self._greedy:
            self._greedy = greedy
            self.share.greedy += 1 if greedy else -1
