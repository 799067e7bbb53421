"""Images and videos through the client library, with and without asyncio, over a real socket."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import PIL.Image
import pytest

from millstream.v1 import processor_pb2_grpc
from millstream_client import (
    NO_RETRY,
    DeadlineExceededError,
    Image,
    InvalidRequestError,
    MediaFileError,
    RequestCancelledError,
    Retry,
    UnauthenticatedError,
    Video,
    assistant,
    user,
)
from millstream_client.writing import INLINE_BYTES, Upload
from millstream_testing.fake_processor import FakeProcessor, FakeServer
from millstream_testing.waiting import until
from tests.support.clients.clients import KINDS, Kind
from tests.support.media import media_files
from tests.support.media.media_suite import media_suite
from tests.support.models.vision_models import make_vision_model

MIB = 1 << 20
SMALL = b"small picture"
LARGE = bytes(range(256)) * (MIB * 5 // 2 // 256)
QUICK = Retry(first_pause_s=0.01)

both = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer() as running:
        yield running


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model") / "qwen", "qwen2_5_vl")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "small.png").write_bytes(SMALL)
    (tmp_path / "large.mp4").write_bytes(LARGE)
    return tmp_path


# ---- a question


@both
async def test_small_files_go_in_the_message(server: FakeServer, files: Path, kind: Kind) -> None:
    async with kind.connect(server.address) as client:
        stream = client.chat("What is it?", image=files / "small.png", images=[b"two"])
        answer = await kind.run(stream.answer)
    assert answer.text == "You said: <image of 13 bytes><image of 3 bytes>What is it?"
    assert answer.usage.media_tokens == 8
    assert server.processor.files == [[SMALL, b"two"]]
    assert server.processor.chunks == []


@both
async def test_large_files_go_ahead_in_chunks(server: FakeServer, files: Path, kind: Kind) -> None:
    content = ["Which of", Image(SMALL), "and", Video(files / "large.mp4"), Image(LARGE), "?"]
    async with kind.connect(server.address) as client:
        answer = await kind.run(client.chat(content).answer)
    shown = f"Which of<image of 13 bytes>and<video of {len(LARGE)} bytes><image of {len(LARGE)} "
    assert answer.text == f"You said: {shown}bytes>?"
    assert server.processor.files == [[SMALL, LARGE, LARGE]]
    chunks = server.processor.chunks
    assert [chunk.total_bytes for chunk in chunks] == [len(LARGE), 0, 0] * 2
    assert len({chunk.upload_id for chunk in chunks}) == 2


@both
async def test_urls_are_passed_on(server: FakeServer, kind: Kind) -> None:
    async with kind.connect(server.address) as client:
        stream = client.chat("?", images=["https://x/a.png"], video="data:video/mp4;base64,AA==")
        await kind.run(stream.answer)
    assert server.processor.files == [["https://x/a.png", "data:video/mp4;base64,AA=="]]


@both
async def test_a_question_that_is_sent_again_sends_its_files_again(
    server: FakeServer, kind: Kind
) -> None:
    server.processor.unavailable_turns = 2
    async with kind.connect(server.address, retry=QUICK) as client:
        answer = await kind.run(client.chat("hi", image=LARGE).answer)
    assert answer.text == f"You said: <image of {len(LARGE)} bytes>hi"
    assert server.processor.files == [[LARGE]] * 3
    assert len({chunk.upload_id for chunk in server.processor.chunks}) == 3


# ---- conversations


@both
async def test_a_conversation_on_a_new_stream_has_its_files_again(
    server: FakeServer, files: Path, kind: Kind
) -> None:
    video = files / "large.mp4"
    async with kind.connect(server.address) as client:
        before = [user("What is it?", Image(b"first")), assistant("A cat.")]
        conversation = client.conversation(before)
        await kind.run(conversation.say("And this?", video=video).answer)
        video.unlink()
        second = await kind.run(conversation.say(["Now", Image(SMALL)]).answer)
        assert (second.turn, server.processor.streams) == (2, 1)
        conversation.abort()
        third = await kind.run(conversation.say("context").answer)
        assert third.text == (
            "user=What is it?<image of 5 bytes>|assistant=A cat.|"
            f"user=<video of {len(LARGE)} bytes>And this?|"
            f"assistant=You said: <video of {len(LARGE)} bytes>And this?|"
            "user=Now<image of 13 bytes>|assistant=You said: Now<image of 13 bytes>|user=context"
        )
        assert server.processor.files == [[b"first", LARGE, SMALL]] * 2
        assert conversation.messages[2].content[0].video.data == LARGE
        await kind.run(conversation.close)


@both
async def test_a_conversation_moves_to_another_server_with_its_files(kind: Kind) -> None:
    async with FakeServer() as before, kind.connect(before.address, retry=QUICK) as client:
        conversation = client.conversation()
        await kind.run(conversation.say("one", image=LARGE).answer)
        await before.stop()
        async with FakeServer(before.address) as after:
            answer = await kind.run(conversation.say("two", image=SMALL).answer)
            assert (answer.turn, answer.text) == (1, "You said: <image of 13 bytes>two")
            assert after.processor.files[-1] == [LARGE, SMALL]
            await kind.run(conversation.close)


@both
async def test_a_cancel_while_files_are_sent_ends_the_turn(server: FakeServer, kind: Kind) -> None:
    async with kind.connect(server.address) as client:
        conversation = client.conversation()
        await kind.run(conversation.say("one").answer)
        server.processor.reads.clear()
        video = Video(bytes(64 * MIB))
        running = asyncio.ensure_future(kind.failure(conversation.say("two", video=video).answer))
        await until(lambda: len(kind.running(client)) == 1)
        await kind.run(conversation.cancel)
        assert type(await running) is RequestCancelledError
        server.processor.reads.set()
        assert (await kind.run(conversation.say("context").answer)).text == (
            "user=one|assistant=You said: one|user=context"
        )
        await kind.run(conversation.close)


# ---- limits and failures


@both
async def test_a_server_that_does_not_read_stops_the_upload(
    server: FakeServer, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    chunks = Upload.chunks

    def counted(upload: Upload, message: Any) -> Iterator[Any]:
        nonlocal made
        for chunk in chunks(upload, message):
            made += 1
            yield chunk

    monkeypatch.setattr(Upload, "chunks", counted)
    server.processor.reads.clear()
    async with kind.connect(server.address) as client:
        stream = client.chat("hi", video=bytes(100 * MIB))
        running = asyncio.ensure_future(kind.run(stream.answer))
        await until(lambda: made > 0)
        for _ in range(30):  # time in which much more could be sent
            await kind.run(client.models)
        assert made < 50
        server.processor.reads.set()
        await running
    assert made == 100


@both
async def test_the_time_limit_holds_while_files_are_sent(server: FakeServer, kind: Kind) -> None:
    server.processor.reads.clear()
    video = Video(bytes(64 * MIB))
    async with kind.connect(server.address) as client:
        failed = await kind.failure(client.chat("hi", video=video, timeout_s=0.3).answer)
        assert type(failed) is DeadlineExceededError
        conversation = client.conversation()
        failed = await kind.failure(conversation.say("hi", video=video, timeout_s=0.3).answer)
        assert type(failed) is DeadlineExceededError


class _Refusing(FakeProcessor):
    """Refuses in the middle of an upload; in threads, so that its status comes during a write."""

    def Chat(self, request_iterator: Any, context: Any) -> Any:
        next(request_iterator)
        next(request_iterator)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")


@both
async def test_a_refusal_in_the_middle_of_an_upload_is_understood(kind: Kind) -> None:
    """A bare grpc.aio write would replace it by INTERNAL, nearly each time (grpc issue 36066)."""
    server = grpc.server(ThreadPoolExecutor(2))
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(_Refusing(), server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    video = Video(bytes(16 * MIB))
    try:
        async with kind.connect(f"127.0.0.1:{port}", retry=NO_RETRY) as client:
            for _ in range(5):
                for ask in (client.chat, client.conversation().say):
                    failed = await kind.failure(ask("hi", video=video).answer)
                    assert (type(failed), failed.message) == (UnauthenticatedError, "no key")
    finally:
        server.stop(0).wait()


@both
async def test_a_file_that_is_too_large_for_the_server_is_a_sentence(
    server: FakeServer, kind: Kind
) -> None:
    server.processor.most_upload_bytes = 3 * MIB
    async with kind.connect(server.address) as client:
        failed = await kind.failure(client.chat("hi", images=[LARGE, bytes(8 * MIB)]).answer)
    assert (type(failed), failed.reason) == (InvalidRequestError, "INVALID_REQUEST")
    assert failed.message == "the file has 8388608 bytes; at most 3145728 are allowed"
    assert server.processor.streams == 1


@both
async def test_a_file_that_is_missing_costs_the_turn_and_not_the_stream(
    server: FakeServer, files: Path, kind: Kind
) -> None:
    sentence = f"{files}/no.png can't be sent: there is no such file"
    async with kind.connect(server.address) as client:
        failed = await kind.failure(client.chat("hi", image=files / "no.png").answer)
        assert (type(failed), failed.message) == (MediaFileError, sentence)
        assert server.processor.streams == 0
        conversation = client.conversation()
        await kind.run(conversation.say("one").answer)
        failed = await kind.failure(conversation.say("two", image=f"{files}/no.png").answer)
        assert (type(failed), failed.message) == (MediaFileError, sentence)
        assert (await kind.run(conversation.say("three").answer)).turn == 2
        assert server.processor.streams == 1
        assert len(conversation.messages) == 4
        await kind.run(conversation.close)


@both
async def test_a_model_that_takes_no_images_says_so(server: FakeServer, kind: Kind) -> None:
    async with kind.connect(server.address) as client:
        failed = await kind.failure(client.chat("blind", image=SMALL).answer)
    assert type(failed) is InvalidRequestError
    assert failed.reason == "UNSUPPORTED_FEATURE"
    assert "takes no images" in failed.message


# ---- a real Processor


@both
async def test_a_real_processor_takes_what_the_client_sends(
    vision_model: Path, tmp_path: Path, kind: Kind
) -> None:
    noise = PIL.Image.frombytes("RGB", (700, 700), random.Random(0).randbytes(3 * 700 * 700))
    noise.save(tmp_path / "noise.png")
    small = media_files.solid(size=(56, 56))
    assert (tmp_path / "noise.png").stat().st_size > INLINE_BYTES
    async with media_suite(vision_model) as suite, kind.connect(suite.front.address) as client:
        conversation = client.conversation(max_new_tokens=4)
        first = await kind.run(conversation.say("What?", image=tmp_path / "noise.png").answer)
        second = await kind.run(conversation.say(["And", Image(small), "?"]).answer)
        assert (first.usage.media_tokens, second.usage.media_tokens) == (25 * 25, 25 * 25 + 4)
        conversation.abort()
        third = await kind.run(conversation.say("Again?").answer)
        assert (third.turn, third.usage.media_tokens) == (1, 25 * 25 + 4)
        failed = await kind.failure(client.chat("?", image=b"<svg/>").answer)
        assert failed.violations[0].field == "start.messages[0].content[0].image.data"
        await kind.run(conversation.close)
