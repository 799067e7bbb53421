"""One choice's token ids to text that may be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.processor.text.detokenizer import Decodable, IncrementalDetokenizer
from millstream_server.processor.text.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The result of new tokens.

    ``consumed_tokens`` counts the tokens up to and including the one that completed the stop, or
    all without a stop. So usage is exact although the engine may have generated beyond the stop.
    """

    text: str
    consumed_tokens: int
    matched_stop: str | None = None


class ChoiceText:
    """Detokenizes one choice and ends it at its stop strings."""

    __slots__ = ("_detokenizer", "_matched", "_matcher", "push_all", "stops")

    def __init__(
        self,
        model: Decodable,
        stops: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        continuation: bool = False,
    ) -> None:
        """Start before the first token; the stops have passed `check_stops`."""
        self._detokenizer = IncrementalDetokenizer(
            model, skip_special_tokens=skip_special_tokens, continuation=continuation
        )
        self._matcher = StopMatcher(stops) if stops else None
        self._matched: str | None = None
        self.stops = bool(stops)
        """Whether the text may end at a stop string."""
        self.push_all = self._detokenizer.push
        """`push` without stops: takes new tokens, returns their text."""

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._matched

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Take new tokens. After a stop nothing more is consumed."""
        if self._matcher is None:
            return TextDelta(self._detokenizer.push(ids), len(ids))
        if self._matched is not None:
            return TextDelta("", 0, self._matched)
        # One by one, to know which token completed the stop.
        parts: list[str] = []
        for count, token_id in enumerate(ids, start=1):
            safe, self._matched = self._matcher.push(self._detokenizer.push((token_id,)))
            parts.append(safe)
            if self._matched is not None:
                return TextDelta("".join(parts), count, self._matched)
        return TextDelta("".join(parts), len(ids))

    def finish(self) -> str:
        """Return the remaining text at the generation's end; empty after a stop."""
        if self._matched is not None:
            return ""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        safe, self._matched = self._matcher.push(rest)
        return safe + self._matcher.flush()
