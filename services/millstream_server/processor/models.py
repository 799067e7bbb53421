"""The models that a Processor serves: their text handling, and their workers' limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from millstream_server.engines.base import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.request import Prompt
from millstream_server.media.items import Modality
from millstream_server.processor.media.encoding import EncodedPart
from millstream_server.processor.media.prompt import media_prompt
from millstream_server.processor.text.message_checks import ConversationPaths, check_messages
from millstream_server.processor.text.messages import ChatMessage, Tool
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.router import Router
from millstream_server.runtime.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    UnsupportedFeatureError,
)

_SMALL_CHARS = 1024
_SMALL_MESSAGES = 16
_SMALL_PARTS = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model: its text handling and its workers' current limits."""

    name: str
    text: TextModel
    engine: GeneratorInfo
    modalities: frozenset[Modality] = frozenset()
    """Media that a prompt may have now."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model as `ListModels` shows it."""

    name: str
    text: TextModel
    ready: bool
    """Whether it has a worker of every role it needs."""
    engine: GeneratorInfo | None
    workers: Mapping[Role, int]
    """Connected workers by role."""
    modalities: frozenset[Modality] = frozenset()
    """Media that its prompts may have now."""


class Models:
    """All models of a Processor."""

    def __init__(self, texts: Mapping[str, TextModel], router: Router, text_threads: int) -> None:
        """Serve ``texts``, by model name, on the workers of ``router``."""
        self._texts = texts
        self._router = router
        self._executor = ThreadPoolExecutor(text_threads, thread_name_prefix="text")

    @property
    def names(self) -> Sequence[str]:
        """The models' names."""
        return sorted(self._texts)

    def text(self, name: str, field: str = "model") -> tuple[str, TextModel]:
        """Look up a model; an empty name means the only one.

        Raises:
            ModelNotFoundError: it isn't served here.
            InvalidRequestError: no name was given and several models are served.
        """
        if not name:
            if len(self._texts) == 1:
                return next(iter(self._texts.items()))
            raise InvalidRequestError.of(field, f"name one of {self.names}")
        if name not in self._texts:
            raise ModelNotFoundError(
                f"model {name[:64]!r} is not served here; ListModels names those that are"
            )
        return name, self._texts[name]

    def served(self, name: str, field: str = "model") -> ServedModel:
        """Look up a model with connected workers.

        Raises:
            NoWorkerError: none of its workers is connected.
        """
        name, text = self.text(name, field)
        engine = self._router.limits(name)
        if engine is None:
            raise NoWorkerError(
                "no worker for this model is connected; retry in a moment", retry_delay_s=1.0
            )
        return ServedModel(name, text, engine, self._modalities(name))

    def status(self) -> list[ModelStatus]:
        """Describe every model."""
        return [
            ModelStatus(
                name,
                self._texts[name],
                self._router.ready(name),
                self._router.limits(name),
                self._router.connected(name),
                self._modalities(name),
            )
            for name in self.names
        ]

    def _modalities(self, name: str) -> frozenset[Modality]:
        family = self._texts[name].family
        return self._router.modalities(name) & family.modalities if family else frozenset()

    def ready(self) -> bool:
        """Return whether every model has a worker of every role it needs."""
        return all(self._router.ready(name) for name in self._texts)

    # ---- text ------------------------------------------------------------------------------------

    async def render_chat(
        self,
        text: TextModel,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        paths: ConversationPaths,
    ) -> tuple[str, list[int]]:
        """Check a conversation, render the model's template, tokenize: prompt text and ids.

        A short conversation is done on the event loop, which is faster than a thread.

        Raises:
            InvalidRequestError: it can't be rendered.
        """

        def work() -> tuple[str, list[int]]:
            violations = check_messages(messages, tools, paths)
            if violations:
                raise InvalidRequestError.of_all(violations)
            prompt = text.chat_template.render(messages, tools, field=paths.messages)
            return prompt, text.encode(prompt, add_special_tokens=False)

        return work() if _is_small(messages, tools) else await self._off_loop(work)

    async def render_media(
        self,
        text: TextModel,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        paths: ConversationPaths,
    ) -> str:
        """Check a conversation with media and render the model's template, without tokenizing.

        Raises:
            InvalidRequestError: it can't be rendered.
        """

        def work() -> str:
            violations = check_messages(messages, tools, paths)
            if violations:
                raise InvalidRequestError.of_all(violations)
            return text.chat_template.render(messages, tools, field=paths.messages)

        return work() if _is_small(messages, tools) else await self._off_loop(work)

    async def place_media(
        self, text: TextModel, rendered: str, encoded: Sequence[EncodedPart], field: str
    ) -> Prompt:
        """Make the prompt of a rendered conversation and its encoded media.

        Raises:
            InvalidRequestError: the text has more or fewer placeholders than there are media.
        """
        family = text.family
        if family is None:
            raise UnsupportedFeatureError.of(field, "this model takes text only")

        def tokenize(piece: str) -> list[int]:
            return text.encode(piece, add_special_tokens=False)

        return await self._off_loop(
            lambda: media_prompt(rendered, family, encoded, tokenize, field)
        )

    async def tokenize(self, text: TextModel, prompt: str, *, special_tokens: bool) -> list[int]:
        """Tokenize a raw text."""
        if len(prompt) <= _SMALL_CHARS:
            return text.encode(prompt, add_special_tokens=special_tokens)
        return await self._off_loop(lambda: text.encode(prompt, add_special_tokens=special_tokens))

    async def detokenize(self, text: TextModel, ids: Sequence[int], *, special_tokens: bool) -> str:
        """Turn token ids into text."""
        return await self._off_loop(
            lambda: text.decode(ids, skip_special_tokens=not special_tokens)
        )

    async def _off_loop(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread: templates and tokenizers take milliseconds for long texts."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Stop the text threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _is_small(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> bool:
    """Return whether the work is so short that a thread would not be worth it."""
    return (
        not tools
        and len(messages) <= _SMALL_MESSAGES
        and sum(len(message.text) for message in messages) <= _SMALL_CHARS
        and sum(len(message.parts) for message in messages) <= _SMALL_PARTS
        and not any(message.tool_calls for message in messages)
    )
