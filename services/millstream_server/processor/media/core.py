"""What a Processor has for images and videos; one per process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream_server.generation.span import RequestSpan
from millstream_server.media.file import MediaFile
from millstream_server.processor.media.budget import MediaBudget
from millstream_server.processor.media.encoding import Encoders, TurnMedia
from millstream_server.processor.media.intake import Intake
from millstream_server.processor.media.parts import MediaPart
from millstream_server.processor.media.uploads import Uploads
from millstream_server.processor.options import Caller
from millstream_server.routing.request import RoutingRequest
from millstream_server.routing.router import Router

if TYPE_CHECKING:
    from millstream_server.processor.telemetry import TurnTelemetry


class ProcessorMedia:
    """Makes the parts that take in and encode a conversation's media."""

    def __init__(
        self,
        router: Router,
        encoders: Encoders,
        intake: Intake,
        budget: MediaBudget,
        *,
        shared_cache: bool = False,
    ) -> None:
        """Encode on ``encoders``; all conversations' bytes count in ``budget``.

        With ``shared_cache`` callers share cached results, otherwise each has its own.
        """
        self._shared_cache = shared_cache
        self.intake = intake
        self._router = router
        self._encoders = encoders
        self._budget = budget

    def uploads(self) -> Uploads:
        """Make the uploads of a new conversation; `close` frees the bytes of all its media."""
        return Uploads(self._budget, self.intake.max_item_bytes)

    def of_turn(
        self,
        request: RoutingRequest,
        request_id: str,
        caller: Caller,
        telemetry: TurnTelemetry,
    ) -> TurnMedia:
        """Make what encodes one turn's media; ``request`` has its model and session."""

        def file_of(part: MediaPart, span: RequestSpan) -> MediaFile:
            return MediaFile(
                modality=part.modality,
                data=part.data,
                sha256=part.sha256,
                salt="" if self._shared_cache else caller.name,
                request_id=request_id,
                trace=span.carry(caller.trace),
                deadline_s=caller.deadline_s,
            )

        return TurnMedia(self._router, self._encoders, request, file_of, telemetry)
