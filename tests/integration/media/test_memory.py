"""Thirty chats with an image of 10 MB each: memory stays within the settings; real processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from millstream_testing.waiting import until
from tests.support.media.media_files import before_end, comment, noise
from tests.support.media.media_processes import (
    CHUNK_BYTES,
    MediaProcesses,
    metric,
    upload,
)
from tests.support.media.media_suite import image, user
from tests.support.models.vision_models import make_vision_model
from tests.support.processes.processes import rss_mb
from tests.support.processes.simulated_suite import channels_to
from tests.support.processes.suite import ServiceProcess
from tests.support.processor.chats import Answer, Conversation, options, start
from tests.support.wire.failures import Failure, failure

CHATS = 30
CHANNELS = 4
SIZE = (1680, 1540)
TOKENS = 60 * 55
MEDIA_MB = 64
"""One file may have an eighth of it."""
STORE_MB = 16
MIB = 1 << 20
KEPT_MB = 80
"""Of free memory that a process may keep for its next files."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaProcesses]:
    folder = tmp_path_factory.mktemp("suite")
    suite = MediaProcesses(folder, make_vision_model(folder / "qwen", "qwen2_5_vl"))
    suite.add_encode(embedding_store_bytes=STORE_MB * MIB)
    suite.add_decode(simulated_step_s=0)
    suite.add_processor(max_open_bytes=MEDIA_MB * MIB)
    with suite.running():
        yield suite


async def ask(stub: Any, picture: bytes, number: int, refused: Counter[str]) -> None:
    """Ask about a picture until there is an answer; count what was said before."""
    while True:
        found = await _attempt(stub, picture, number)
        if isinstance(found, Answer):
            assert found.usage.media_tokens == TOKENS
            return
        assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED, found
        assert found.reason == "OVERLOADED"
        assert found.retry_delay_s is not None
        refused[found.message] += 1
        await asyncio.sleep(found.retry_delay_s)


async def _attempt(stub: Any, picture: bytes, number: int) -> Answer | Failure:
    chat = Conversation(stub)
    message = user("What is this? ", image(upload_id="picture"))
    chunks = upload("picture", picture, comment(str(number)))
    question = start(messages=[message], opts=options(4, ignore_eos=True))
    for request in itertools.chain(chunks, [question]):
        await chat.say(request)
    try:
        await chat.end()
    except grpc.aio.AioRpcError as error:
        return failure(error)
    return chat.answers[0]


@contextlib.asynccontextmanager
async def peaks(services: dict[str, ServiceProcess]) -> AsyncIterator[dict[str, float]]:
    """Look at the services' memory ten times a second; yield the most that each had, in MiB."""
    found = dict.fromkeys(services, 0.0)

    async def look() -> None:
        while True:
            for name, service in services.items():
                found[name] = max(found[name], rss_mb(service.pid))
            await asyncio.sleep(0.1)

    looking = asyncio.ensure_future(look())
    try:
        yield found
    finally:
        looking.cancel()


async def test_thirty_chats_with_large_images_stay_within_the_settings(
    suite: MediaProcesses,
) -> None:
    encode, processor = suite.services["encode"], suite.services["processor"]
    picture = before_end(noise(SIZE))
    refused: Counter[str] = Counter()
    async with suite.client() as stub, channels_to(processor, CHANNELS) as stubs:
        await ask(stub, picture, -1, refused)  # the first one takes what is kept for ever
        before = {name: rss_mb(s.pid) for name, s in suite.services.items()}
        async with peaks(suite.services) as most:
            asks = [ask(stubs[n % CHANNELS], picture, n, refused) for n in range(CHATS)]
            await asyncio.gather(*asks)
        # gRPC's buffer, the message and its field, for a chunk of each stream.
        chunks_mb = 3 * CHATS * CHUNK_BYTES / MIB
        # A bytearray that grows takes an eighth more; when an upload is complete, it is copied.
        bound_mb = MEDIA_MB * 9 / 8 + 2 * len(picture) / MIB + chunks_mb
        assert most["processor"] < before["processor"] + bound_mb
        # Files that come, frames of two that are decoded and two that are prepared, their tensors.
        files_mb = (MEDIA_MB + 4 * 3 * len(picture) / MIB) + STORE_MB
        assert most["encode"] < before["encode"] + files_mb
        assert await metric(encode, "millstream_encode_store_bytes") <= STORE_MB * MIB
        assert await metric(encode, "millstream_encode_lookups_total", result="miss") == CHATS + 1
        assert await metric(processor, "millstream_media_bytes") == 0

        def given_back() -> bool:
            now = {name: rss_mb(s.pid) for name, s in suite.services.items()}
            return all(now[name] < before[name] + KEPT_MB for name in ("encode", "processor"))

        await until(given_back)
    assert sum(refused.values()) > CHATS / 2, "the limit was not reached"
