"""The HTTP door on its own, with real processes: keys, a killed Processor behind it, its drain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.clients.http_api import HI, client
from tests.support.processes.simulated_suite import ALPHABET, SimulatedSuite

LATER = 24
"""Requests that are sent once the Processor was killed."""
TOKENS = 40
SAID = (ALPHABET * 2)[:TOKENS]
KEY = "alice-has-this-key-of-some-length"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedSuite]:
    folder: Path = tmp_path_factory.mktemp("suite")
    keys = folder / "keys"
    keys.write_text(f"alice:{KEY}\n")
    made = SimulatedSuite(folder, {"simulated_step_s": 0.01})
    made.add_worker("worker")
    made.add_processor("processor-1", api_keys_file=keys)
    made.add_processor("processor-2", api_keys_file=keys)
    made.add_door("door")
    with made.running():
        yield made


def _client(suite: SimulatedSuite, key: str = KEY) -> openai.AsyncOpenAI:
    return client(suite.services["door"].address, key, timeout=120)


async def _first(stream: Any) -> str:
    return (await anext(aiter(stream))).choices[0].delta.content or ""


async def _text(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_keys_are_checked_by_the_processors(suite: SimulatedSuite) -> None:
    async with _client(suite) as api:
        answer = await api.chat.completions.create(**HI, max_tokens=3)
    assert answer.choices[0].message.content == ALPHABET[:3]
    async with _client(suite, "another") as api:
        with pytest.raises(openai.AuthenticationError):
            await api.chat.completions.create(**HI, max_tokens=3)


async def test_a_killed_processor_loses_no_new_request(suite: SimulatedSuite) -> None:
    body: Any = {**HI, "max_tokens": TOKENS}
    async with _client(suite) as api:
        streams = [await api.chat.completions.create(**body, stream=True) for _ in range(4)]
        firsts = [await _first(stream) for stream in streams]
        suite.services["processor-1"].kill()
        later = [api.chat.completions.create(**body) for _ in range(LATER)]
        answers = await asyncio.gather(*later)
        rests = await asyncio.gather(*map(_text, streams), return_exceptions=True)
    assert [answer.choices[0].message.content for answer in answers] == [SAID] * LATER
    # Those that ran were divided: the killed one had two, unless they had ended before.
    for first, rest in zip(firsts, rests, strict=True):
        assert isinstance(rest, openai.APIError) or f"{first}{rest}" == SAID, rests
    assert sum(isinstance(rest, openai.APIError) for rest in rests) <= 2, rests


async def test_a_drain_lets_answers_end(suite: SimulatedSuite) -> None:
    door = suite.services["door"]
    async with _client(suite) as api:
        stream = await api.chat.completions.create(**HI, max_tokens=TOKENS, stream=True)
        first = await _first(stream)
        door.terminate()
        assert first + await _text(stream) == SAID
    assert await asyncio.to_thread(door.stop, 60) == 0
