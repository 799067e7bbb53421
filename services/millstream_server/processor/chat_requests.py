"""From a turn of a conversation to its checked request: Chat starts it, Render returns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.formats.choosing import AnswerFormat
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Ability
from millstream_server.processor.answer import Reading, going_on, reading_of, text_of_prefill
from millstream_server.processor.answer_grammar import binding_of, with_grammar
from millstream_server.processor.answer_options import CONTINUE
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
    with_kept_seed,
)
from millstream_server.processor.telemetry import TurnTelemetry
from millstream_server.processor.text.switches import turns_off
from millstream_server.processor.text.template import NO_VARIABLES
from millstream_server.routing.plan import RoutingRequest
from millstream_server.runtime.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTurn:
    """A turn that was checked, and could be admitted now."""

    served: ServedModel
    text: str
    """The rendered template."""
    request: GenerationRequest
    options: Options
    reading: Reading | None
    """How its answers are read; None: as plain text."""
    media: TurnMedia | None
    switched: bool
    """The template was told how to reason."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end an answer, by the model's files."""
        return self.served.text.eos_token_ids


class ChatRequests:
    """Makes the requests of chats; one per process."""

    def __init__(self, front: Front, prompts: Prompts, media: ProcessorMedia) -> None:
        self._front = front
        self._prompts = prompts
        self._media = media

    async def prepare(
        self,
        conversation: Conversation,
        said: UserTurn,
        caller: Caller,
        served: ServedModel,
        telemetry: TurnTelemetry,
    ) -> PreparedTurn:
        """Make and check a turn's request, with its options and how its answers are read.

        Raises:
            ServingError: something in it is refused; its media are given back.
        """
        if not conversation.has_media:
            return await self._prepare(conversation, said, caller, served, None)
        routing = RoutingRequest(model=served.name, session=conversation.workers)
        media = TurnMedia(self._media, routing, conversation.request_id, caller, telemetry)
        try:
            return await self._prepare(conversation, said, caller, served, media)
        except BaseException:
            media.release()
            raise

    async def _prepare(
        self,
        conversation: Conversation,
        said: UserTurn,
        caller: Caller,
        served: ServedModel,
        media: TurnMedia | None,
    ) -> PreparedTurn:
        options = with_kept_seed(conversation.options, served.engine)
        answers, reading = conversation.answers, None
        paths = turn_paths(said.field, options.path)
        await self._prompts.read_grammar(options.sampling)
        tags = Ability.STRUCTURAL_TAGS in served.engine.abilities
        form = answers.format_of(
            served.answer_format,
            told_tools=bool(conversation.told_tools),
            text_alone="constraint" in options.sampling and not tags,
        )
        if media is not None:
            check_options(conversation.request_id, options, paths)  # before files are encoded
            conversation.runs(media)
        variables = answers.variables_for(served.text.chat_template)
        text, prompt = await self._prompt(conversation, said, served, media, variables)
        fit = said.options is None and conversation.number > 1
        checked = not (media and media.cancelled)
        fields = [entry.part.field for entry in media.encoded] if media else ()
        if checked and conversation.continued is not None:  # first: it may be long
            given = request_of(conversation.request_id, served, prompt, options, caller)
            check(given, options, served, self._front.limits, paths, media_fields=fields)
        if form is not None:
            reading = await self.reading_for(conversation, form, text, variables)
            if answers.events or conversation.told_tools or form.form.reasoning:
                binding, able = binding_of(reading, conversation, said, options), served.engine
                options = await with_grammar(options, binding, able.abilities, self._prompts)
        request = request_of(conversation.request_id, served, prompt, options, caller, fit=fit)
        if checked:
            check(request, options, served, self._front.limits, paths, media_fields=fields)
        return PreparedTurn(
            served=served,
            text=text,
            request=request,
            options=options,
            reading=reading,
            media=media,
            switched=bool(answers.switches and variables),
        )

    async def reading_for(
        self,
        conversation: Conversation,
        how: AnswerFormat,
        prompt: str,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> Reading:
        """Return how the answers to a conversation's ``prompt``, of such variables, are read.

        Raises:
            ServingError: its last message can't be continued.
        """
        last, one_call = conversation.continued, conversation.answers.one_call
        begun, tools = text_of_prefill(last, how.form) if last else "", conversation.told_tools
        off = turns_off(variables) and not begun  # it may go on in reasoning
        reading = reading_of(how, tools, prompt, one_call=one_call, off=off)
        return await going_on(reading, begun, CONTINUE, self._prompts.threads)

    async def _prompt(
        self,
        conversation: Conversation,
        said: UserTurn,
        served: ServedModel,
        media: TurnMedia | None,
        variables: Mapping[str, Any],
    ) -> tuple[str, Prompt]:
        """Render the conversation, encode its media and place them; return text and prompt.

        The prompt is empty if the turn was cancelled meanwhile.

        Raises:
            ServingError: one of them can't be used, or the conversation can't be rendered.
        """
        text_model = served.text
        paths = conversation_paths(said.field, CONTINUE if conversation.continued else "")
        messages, tools = conversation.messages, conversation.told_tools
        if media is None:
            most = served.engine.context_length
            text, ids = await self._prompts.of_chat(
                text_model, messages, tools, paths, variables, most=most
            )
            return text, Prompt(ids)
        takes = served.engine.media
        if takes is not None and takes.modalities and not served.modalities:
            raise self._front.router.of(served.name).absent(Role.ENCODE)
        text = await self._prompts.render(text_model, messages, tools, paths, variables)
        parts, hold = conversation.media, conversation.uploads.hold
        await media.encode(
            parts, lambda: self._media.intake.prepare(parts, served.modalities, hold)
        )
        if media.cancelled:
            return text, Prompt(())
        return text, await self._prompts.with_media(text_model, text, media.encoded, paths.messages)
