"""What a step frame has, and how it is divided where it is too large for one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from millstream.v1 import generation_pb2
from millstream_server.generation.output import Finish, TokenLogprob
from millstream_server.protobuf import generation as convert
from millstream_server.protobuf.errors import error_to_proto
from millstream_server.runtime.errors import ServingError

_FRAME_BYTES = 3 << 20
"""A frame with several things in it has no more. gRPC's clients take 4 MiB unless they say
otherwise, and a Processor 16 MiB: a larger one would end the stream, with every request on it. A
single thing is at most 11 MB: the logprobs of a long prompt, 2^20 of them as Processors ask for."""
_TOKEN_BYTES, _LOGPROB_BYTES, _END_BYTES = 10, 10, 256
"""Most bytes of a token with its slot, of a logprob, and of an end without its texts."""


@dataclass(slots=True, kw_only=True)
class FrameContent:
    """The entries of a frame, in the order in which they were reported."""

    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Tokens per entry of ``slots``."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Sequence[TokenLogprob]]] = field(default_factory=list)
    """With the index of their entry in ``slots``."""
    finishes: list[tuple[int, Finish]] = field(default_factory=list)
    errors: list[tuple[int, ServingError]] = field(default_factory=list)

    def split(self) -> FrameContent | None:
        """Keep what a message takes; return the rest, None if there is none.

        Ends stay behind all tokens: a slot's end comes after its last token.
        """
        entries, tokens, room = self._entries(_FRAME_BYTES)
        whole = entries == len(self.slots)
        room = room if whole else 0
        sizes = [_finish_bytes(finish) for _, finish in self.finishes]
        finishes, room = _fitting(sizes, room, at_least_one=not entries)
        whole = whole and finishes == len(self.finishes)
        sizes = [_END_BYTES + 4 * len(error.message) for _, error in self.errors]
        errors, _ = _fitting(sizes, room if whole else 0, at_least_one=not (entries or finishes))
        if whole and errors == len(self.errors):
            return None
        rest = FrameContent(
            slots=self.slots[entries:],
            counts=self.counts[entries:],
            token_ids=self.token_ids[tokens:],
            logprobs=[(at - entries, found) for at, found in self.logprobs if at >= entries],
            finishes=self.finishes[finishes:],
            errors=self.errors[errors:],
        )
        del self.slots[entries:], self.counts[entries:], self.token_ids[tokens:]
        self.logprobs = [found for found in self.logprobs if found[0] < entries]
        del self.finishes[finishes:], self.errors[errors:]
        return rest

    def _entries(self, room: int) -> tuple[int, int, int]:
        """Return how many entries fit into ``room``, their tokens, and the room that is left."""
        if not self.logprobs and _TOKEN_BYTES * len(self.token_ids) <= room:
            left = room - _TOKEN_BYTES * len(self.token_ids)
            return len(self.slots), len(self.token_ids), left
        extra = {at: _logprob_bytes(found) for at, found in self.logprobs}
        sizes = [_TOKEN_BYTES * count + extra.get(at, 0) for at, count in enumerate(self.counts)]
        entries, left = _fitting(sizes, room, at_least_one=True)
        return entries, sum(self.counts[:entries]), left

    def write(self, frame: generation_pb2.StepFrame) -> None:
        """Fill ``frame`` in place: setting a message field copies the message."""
        if self.slots:
            frame.slots.extend(self.slots)
            frame.token_ids.extend(self.token_ids)
            if len(self.slots) != len(self.token_ids):
                frame.token_counts.extend(self.counts)
        for at, logprobs in self.logprobs:
            frame.logprobs.add(slot=self.slots[at], tokens=convert.logprobs_to_proto(logprobs))
        for slot, finish in self.finishes:
            convert.write_finish(frame.finishes.add(slot=slot), finish)
        for slot, error in self.errors:
            frame.errors.add(slot=slot, error=error_to_proto(error))


def _fitting(sizes: Sequence[int], room: int, *, at_least_one: bool) -> tuple[int, int]:
    """Return how many of the first sizes fit, and the room that is left."""
    for number, size in enumerate(sizes):
        if size > room and (number or not at_least_one):
            return number, 0
        room -= size
    return len(sizes), room


def _logprob_bytes(logprobs: Sequence[TokenLogprob]) -> int:
    return sum(_LOGPROB_BYTES * (1 + len(entry.top)) for entry in logprobs)


def _finish_bytes(finish: Finish) -> int:
    return _END_BYTES + _logprob_bytes(finish.prompt_logprobs)
