"""Completions whose every token is known, from an undisturbed run of the same prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from millstream.v1 import processor_pb2
from millstream_testing.waiting import EOF
from tests.support.processor.chats import Answer, completion, options
from tests.support.wire.failures import failure

STUCK_S = 120.0
_PROMPTS = 24


@dataclass
class Chat:
    """How one went."""

    prompt: int
    status: str = ""
    wrong: str = ""
    answer: Answer = field(default_factory=Answer)
    silence_s: float = 0.0
    """The longest time without a message."""

    @property
    def tokens(self) -> list[int]:
        return self.answer.choices[0].token_ids if self.answer.choices else []

    @property
    def ways(self) -> list[str]:
        """How it went on at another worker, each time."""
        done = self.answer.finished.redispatches if self.answer.finished else []
        return [processor_pb2.RedispatchWay.Name(each.way).split("_WAY_")[1] for each in done]

    @property
    def went_on_after(self) -> int:
        """How many tokens it had then; 0: none, or it didn't go on elsewhere."""
        done = self.answer.finished.redispatches if self.answer.finished else []
        return max((each.token_count for each in done), default=0)


class KnownChats:
    """Prompts, and what they are answered."""

    def __init__(self, prompt_tokens: int, new_tokens: int) -> None:
        """Make prompts of the same length, no two alike; `learn` comes before all others."""
        self._prompts = [
            [16 + (7 * i + (11 + i) * j) % 1000 for j in range(prompt_tokens)]
            for i in range(_PROMPTS)
        ]
        self._options = options(new_tokens, temperature=0.0, ignore_eos=True, return_token_ids=True)
        self._expected: list[list[int]] = []

    @property
    def known(self) -> bool:
        """Whether `learn` has been called."""
        return bool(self._expected)

    async def learn(self, stub: Any) -> None:
        """Note the answers, while nothing fails."""
        chats = [Chat(i) for i in range(_PROMPTS)]
        await asyncio.gather(*(self._read(stub, chat, lambda: None) for chat in chats))
        assert {chat.status for chat in chats} == {"OK"}, {chat.status for chat in chats}
        self._expected = [chat.tokens for chat in chats]
        distinct = {tuple(tokens) for tokens in self._expected}
        assert len(distinct) == _PROMPTS, "answers that are alike would hide a mistake"

    async def hold(self, stub: Any, number: int, began: Callable[[], None] = lambda: None) -> Chat:
        """Hold one; ``began`` is called when its first token has come."""
        chat = Chat(number % _PROMPTS)
        await self._read(stub, chat, began)
        chat.wrong = self._difference(chat)
        return chat

    async def _read(self, stub: Any, chat: Chat, began: Callable[[], None]) -> None:
        call = stub.Complete(completion(self._prompts[chat.prompt], self._options))
        heard_s = time.monotonic()
        try:
            async with asyncio.timeout(STUCK_S):
                while (response := await call.read()) is not EOF:
                    chat.silence_s = max(chat.silence_s, time.monotonic() - heard_s)
                    heard_s = time.monotonic()
                    had_none = not chat.tokens
                    chat.answer.add(response)
                    if had_none and chat.tokens:
                        began()
            chat.status = "OK" if chat.answer.finished else "OK without an end"
        except TimeoutError:
            chat.status = "STUCK"
        except grpc.aio.AioRpcError as error:
            told = failure(error)
            retryable = "retryable" if told.retryable else "not retryable"
            chat.status = f"{told.code.name} {told.reason}, {retryable}"
        finally:
            call.cancel()

    def _difference(self, chat: Chat) -> str:
        """Say how it differs from the undisturbed answer, or from its beginning if it failed."""
        whole, tokens = self._expected[chat.prompt], chat.tokens
        if tokens != (whole if chat.status == "OK" else whole[: len(tokens)]):
            return f"prompt {chat.prompt}: {tokens} is not (the beginning of) {whole}"
        if chat.answer.finished:
            usage = chat.answer.usage
            counts = usage.prompt_tokens, usage.completion_tokens
            if counts != (len(self._prompts[chat.prompt]), len(tokens)):
                return f"prompt {chat.prompt}: usage says {counts}"
        return ""
