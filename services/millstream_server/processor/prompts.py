"""From messages or a raw text to a prompt's token ids: short ones at once, long ones in threads."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

from millstream_server.generation.grammar_shapes import max_bytes, shape_problem
from millstream_server.generation.request import Prompt
from millstream_server.processor.media.core import EncodedPart, media_prompt
from millstream_server.processor.text.messages import (
    ChatMessage,
    ConversationPaths,
    Tool,
    check_messages,
)
from millstream_server.processor.text.template import NO_VARIABLES
from millstream_server.processor.text.tokenizer import SECONDS_PER_CHAR, TextModel
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool, stop_if_gone

_SMALL_CHARS = 1024
_SMALL_MESSAGES = 16
_SMALL_PARTS = 64
_SMALL_PROMPT_CHARS = 4096
"""Of a rendered prompt that is tokenized on the event loop, in about 2 ms."""
_SMALL_GRAMMAR_CHARS = 4096
"""A grammar up to here is read on the event loop, in about 1 ms."""
_CHECKED_AT_ONCE = 1 << 14
_SECONDS_PER_MESSAGE = 20e-6
_SECONDS_PER_GRAMMAR_CHAR = 0.3e-6


class Prompts:
    """Renders and tokenizes; one per process.

    What is short is done on the event loop, which is faster than a thread. All methods raise
    `OverloadedError` if too much text work waits.
    """

    def __init__(self, limits: PoolLimits) -> None:
        """Start no thread before it is needed."""
        self.threads = WorkPool(limits)

    async def of_chat(
        self,
        text: TextModel,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        paths: ConversationPaths,
        variables: Mapping[str, Any] = NO_VARIABLES,
        *,
        most: int | None = None,
    ) -> tuple[str, MutableSequence[int]]:
        """Check a conversation, render the model's template, tokenize: prompt text and ids.

        A prompt that surely has more tokens than ``most`` isn't tokenized.

        Raises:
            InvalidRequestError: it can't be rendered, or is too long.
        """
        if not _is_small(messages, tools):

            def work() -> tuple[str, MutableSequence[int]]:
                prompt = rendered(text, messages, tools, paths, variables)
                _check_length(text, prompt, most, paths.messages)
                return prompt, text.encode(prompt, add_special_tokens=False)

            return await self.threads.run(work, _seconds(messages, tools))
        prompt = rendered(text, messages, tools, paths, variables)
        if len(prompt) <= _SMALL_PROMPT_CHARS:
            return prompt, text.encode(prompt, add_special_tokens=False)
        # The template added much.
        ids = await self.threads.run(
            lambda: text.encode(prompt, add_special_tokens=False), len(prompt) * SECONDS_PER_CHAR
        )
        return prompt, ids

    async def render(
        self,
        text: TextModel,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        paths: ConversationPaths,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Check a conversation with media and render the model's template, without tokenizing.

        Raises:
            InvalidRequestError: it can't be rendered.
        """
        if _is_small(messages, tools):
            return rendered(text, messages, tools, paths, variables)
        return await self.threads.run(
            lambda: rendered(text, messages, tools, paths, variables), _seconds(messages, tools)
        )

    async def with_media(
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
        self, text: TextModel, prompt: str, *, special_tokens: bool, most: int | None = None
    ) -> MutableSequence[int]:
        """Tokenize; of ``most`` see `of_chat`."""
        if len(prompt) <= _SMALL_CHARS:
            return text.encode(prompt, add_special_tokens=special_tokens)

        def work() -> MutableSequence[int]:
            _check_length(text, prompt, most, "text")
            return text.encode(prompt, add_special_tokens=special_tokens)

        return await self.threads.run(work, len(prompt) * SECONDS_PER_CHAR)

    async def detokenize(self, text: TextModel, ids: Sequence[int], *, special_tokens: bool) -> str:
        """Turn token ids into text.

        Raises:
            InvalidRequestError: an id is outside of the vocabulary.
        """

        def work() -> str:
            check_token_ids(ids, text.vocab_size)
            return text.decode(ids, skip_special_tokens=not special_tokens)

        return await self.threads.run(work, text.decode_seconds(len(ids)))

    async def read_grammar(self, sampling: Mapping[str, Any]) -> None:
        """Check a long grammar's shape in a thread; `check_request` finds the result."""
        constraint = sampling.get("constraint")
        if constraint is not None and _SMALL_GRAMMAR_CHARS < len(constraint.source) <= max_bytes(
            constraint.kind
        ):
            seconds = len(constraint.source) * _SECONDS_PER_GRAMMAR_CHAR
            await self.threads.run(lambda: shape_problem(constraint), seconds)

    def close(self) -> None:
        self.threads.close()


def rendered(
    text: TextModel,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    paths: ConversationPaths,
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> str:
    """Check a conversation and render the model's template, with ``variables`` that it knows.

    Raises:
        InvalidRequestError: it can't be rendered.
    """
    violations = check_messages(messages, tools, paths)
    if violations:
        raise InvalidRequestError.of_all(violations)
    return text.chat_template.render(
        messages, tools, continues=paths.continues, field=paths.messages, variables=variables
    )


def _check_length(text: TextModel, prompt: str, most: int | None, field: str) -> None:
    """Refuse a prompt that surely has too many tokens.

    Raises:
        InvalidRequestError: it has.
    """
    if most is not None and len(prompt) > most and text.floor.exceeds(prompt, most):
        sentence = f"the prompt exceeds the context length of {most} tokens"
        raise InvalidRequestError.of(field, sentence)


def check_token_ids(ids: Sequence[int], vocab_size: int, field: str = "token_ids") -> None:
    """Check that all are in the vocabulary.

    Raises:
        InvalidRequestError: one isn't.
    """
    for start in range(0, len(ids), _CHECKED_AT_ONCE):
        stop_if_gone()
        part = ids[start : start + _CHECKED_AT_ONCE]
        if max(part) >= vocab_size:
            at = start + next(i for i, token in enumerate(part) if token >= vocab_size)
            raise InvalidRequestError.of(
                f"{field}[{at}]", f"must be below the vocabulary's size, {vocab_size}"
            )


def _is_small(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> bool:
    """Return whether the work is so short that a thread would not be worth it."""
    if tools or len(messages) > _SMALL_MESSAGES:
        return False
    chars = parts = 0
    for message in messages:
        if message.tool_calls:
            return False
        # Templates may print ids and names too.
        chars += len(message.text) + len(message.name) + len(message.tool_call_id)
        chars += len(message.reasoning)
        parts += len(message.parts)
    return chars <= _SMALL_CHARS and parts <= _SMALL_PARTS


def _seconds(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> float:
    """Estimate how long it takes to check, render and tokenize a conversation."""
    chars = sum(
        len(m.text) + len(m.reasoning) + len(m.name) + len(m.tool_call_id) for m in messages
    )
    chars += sum(len(call.arguments_json) for m in messages for call in m.tool_calls)
    chars += sum(len(tool.description) + len(tool.parameters_json_schema) for tool in tools)
    return chars * SECONDS_PER_CHAR + len(messages) * _SECONDS_PER_MESSAGE
