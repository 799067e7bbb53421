"""The models that a Processor serves: their text handling, and their workers' limits."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass

from millstream_server.engines.base import EngineInfo, Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.request import Prompt
from millstream_server.media.items import Modality
from millstream_server.processor.media.encoding import EncodedPart
from millstream_server.processor.media.prompt import media_prompt
from millstream_server.processor.tasks import ModelTasks
from millstream_server.processor.text.fair_queue import TextLimits
from millstream_server.processor.text.json_checks import schema_seconds
from millstream_server.processor.text.message_checks import ConversationPaths, check_messages
from millstream_server.processor.text.messages import ChatMessage, Tool
from millstream_server.processor.text.threads import TextThreads, stop_if_gone
from millstream_server.processor.text.tokenizer import SECONDS_PER_CHAR, TextModel
from millstream_server.routing.router import Router
from millstream_server.routing.tasks import Task
from millstream_server.runtime.errors import (
    InvalidRequestError,
    NoWorkerError,
    UnsupportedFeatureError,
)

_SMALL_CHARS = 1024
_SMALL_MESSAGES = 16
_SMALL_PARTS = 64
_SMALL_PROMPT_CHARS = 4096
"""Of a rendered prompt that is tokenized on the event loop, in about 2 ms."""
_CHECKED_AT_ONCE = 1 << 14
_SECONDS_PER_MESSAGE = 20e-6


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
    text: TextModel | None
    """None: no directory was given, as for models that make images or videos."""
    ready: bool
    """Whether it has a worker of every role it needs."""
    engine: GeneratorInfo | None
    workers: Mapping[Role, int]
    """Connected workers by role."""
    modalities: frozenset[Modality] = frozenset()
    """Media that its prompts may have now."""
    tasks: frozenset[Task] = frozenset()
    """What it can do now."""
    others: Sequence[EngineInfo] = ()
    """Infos of its workers for images, videos, vectors and scores."""


class Models:
    """All models of a Processor."""

    def __init__(
        self, texts: Mapping[str, TextModel | None], router: Router, text_limits: TextLimits
    ) -> None:
        """Serve ``texts``, by model name, on the workers of ``router``; None: without text."""
        self._texts = texts
        self._router = router
        self.threads = TextThreads(text_limits)
        self._tasks = ModelTasks(texts, router.tasks)
        self._served: dict[tuple[str, Task], ServedModel] = {}
        """Cache, emptied when a worker is added, removed or changed; has only models of ours."""
        router.watch(self._served.clear)

    @property
    def names(self) -> Sequence[str]:
        """The models' names."""
        return sorted(self._texts)

    def name_of(self, name: str, task: Task, field: str = "model") -> str:
        """Return the model of a request; an empty name means the only one for this task.

        Raises:
            ModelNotFoundError: it isn't served here.
            InvalidRequestError: no name was given and several models may do this, or the model
            does something else.
        """
        return self._tasks.find(name, task, field)

    def text(self, name: str, field: str = "model") -> tuple[str, TextModel]:
        """Look up a model's text handling; an empty name means the only model with one.

        Raises:
            ModelNotFoundError: it isn't served here.
            InvalidRequestError: no name was given and several models are served, or the model has
            no tokenizer here.
        """
        if not name:
            with_text = sorted(name for name, text in self._texts.items() if text)
            if len(with_text) != 1:
                why = f"name one of {with_text}" if with_text else "no model here has a tokenizer"
                raise InvalidRequestError.of(field, why)
            (name,) = with_text
        self._tasks.require(name)
        text = self._texts[name]
        if text is None:
            raise InvalidRequestError.of(field, f"{name!r} has no tokenizer here")
        return name, text

    def served(self, name: str, field: str = "model", task: Task = Task.CHAT) -> ServedModel:
        """Look up a model with connected workers.

        Raises:
            NoWorkerError: none of its workers is connected.
            InvalidRequestError: it does something else.
        """
        found = self._served.get((name, task))
        if found is None:
            found = self._served[name, task] = self._find(name, field, task)
        return found

    def _find(self, name: str, field: str, task: Task) -> ServedModel:
        name = self.name_of(name, task, field)
        text = self._texts[name]
        engine = self._router.limits(name)
        if engine is None or text is None:
            self._router.require(name)
            raise NoWorkerError(
                "no worker of this model is in service; retry in a moment", retry_delay_s=1.0
            )
        return ServedModel(name, text, engine, self._modalities(name))

    def absent(self, name: str, role: Role) -> NoWorkerError:
        """Make the error that a model has no worker of a role."""
        return self._router.absent(name, role)

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
                self._tasks.now(name) if self._router.ready(name) else frozenset(),
                self._router.task_workers(name).infos,
            )
            for name in self.names
        ]

    def _modalities(self, name: str) -> frozenset[Modality]:
        text = self._texts[name]
        family = text.family if text else None
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
    ) -> tuple[str, MutableSequence[int]]:
        """Check a conversation, render the model's template, tokenize: prompt text and ids.

        A short conversation is done on the event loop, which is faster than a thread.

        Raises:
            InvalidRequestError: it can't be rendered.
            OverloadedError: too much text work waits.
        """

        def encode(prompt: str) -> MutableSequence[int]:
            return text.encode(prompt, add_special_tokens=False)

        def work() -> tuple[str, MutableSequence[int]]:
            prompt = _render(text, messages, tools, paths)
            return prompt, encode(prompt)

        if not _is_small(messages, tools):
            return await self.threads.run(work, _seconds(messages, tools))
        prompt = _render(text, messages, tools, paths)
        if len(prompt) <= _SMALL_PROMPT_CHARS:
            return prompt, encode(prompt)
        # The template added much.
        ids = await self.threads.run(lambda: encode(prompt), len(prompt) * SECONDS_PER_CHAR)
        return prompt, ids

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
            OverloadedError: too much text work waits.
        """
        if _is_small(messages, tools):
            return _render(text, messages, tools, paths)
        return await self.threads.run(
            lambda: _render(text, messages, tools, paths), _seconds(messages, tools)
        )

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

        def tokenize(piece: str) -> Sequence[int]:
            return text.encode(piece, add_special_tokens=False)

        return await self.threads.run(
            lambda: media_prompt(rendered, family, encoded, tokenize, field),
            len(rendered) * SECONDS_PER_CHAR,
        )

    async def tokenize(
        self, text: TextModel, prompt: str, *, special_tokens: bool
    ) -> MutableSequence[int]:
        """Tokenize a raw text."""
        if len(prompt) <= _SMALL_CHARS:
            return text.encode(prompt, add_special_tokens=special_tokens)
        return await self.threads.run(
            lambda: text.encode(prompt, add_special_tokens=special_tokens),
            len(prompt) * SECONDS_PER_CHAR,
        )

    async def detokenize(self, text: TextModel, ids: Sequence[int], *, special_tokens: bool) -> str:
        """Turn token ids into text.

        Raises:
            InvalidRequestError: an id is outside of the vocabulary.
            OverloadedError: too much text work waits.
        """

        def work() -> str:
            _check_ids(ids, text.vocab_size)
            return text.decode(ids, skip_special_tokens=not special_tokens)

        return await self.threads.run(work, text.decode_seconds(len(ids)))

    def close(self) -> None:
        """Stop the text threads."""
        self.threads.close()


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for start in range(0, len(ids), _CHECKED_AT_ONCE):
        stop_if_gone()
        part = ids[start : start + _CHECKED_AT_ONCE]
        if max(part) >= vocab_size:
            at = start + next(i for i, token in enumerate(part) if token >= vocab_size)
            raise InvalidRequestError.of(
                f"token_ids[{at}]", f"must be below the vocabulary's size, {vocab_size}"
            )


def _render(
    text: TextModel,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    paths: ConversationPaths,
) -> str:
    violations = check_messages(messages, tools, paths)
    if violations:
        raise InvalidRequestError.of_all(violations)
    return text.chat_template.render(messages, tools, field=paths.messages)


def _is_small(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> bool:
    """Return whether the work is so short that a thread would not be worth it."""
    return (
        not tools
        and len(messages) <= _SMALL_MESSAGES
        # Templates may print ids and names too.
        and sum(len(m.text) + len(m.name) + len(m.tool_call_id) for m in messages) <= _SMALL_CHARS
        and sum(len(message.parts) for message in messages) <= _SMALL_PARTS
        and not any(message.tool_calls for message in messages)
    )


def _seconds(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> float:
    """Estimate how long it takes to check, render and tokenize a conversation."""
    chars = sum(len(m.text) + len(m.name) + len(m.tool_call_id) for m in messages)
    chars += sum(len(call.arguments_json) for m in messages for call in m.tool_calls)
    chars += sum(len(tool.description) + len(tool.parameters_json_schema) for tool in tools)
    schemas_s = sum(schema_seconds(tool.parameters_json_schema) for tool in tools)
    return chars * SECONDS_PER_CHAR + len(messages) * _SECONDS_PER_MESSAGE + schemas_s
