"""Files and clients that mean harm, beside a chat that must keep its pace; real processes."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from PIL import Image

from millstream.v1 import chat_pb2, media_pb2
from millstream_server.processor.media.uploads import IDLE_S
from millstream_testing.waiting import until
from tests.support.media.media_files import png_header, repeated_frame, solid, video
from tests.support.media.media_processes import MediaProcesses, decoders_of, metric, upload
from tests.support.media.media_suite import chunk, image, user
from tests.support.media.media_suite import video as video_part
from tests.support.media.paces import paced_chat
from tests.support.models.vision_models import make_vision_model
from tests.support.processes.processes import rss_mb
from tests.support.processor.chats import Conversation, options, start
from tests.support.wire.failures import Failure, failure

INVALID = grpc.StatusCode.INVALID_ARGUMENT
BOUND_S = 30.0
"""Until the last of all is refused, on a busy machine."""
ROUNDS = 3
QUIET_TOKENS = 200


@dataclass(frozen=True)
class Harm:
    """What a client sends, and what it is told."""

    part: chat_pb2.ContentPart
    sentence: str
    film: bytes = b""
    """Goes ahead of it, in chunks."""


def bomb() -> bytes:
    """Make a PNG of 12 kB that decodes to 100 million pixels."""
    file = io.BytesIO()
    Image.new("1", (20_000, 5_000)).save(file, "PNG")
    return file.getvalue()


def harms() -> dict[str, Harm]:
    whole = solid("PNG", (600, 400))
    jpeg = solid("JPEG", (600, 400))
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    film = video(12)
    return {
        "bomb": Harm(image(bomb()), "100000000 pixels"),
        "header": Harm(image(png_header(20_000, 20_000)), "400000000 pixels"),
        "truncated PNG": Harm(image(whole[:-40]), "truncated"),
        "truncated JPEG": Harm(image(jpeg[: len(jpeg) // 2]), "truncated"),
        "many frames": Harm(
            chat_pb2.ContentPart(video=media_pb2.Media(upload_id="film")),
            "100000 frames",
            repeated_frame(100_000),
        ),
        "truncated video": Harm(video_part(film[: len(film) // 2]), "damaged"),
        "no image": Harm(image(bytes(1000)), "PNG, JPEG, WebP and GIF"),
        "SVG": Harm(image(svg), "SVG"),
        "file URL": Harm(image(url="file:///etc/passwd"), "scheme file"),
        "http URL": Harm(image(url="http://169.254.169.254/"), "--fetch-urls"),
        "data URL": Harm(image(url="data:image/png;base64,%%%%"), "base64"),
        "no upload": Harm(image(upload_id="x"), "names no upload"),
    }


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaProcesses]:
    folder = tmp_path_factory.mktemp("suite")
    suite = MediaProcesses(folder, make_vision_model(folder / "qwen", "qwen2_5_vl"))
    suite.add_encode()
    suite.add_decode()
    suite.add_processor()
    with suite.running():
        yield suite


async def _refused(chat: Conversation) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await chat.answer()
    return failure(raised.value)


async def _harm(stub: Any, harm: Harm) -> None:
    chat = Conversation(stub)
    await chat.say(*upload("film", harm.film))
    await chat.say(start(messages=[user("What is this? ", harm.part)], opts=options(4)))
    refused = await _refused(chat)
    assert refused.code is INVALID, refused
    assert harm.sentence in refused.message
    (field,) = refused.fields
    assert field.startswith("start.messages[0].content[1]")


async def _drip(stub: Any) -> float:
    """Send a byte now and then of a file that is never complete; return how long that went."""
    chat, began = Conversation(stub), time.monotonic()
    refused = asyncio.ensure_future(_refused(chat))
    while not refused.done():
        await chat.say(chunk("slow", b"x", 1 << 20))
        await asyncio.wait([refused], timeout=0.2)
    found = await refused
    assert found.code is grpc.StatusCode.UNAVAILABLE
    assert "less than 32768 a second" in found.message
    return time.monotonic() - began


async def test_harm_is_refused_and_the_neighbour_keeps_its_pace(suite: MediaProcesses) -> None:
    encode, processor = suite.services["encode"], suite.services["processor"]
    async with suite.client() as stub, suite.client() as hostile:
        found = harms()
        for harm in found.values():
            await _harm(hostile, harm)  # each alone: which of them, if one isn't refused
        before_mb = {name: rss_mb(s.pid) for name, s in suite.services.items()}
        async with paced_chat(stub) as quiet:
            await until(lambda: len(quiet.gaps_s) >= QUIET_TOKENS)
        async with paced_chat(stub) as pace:
            began = time.monotonic()
            all_of_it = [_harm(hostile, harm) for _ in range(ROUNDS) for harm in found.values()]
            drips = [_drip(hostile) for _ in range(20)]
            _, dripped = await asyncio.gather(asyncio.gather(*all_of_it), asyncio.gather(*drips))
            assert time.monotonic() - began < BOUND_S
            assert min(dripped) >= IDLE_S
        assert len(pace.gaps_s) > QUIET_TOKENS / 2
        assert pace.p99_s < max(0.15, 4 * quiet.p99_s), (pace.p99_s, quiet.p99_s)
        for name, service in suite.services.items():
            assert rss_mb(service.pid) < before_mb[name] + 64, name
        assert len(decoders_of(encode.pid)) <= 2

        async def free() -> bool:
            return await metric(processor, "millstream_media_bytes") == 0

        await until(free)
