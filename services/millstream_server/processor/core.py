"""The Processor's decisions: is the request valid, may it run now, which workers run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from millstream_server.control.engine import Task
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.processor.admission import Admission
from millstream_server.processor.answer import Reading
from millstream_server.processor.chat_requests import ChatRequests, PreparedTurn
from millstream_server.processor.conversation import (
    Caller,
    Completion,
    Conversation,
    Options,
    Stoppable,
    UserTurn,
)
from millstream_server.processor.front import Front, FrontRequest
from millstream_server.processor.media.core import ProcessorMedia, TurnMedia
from millstream_server.processor.models import ServedModel
from millstream_server.processor.output import OutputCall, PulledOutput, TurnOutput
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.requests import (
    check,
    completion_paths,
    most_tokens,
    request_of,
    with_kept_seed,
)
from millstream_server.processor.telemetry import TurnTelemetry
from millstream_server.processor.texts import Texts
from millstream_server.processor.turn import Turn, TurnParts
from millstream_server.runtime.errors import (
    SERVER_FAULTS,
    ServingError,
)
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


class ProcessorCore:
    """The Processor's logic, in plain types; one per process."""

    def __init__(
        self, front: Front, prompts: Prompts, parts: TurnParts, media: ProcessorMedia
    ) -> None:
        self.front = front
        self.prompts = prompts
        self.media = media
        self.models, self.work = front.models, front.work
        self.texts = Texts(front.models, front.router, prompts)
        self._parts = parts
        self._chats = ChatRequests(front, prompts, media)

    def conversation(self) -> Conversation:
        """Open one, without turns; its caller closes it."""
        return Conversation(self.media.uploads, self.work)

    @contextlib.contextmanager
    def only_turn(self) -> Iterator[Conversation]:
        """Open a conversation of one turn, and count its RPC as open, during a ``with`` block.

        Raises:
            UnavailableError: this process is shutting down.
        """
        conversation = self.conversation()
        try:
            with self.front.call():
                yield conversation
        finally:
            conversation.close()

    async def answer(
        self,
        conversation: Conversation,
        said: UserTurn,
        caller: Caller,
        call: Call,
        output: TurnOutput,
    ) -> Turn:
        """Start a turn of ``conversation``, whose ``output`` goes to ``call``.

        Raises:
            ServingError: it was refused.
        """
        with FrontRequest(self.front, Task.CHAT, caller.trace, number=conversation.number) as asked:
            model = conversation.model
            served = await self.front.router.found(
                lambda: self.models.served(model, "start.model", Task.CHAT)
            )
            asked.known(served.name, served.engine.engine)
            prepared = await self._chats.prepare(
                conversation, said, caller, served, asked.telemetry
            )
            request, options, media = prepared.request, prepared.options, prepared.media
            try:
                admission = await self._admit(request, options, asked, call, conversation.runs)
            except BaseException:
                if media:
                    media.release()
                raise
        if media and media.cancelled:
            admission.leave()  # the turn then ends without having started
        turn = self._start(
            request,
            options,
            served,
            admission,
            asked,
            call=call,
            output=output,
            media=media,
            reading=prepared.reading,
            session=conversation.workers,
            continuation=conversation.continued is not None,
        )
        turn.switched = prepared.switched
        conversation.runs(turn)
        return turn

    async def render(
        self, conversation: Conversation, said: UserTurn, caller: Caller
    ) -> PreparedTurn:
        """Prepare a turn as `answer` does, and start nothing; its media are given back.

        Raises:
            ServingError: it would be refused.
        """
        served = self.models.served(conversation.model, "start.model", Task.CHAT)
        telemetry = TurnTelemetry(self.front.telemetry, Task.CHAT, caller.trace)
        prepared = await self._chats.prepare(conversation, said, caller, served, telemetry)
        if prepared.media:
            prepared.media.release()
        if prepared.reading is None and served.answer_format is not None:
            form = served.answer_format
            reading = await self._chats.reading_for(conversation, form, prepared.text)
            return replace(prepared, reading=reading)
        return prepared

    async def complete(
        self, completion: Completion, caller: Caller, call: OutputCall, output: TurnOutput
    ) -> Turn:
        """Start a completion, whose ``output`` goes to ``call``.

        Raises:
            ServingError: it was refused.
        """
        text = completion.prompt
        paths = completion_paths(completion.options.path, is_text=isinstance(text, str))
        with FrontRequest(self.front, Task.COMPLETE, caller.trace) as asked:
            served = await self.front.router.found(
                lambda: self.models.served(completion.model, "model", Task.COMPLETE)
            )
            asked.known(served.name, served.engine.engine)
            options = with_kept_seed(completion.options, served.engine)
            await self.prompts.read_grammar(options.sampling)
            if isinstance(text, str):
                most = served.engine.context_length
                text = await self.prompts.tokenize(
                    served.text, text, special_tokens=True, most=most
                )
            request = request_of(completion.request_id, served, Prompt(text), options, caller)
            check(request, options, served, self.front.limits, paths)
            admission = await self._admit(request, options, asked, call)
        return self._start(
            request, options, served, admission, asked, call=call, output=output, continuation=True
        )

    async def _admit(
        self,
        request: GenerationRequest,
        options: Options,
        asked: FrontRequest,
        call: OutputCall,
        runs: Callable[[Stoppable], None] | None = None,
    ) -> Admission:
        """Admit a checked request: at once if there is capacity, else after waiting.

        ``runs`` is called with an admission that waits. If it is cancelled then, the returned one
        doesn't run. A shutdown refuses nothing here: `Front.call` and `Conversation` refuse
        late requests. When the last worker is lost while requests wait, they wait on for
        `QueueLimits.comeback_s`, and run in order after a reconnect; new requests get NO_WORKER
        after a round of discovery, so that their clients can use another server.

        Raises:
            ServingError: a worker that it needs isn't connected, the queue is full, the caller's
            deadline passed while it waited, or an equal request has lost two workers.
        """
        self.front.repeated.check(call.caller_key, request)
        asked.telemetry.request_known(request, options.n, own_seed="seed" in options.sampling)
        await self.front.router.found(lambda: self.front.router.require(request.model))
        most, prompts = most_tokens(request, options.n), options.n * len(request.prompt)
        admission = asked.enter(options.n, most, request.priority, request.time_left_s, prompts)
        if admission.waits:
            if runs:
                runs(admission)
            await admission.admitted()
        return admission

    def _start(
        self,
        request: GenerationRequest,
        options: Options,
        served: ServedModel,
        admission: Admission,
        asked: FrontRequest,
        *,
        call: OutputCall,
        output: TurnOutput,
        media: TurnMedia | None = None,
        reading: Reading | None = None,
        session: tuple[str, ...] = (),
        continuation: bool = False,
    ) -> Turn:
        """Route an admitted turn and start it on its workers, without awaiting.

        Raises:
            UnavailableError: a worker it takes is away.
        """
        turn = Turn(
            request,
            options,
            served.text,
            admission,
            self._parts,
            call=call,
            output=output,
            telemetry=asked.telemetry,
            continuation=continuation,
            media=media,
            reading=reading,
        )
        try:
            if not admission.runs:  # cancelled while it waited
                turn.end_unstarted()
                return turn
            turn.start(self.front.router.plan(turn.routed(session)))
        except BaseException as error:
            if isinstance(error, ServingError):
                turn.fail(error)
            self.end(turn)
            raise
        return turn

    async def send(self, turn: Turn, output: PulledOutput, call: Call) -> None:
        """Send the output of a turn that has started, to its end."""
        try:
            await call.send_from(output)
        finally:
            self.end(turn)

    def end(self, turn: Turn) -> None:
        """Close a turn in any state, and log it in one line."""
        turn.close()
        error = turn.error
        self.front.meter.finished(failed=error is not None and error.code in SERVER_FAULTS)
        _log(turn)


def _log(turn: Turn) -> None:
    """Write a turn's line, without its text."""
    usage, request = turn.used, turn.request
    # Who only starts and cancels gets no line each.
    write = log.info if usage.completion_tokens or turn.complete else log.caused
    more: dict[str, Any] = {} if turn.seed is None else {"seed": turn.seed}
    if turn.redispatches:
        more["redispatches"] = len(turn.redispatches)
    write(
        "turn ended",
        request=request.request_id,
        trace_id=turn.telemetry.trace_id,
        model=request.model,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        media_tokens=usage.media_tokens,
        completion_tokens=usage.completion_tokens,
        **more,
        outcome=turn.outcome,
    )
