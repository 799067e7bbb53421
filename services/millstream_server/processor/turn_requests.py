"""Makes a conversation's turn ready to be admitted: its prompt, its request, its checks.

Chat starts what comes out; Render returns it.
"""

from __future__ import annotations

from dataclasses import replace

from millstream_server.control.engine import Role
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Ability
from millstream_server.processor.answer import Reading, readable, reading_of, required_calls
from millstream_server.processor.conversation import Caller, Conversation, Options, UserTurn
from millstream_server.processor.front import Front
from millstream_server.processor.media.core import ProcessorMedia, TurnMedia
from millstream_server.processor.models import ServedModel
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.requests import (
    check,
    check_options,
    conversation_paths,
    request_of,
    turn_paths,
)
from millstream_server.processor.telemetry import TurnTelemetry
from millstream_server.routing.plan import RoutingRequest
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.frozen import dataclass

_SECONDS_PER_TOOL = 0.004
"""About what a tool's grammar takes to make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTurn:
    """A turn that was checked, and could be admitted now."""

    served: ServedModel
    text: str
    """The rendered template."""
    request: GenerationRequest
    options: Options
    reading: Reading | None
    """How its answers can be read; None: it isn't known."""
    media: TurnMedia | None


class TurnRequests:
    """Prepares turns; one per process."""

    def __init__(self, front: Front, prompts: Prompts, media: ProcessorMedia) -> None:
        self._front = front
        self._prompts = prompts
        self._media = media

    async def prepare(
        self,
        conversation: Conversation,
        said: UserTurn,
        served: ServedModel,
        caller: Caller,
        telemetry: TurnTelemetry,
    ) -> PreparedTurn:
        """Make a turn's request: its prompt, rendered and with its media encoded, and its checks.

        Raises:
            ServingError: it is refused; media are given back.
        """
        options, request_id, media = conversation.options, conversation.request_id, None
        reading = None
        paths = turn_paths(said.field, options.path)
        try:
            await self._prompts.read_grammar(options.sampling)
            if conversation.answers.events:
                readable(served.answer_format)
            if conversation.has_media:
                check_options(request_id, options, paths)  # before files are encoded in vain
                routing = RoutingRequest(model=served.name, session=conversation.workers)
                media = TurnMedia(self._media, routing, request_id, caller, telemetry)
                conversation.runs(media)
                text, prompt = await self._media_prompt(conversation, said, served, media)
            else:
                text, token_ids = await self._prompts.of_chat(
                    served.text,
                    conversation.messages,
                    conversation.told_tools,
                    conversation_paths(said.field),
                    conversation.answers.variables_for(served.text.chat_template),
                )
                prompt = Prompt(token_ids)
            if served.answer_format is not None:
                reading = reading_of(
                    served.answer_format,
                    conversation.told_tools,
                    text,
                    one_call=conversation.answers.one_call,
                )
                if conversation.answers.must_call and not said.field.startswith("tool_results"):
                    options = await _with_calls(self._prompts, conversation, served, text)
            later_turn = said.options is None and conversation.number > 1
            request = request_of(request_id, served, prompt, options, caller, fit=later_turn)
            if not (media and media.cancelled):
                check(request, options, served, self._front.limits, paths)
        except BaseException:
            if media:
                media.release()
            raise
        return PreparedTurn(
            served=served,
            text=text,
            request=request,
            options=options,
            reading=reading,
            media=media,
        )

    async def _media_prompt(
        self, conversation: Conversation, said: UserTurn, served: ServedModel, media: TurnMedia
    ) -> tuple[str, Prompt]:
        """Render the conversation, encode its media and place them; return text and prompt.

        The prompt is empty if the turn was cancelled.

        Raises:
            ServingError: one of them can't be used, or the conversation can't be rendered.
        """
        takes, paths = served.engine.media, conversation_paths(said.field)
        if takes is not None and takes.modalities and not served.modalities:
            raise self._front.router.of(served.name).absent(Role.ENCODE)
        text = await self._prompts.render(
            served.text,
            conversation.messages,
            conversation.told_tools,
            paths,
            conversation.answers.variables_for(served.text.chat_template),
        )
        parts, hold = conversation.media, conversation.uploads.hold
        await media.encode(
            parts, lambda: self._media.intake.prepare(parts, served.modalities, hold)
        )
        if media.cancelled:
            return text, Prompt(())
        encoded = media.encoded
        return text, await self._prompts.with_media(served.text, text, encoded, paths.messages)


async def _with_calls(
    prompts: Prompts, conversation: Conversation, served: ServedModel, text: str
) -> Options:
    """Return the options of an answer that has to call a tool.

    Raises:
        ServingError: the model, its workers or the client's options don't allow it.
    """
    options, field = conversation.options, "start.tool_choice.mode"
    if "constraint" in options.sampling:
        raise InvalidRequestError.of(field, "and sampling.constraint exclude each other")
    if Ability.STRUCTURAL_TAGS not in served.engine.abilities:
        sentence = "asks for a grammar, and this model's workers take no structural tags"
        raise UnsupportedFeatureError.of(field, sentence)
    how, tools = readable(served.answer_format), conversation.told_tools
    answers = conversation.answers
    constraint = await prompts.threads.run(
        lambda: required_calls(how, answers, tools, text), len(tools) * _SECONDS_PER_TOOL
    )
    sampling = {**options.sampling, "constraint": constraint}
    await prompts.read_grammar(sampling)
    return replace(options, sampling=sampling)
