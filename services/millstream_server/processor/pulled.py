"""What an output needs of the turn that it sends: of a `Turn`, or of one at another Processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from millstream_server.generation.output import FinishReason
    from millstream_server.generation.request import GenerationRequest
    from millstream_server.links.unread import UnreadOutput
    from millstream_server.processor.choice import Delta
    from millstream_server.processor.conversation import Options
    from millstream_server.processor.output import Pacer
    from millstream_server.processor.telemetry import Usage
    from millstream_server.processor.text.messages import ChatMessage
    from millstream_server.runtime.errors import Failure


class PulledChoice(Protocol):
    """A choice whose output is pulled: a `Choice`, or one at another Processor."""

    index: int
    unsent: list[Any]
    """What has come and is in no delta."""
    result: Any
    """None: it goes on."""
    finish_reason: FinishReason | None
    """Set when the last delta was made."""

    @property
    def has_more(self) -> bool:
        """Whether `take` has left something for the next delta."""

    @property
    def held_bytes(self) -> int:
        """About what takes memory and is in no delta."""

    @property
    def text(self) -> str:
        """The text of all deltas."""

    @property
    def message(self) -> ChatMessage:
        """The answer so far."""

    def take_text(self) -> tuple[str, int]:
        """Return the new text and its number of tokens; without all else and an end."""

    def take(self, *, failed: bool = False) -> Delta | None:
        """Return the new output; None: there is none. ``failed``: the turn has."""

    def drop(self) -> None:
        """Forget what is in no delta."""


class OutputParts(Protocol):
    """What turns share, of which an output needs this."""

    @property
    def pacer(self) -> Pacer:
        """Says how often to send."""

    @property
    def unread(self) -> UnreadOutput:
        """Bounds what clients don't read."""


class FirstToken(Protocol):
    """A turn's telemetry, as far as an output tells it."""

    def first_token(self) -> None:
        """The first token is sent."""


class TokenTexts(Protocol):
    """Knows what tokens stand for."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes."""


class PulledTurn(Protocol):
    """A turn whose output is pulled: a `Turn`, or one at another Processor."""

    error: Failure | None
    switched: bool

    @property
    def choices(self) -> Sequence[PulledChoice]:
        """By index."""

    @property
    def request(self) -> GenerationRequest:
        """What runs."""

    @property
    def options(self) -> Options:
        """What was asked for."""

    @property
    def parts(self) -> OutputParts:
        """What all turns of the process share."""

    @property
    def telemetry(self) -> FirstToken:
        """Its own."""

    @property
    def text_model(self) -> TokenTexts:
        """Of its model, or of the tokens that have come."""

    @property
    def reading(self) -> Any:
        """None: the answers are text."""

    @property
    def complete(self) -> bool:
        """Whether the last delta of every choice has been made."""

    def usage(self) -> Usage:
        """Return the token counts so far."""

    def cancel(self) -> None:
        """Stop it; its choices then finish."""
