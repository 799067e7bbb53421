"""Texts as tokens and tokens as texts, without a worker; and what models there are."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass

from millstream_server.control.engine import Task
from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.models import Models
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.text.messages import ChatMessage, ConversationPaths, Tool
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.router import Router

MAX_DETOKENIZED_IDS = 1 << 20


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text, or a conversation, as tokens."""

    ids: MutableSequence[int]
    context_length: int
    """Most tokens of a prompt and its answer; 0: not known."""
    bytes_of: Callable[[int], bytes]
    """Returns a token's own bytes."""
    prompt: str = ""
    """Of a conversation: the rendered template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UntokenizedChat:
    """A conversation to be rendered for the model's answer."""

    model: str
    messages: Sequence[ChatMessage]
    tools: Sequence[Tool]
    answers: AnswerOptions
    """Only what the template is told counts."""
    paths: ConversationPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model as the HTTP API lists it."""

    name: str
    aliases: Sequence[str]
    context_length: int | None
    """None: no worker that generates text has said it."""
    tasks: frozenset[Task]
    """What it can do now."""


class Texts:
    """One per process."""

    def __init__(self, models: Models, router: Router, prompts: Prompts) -> None:
        self._models = models
        self._router = router
        self._prompts = prompts

    async def of_text(self, model: str, text: str, *, special_tokens: bool) -> Tokens:
        """Tokenize a text.

        Raises:
            ServingError: the model isn't served, has no tokenizer, or too much text work waits.
        """
        name, found = self._models.text(model)
        ids = await self._prompts.tokenize(found, text, special_tokens=special_tokens)
        return self._tokens(name, found, ids)

    async def of_chat(self, chat: UntokenizedChat) -> Tokens:
        """Render a conversation and tokenize it.

        Raises:
            ServingError: as `of_text`, or the conversation can't be rendered.
        """
        name, found = self._models.text(chat.model)
        variables = chat.answers.variables_for(found.chat_template)
        tools = chat.tools if chat.answers.with_tools else ()
        prompt, ids = await self._prompts.of_chat(
            found, chat.messages, tools, chat.paths, variables
        )
        return self._tokens(name, found, ids, prompt)

    async def detokenize(self, model: str, ids: Sequence[int], *, special_tokens: bool) -> str:
        """Turn tokens into text.

        Raises:
            ServingError: as `of_text`, or an id is outside of the vocabulary.
        """
        _, found = self._models.text(model)
        return await self._prompts.detokenize(found, ids, special_tokens=special_tokens)

    def models(self) -> Sequence[ListedModel]:
        """List what is served, by name."""
        return [
            ListedModel(
                name=each.name,
                aliases=each.aliases,
                context_length=each.engine.context_length if each.engine else None,
                tasks=each.tasks,
            )
            for each in self._models.status()
        ]

    def _tokens(
        self, name: str, text: TextModel, ids: MutableSequence[int], prompt: str = ""
    ) -> Tokens:
        engine = self._router.of(name).limits
        most = engine.context_length if engine else text.context_length
        return Tokens(ids, most or 0, text.token_bytes, prompt)
