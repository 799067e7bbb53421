"""What the endpoints ask of a Processor: its own parts, or Processors that are called by gRPC.

`millstream_server.door` has the second. All methods raise a `ServingError` for what is refused or
fails, with the fields of the plain types or of the contract, which `http.errors` renames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from millstream_server.diffusion.diffuser import ImageDefaults
from millstream_server.diffusion.request import Chunk, DiffusionRequest, Finished, Progress
from millstream_server.embedding.request import (
    EmbedFinished,
    EmbedRequest,
    Ranking,
    RerankRequest,
    Vectors,
)
from millstream_server.generation.request import GenerationRequest
from millstream_server.processor.conversation import (
    Caller,
    Completion,
    Conversation,
    Options,
    UserTurn,
)
from millstream_server.processor.open_calls import OpenCalls
from millstream_server.processor.output import OutputCall, TurnOutput
from millstream_server.processor.pulled import PulledTurn
from millstream_server.processor.text.threads import TextThreads
from millstream_server.processor.texts import ListedModel, Tokens, UntokenizedChat
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.slot_session import Output

TurnT = TypeVar("TurnT", bound=PulledTurn)


class RenderedChat(Protocol):
    """What a chat would send to a worker."""

    @property
    def request(self) -> GenerationRequest:
        """Without what only running it needs."""

    @property
    def options(self) -> Options:
        """What was asked for."""

    @property
    def text(self) -> str:
        """The rendered template."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end an answer, by the model's files."""


class Chats(Protocol[TurnT]):
    """Runs turns and completions.

    Order of calls: `conversation`, `answer`; or `complete`. Then `Call.send_from` with the output
    that they were given, and `end` always.
    """

    def conversation(self) -> Conversation:
        """Open one; its caller closes it."""

    async def answer(
        self,
        conversation: Conversation,
        said: UserTurn,
        caller: Caller,
        call: Call,
        output: TurnOutput[TurnT],
    ) -> TurnT:
        """Start a turn, whose ``output`` goes to ``call``."""

    async def complete(
        self, completion: Completion, caller: Caller, call: OutputCall, output: TurnOutput[TurnT]
    ) -> TurnT:
        """Start a completion, whose ``output`` goes to ``call``."""

    async def render(
        self, conversation: Conversation, said: UserTurn, caller: Caller
    ) -> RenderedChat:
        """Return what a turn would send to a worker."""

    def end(self, turn: TurnT) -> None:
        """Close a turn in any state."""


class TokenMaker(Protocol):
    """Tokenizes, and knows the models; see `processor.texts.Texts`."""

    async def of_text(
        self, model: str, text: str, *, special_tokens: bool, with_bytes: bool = False
    ) -> Tokens: ...

    async def of_chat(self, chat: UntokenizedChat) -> Tokens: ...

    async def detokenize(self, model: str, ids: Sequence[int], *, special_tokens: bool) -> str: ...

    async def models(self) -> Sequence[ListedModel]: ...


class VectorMaker(Protocol):
    """Embeds and ranks; see `processor.embedding.core.VectorsCore`."""

    async def embed(self, request: EmbedRequest, output: Output[Vectors]) -> EmbedFinished: ...

    async def rerank(self, request: RerankRequest) -> Ranking: ...


class ImageMaker(Protocol):
    """Makes images; see `processor.diffusion.core.DiffusionCore`."""

    async def run(
        self, request: DiffusionRequest, output: Output[Progress | Chunk]
    ) -> Finished: ...

    async def defaults(self, model: str) -> ImageDefaults: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """All of it; one per process."""

    calls: OpenCalls
    threads: TextThreads
    """Large bodies are read in these."""
    chats: Chats[Any]
    texts: TokenMaker
    vectors: VectorMaker
    images: ImageMaker
