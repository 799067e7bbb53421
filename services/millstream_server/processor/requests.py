"""From what a client asked to one checked request."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millstream_server.engines.base import Role
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.validation import (
    MAX_CONSTRAINT_BYTES,
    FieldPaths,
    check_request,
    shape_problem,
)
from millstream_server.processor.caller import Caller
from millstream_server.processor.conversation import Conversation, UserTurn
from millstream_server.processor.limits import RequestLimits, too_large
from millstream_server.processor.media.core import ProcessorMedia
from millstream_server.processor.media.encoding import TurnMedia
from millstream_server.processor.models import Models, ServedModel
from millstream_server.processor.options import Options
from millstream_server.processor.telemetry import TurnTelemetry
from millstream_server.processor.text.message_checks import ConversationPaths
from millstream_server.processor.text.stops import check_stops
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.tasks import Task
from millstream_server.runtime.errors import FieldViolation, InvalidRequestError
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.request_id import request_id_violations, short_text_violations

MAX_CHOICES = 16
MAX_MIN_INTERVAL_S = 10.0
_MANY_CHARS = 4096
"""A grammar up to here is read on the event loop, in about 1 ms."""
_SECONDS_PER_CHAR = 0.3e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A raw prompt to be continued: text or token ids."""

    model: str
    request_id: str
    prompt: str | Sequence[int]
    options: Options


class RequestBuilder:
    """Renders, tokenizes, fills in defaults, and checks: the one check of the front door."""

    def __init__(self, models: Models, limits: RequestLimits, media: ProcessorMedia) -> None:
        """Make requests for ``models`` within ``limits``; ``media`` takes in images and videos."""
        self._models = models
        self._media = media
        self._limits = limits

    async def of_turn(
        self, conversation: Conversation, turn: UserTurn, caller: Caller, telemetry: TurnTelemetry
    ) -> tuple[GenerationRequest, TurnMedia | None]:
        """Make the request of a turn that ``conversation`` has taken, and encode its media.

        If the turn was cancelled meanwhile, the media say so, and the request must not run.

        Raises:
            ServingError: it can't be served.
        """
        served = self._served(conversation.model, "start.model", Task.CHAT, telemetry)
        paths = _conversation_paths(turn.field)
        media = None
        await self._read_constraint(conversation.options)
        try:
            if conversation.has_media:
                _check_options(conversation, turn)  # before files are encoded for nothing
                media = self._media.of_turn(conversation, served.name, caller, telemetry)
                prompt = await self._media_prompt(conversation, served, media, paths)
            else:
                _, token_ids = await self._models.render_chat(
                    served.text, conversation.messages, conversation.tools, paths
                )
                prompt = Prompt(token_ids)
            request = self._of_prompt(conversation, turn, served, prompt, caller)
        except BaseException:
            if media:
                media.release()
            raise
        telemetry.request_known(request, conversation.options.n)
        return request, media

    async def _media_prompt(
        self,
        conversation: Conversation,
        served: ServedModel,
        media: TurnMedia,
        paths: ConversationPaths,
    ) -> Prompt:
        """Encode the conversation's media and place them; empty if the turn was cancelled."""
        parts, hold = conversation.media, conversation.uploads.hold
        takes = served.engine.media
        if takes is not None and takes.modalities and not served.modalities:
            raise self._models.absent(served.name, Role.ENCODE)
        text = await self._models.render_media(
            served.text, conversation.messages, conversation.tools, paths
        )
        conversation.runs(media)
        await media.encode(
            parts, lambda: self._media.intake.prepare(parts, served.modalities, hold)
        )
        if media.cancelled:
            return Prompt(())
        return await self._models.place_media(served.text, text, media.encoded, paths.messages)

    def _of_prompt(
        self,
        conversation: Conversation,
        turn: UserTurn,
        served: ServedModel,
        prompt: Prompt,
        caller: Caller,
    ) -> GenerationRequest:
        options = conversation.options
        later_turn = turn.options is None and conversation.number > 1
        request = _request(conversation.request_id, served, prompt, options, caller, fit=later_turn)
        if not prompt:  # cancelled while its media were encoded
            return request
        self._check(
            request,
            options,
            served,
            _turn_paths(turn.field, options.path),
        )
        return request

    async def of_completion(
        self, completion: Completion, caller: Caller, telemetry: TurnTelemetry
    ) -> GenerationRequest:
        """Make the request of a raw prompt.

        Raises:
            ServingError: it can't be served.
        """
        options, prompt = completion.options, completion.prompt
        served = self._served(completion.model, "model", Task.COMPLETE, telemetry)
        await self._read_constraint(options)
        if isinstance(prompt, str):
            token_ids: Sequence[int] = await self._models.tokenize(
                served.text, prompt, special_tokens=True
            )
        else:
            token_ids = prompt
        request = _request(completion.request_id, served, Prompt(token_ids), options, caller)
        is_text = isinstance(prompt, str)
        paths = FieldPaths(
            prompt="text" if is_text else "token_ids.ids",
            options=options.path,
            prompt_is_ids=not is_text,
        )
        self._check(request, options, served, paths)
        telemetry.request_known(request, options.n)
        return request

    async def _read_constraint(self, options: Options) -> None:
        """Check a long grammar's shape in a thread; `check_request` finds the result."""
        constraint = options.sampling.get("constraint")
        if constraint is None or not _MANY_CHARS < len(constraint.source) <= MAX_CONSTRAINT_BYTES:
            return
        await self._models.threads.run(
            lambda: shape_problem(constraint), len(constraint.source) * _SECONDS_PER_CHAR
        )

    def _served(self, model: str, field: str, task: Task, telemetry: TurnTelemetry) -> ServedModel:
        served = self._models.served(model, field, task)
        telemetry.model_known(served.name, served.engine.engine)
        return served

    def _check(
        self,
        request: GenerationRequest,
        options: Options,
        served: ServedModel,
        paths: FieldPaths,
    ) -> None:
        """Refuse what can't succeed, naming every wrong field.

        Raises:
            InvalidRequestError: something is wrong.
        """
        violations = (
            _option_violations(request.request_id, options, paths)
            or _stray_placeholders(request.prompt, served.text, paths)
            or too_large(request, options.n, self._limits, paths.options)
        )
        if violations:
            raise InvalidRequestError.of_all(violations)
        check_request(request, served.engine, Role.AGGREGATED, paths)


def _request(
    request_id: str,
    served: ServedModel,
    prompt: Prompt,
    options: Options,
    caller: Caller,
    *,
    fit: bool = False,
) -> GenerationRequest:
    """Make the request of a turn; with ``fit`` the answer is bounded by what the context leaves."""
    return GenerationRequest(
        request_id=request_id,
        model=served.name,
        prompt=prompt,
        sampling=options.sampling_for(
            served.text.generation_defaults,
            served.engine.context_length - len(prompt),
            fit=fit,
            refused=served.engine.refused_fields,
        ),
        logprobs=options.logprobs,
        priority=Priority.NORMAL if options.priority is None else options.priority,
        deadline_s=caller.deadline_s,
        trace=caller.trace,
        adapter=options.adapter,
        cache_salt=options.cache_salt,
    )


def _stray_placeholders(prompt: Prompt, text: TextModel, paths: FieldPaths) -> list[FieldViolation]:
    """Refuse a text that has the model's own placeholders; with media `place_media` counts them."""
    if prompt.media:
        return []
    found = sum(prompt.token_ids.count(token) for token in text.soft_tokens)
    if not found:
        return []
    return [
        FieldViolation(
            paths.prompt,
            f"has {found} of the model's own placeholders for images and videos, and 0 images and "
            "videos; leave them out, Chat places them itself",
        )
    ]


@functools.cache  # of a few fields of ours
def _turn_paths(field: str, options: str) -> FieldPaths:
    """Return a turn's paths, by the turn's own and its options'."""
    return FieldPaths(
        prompt=field, options=options, request_id="start.request_id", prompt_is_ids=False
    )


@functools.cache  # likewise
def _conversation_paths(field: str) -> ConversationPaths:
    return ConversationPaths(field, "start.tools")


def _check_options(conversation: Conversation, turn: UserTurn) -> None:
    options = conversation.options
    paths = _turn_paths(turn.field, options.path)
    violations = _option_violations(conversation.request_id, options, paths)
    if violations:
        raise InvalidRequestError.of_all(violations)


def _option_violations(
    request_id: str, options: Options, paths: FieldPaths
) -> list[FieldViolation]:
    at = paths.options
    found = [replace(v, field=at + v.field) for v in check_stops(options.stops)]
    if not 1 <= options.n <= MAX_CHOICES:
        found.append(FieldViolation(f"{at}n", f"must be from 1 to {MAX_CHOICES}, not {options.n}"))
    if not 0 <= options.min_interval_s <= MAX_MIN_INTERVAL_S:
        found.append(FieldViolation(f"{at}min_interval", "must be from 0 s to 10 s"))
    found += request_id_violations(request_id, paths.request_id)
    if options.session:
        found += short_text_violations(options.session, f"{at}session")
    if options.priority is None:
        found.append(FieldViolation(f"{at}priority", "is not one that this server has"))
    return found
