"""The synchronous client with threads, Ctrl-C, forks and the exit of the interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from millstream.v1 import processor_pb2
from millstream_client import RequestCancelledError, SyncClient, background
from millstream_testing.waiting import until
from tests.support.clients.clients import Kind
from tests.support.processor.scripted import Part, Scripted, hang, serving, text

SOON_S = 10.0
MANY = 500
"""More messages than the client reads ahead, and gRPC's windows on a fast loopback."""

sync = Kind(SyncClient)


def running() -> background._LoopThread | None:
    """Return the thread that new clients join."""
    return background._LoopThread.running


@contextlib.asynccontextmanager
async def program(address: str, code: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run code that has a ``client``; warnings are errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c"),
        "from millstream_client import SyncClient\n"
        f"address = {address!r}\nclient = SyncClient(address)\n" + textwrap.dedent(code),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def said(process: asyncio.subprocess.Process) -> str:
    """Wait for a program's good end; returns what it printed."""
    out, err = await asyncio.wait_for(process.communicate(), SOON_S)
    assert (process.returncode, err.decode()) == (0, "")
    return out.decode()


@pytest.mark.parametrize(
    "wait",
    [
        "next(stream)",
        "client.conversation().say('hi').answer()",
        "client.models()",
    ],
)
async def test_ctrl_c_ends_a_wait_and_its_call(wait: str) -> None:
    waits: list[list[Part]] = [] if wait == "next(stream)" else [[hang]]
    script = Scripted([text("A"), hang], *waits, [text("B")])
    code = f"""
        import signal
        # A test run in a shell's background ignores SIGINT, and so would this.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stream = client.chat("hi")
        assert next(stream).text == "A"
        try:
            print("reading", flush=True)
            {wait}
        except KeyboardInterrupt:
            print("interrupted")
        stream.close()
        print(client.chat("again").answer().text)
        """
    async with serving(script) as address, program(address, code) as process:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"reading\n"
        await until(lambda: len(script.turns) == 1)
        process.send_signal(signal.SIGINT)
        assert await said(process) == "interrupted\nB\n"
        await until(lambda: script.open == 0)


@pytest.mark.parametrize(
    "code",
    [
        "stream = client.chat('hi'); next(stream)",
        """
        import threading
        stream = client.chat('hi')
        next(stream)
        threading.Thread(target=stream.answer, daemon=True).start()
        """,
        """
        import sys
        class Owner:
            def __del__(self):
                client.close()
        sys.owner = Owner()
        next(client.chat('hi'))
        """,
        "next(client.conversation().say('hi'))",
        "import atexit; atexit.register(client.close); stream = client.chat('hi'); next(stream)",
    ],
    ids=["a stream", "a daemon thread", "closed in a finalizer", "a turn", "closed at exit"],
)
async def test_a_program_ends_with_what_it_left_open(code: str) -> None:
    script = Scripted([text("A"), hang])
    async with serving(script) as address, program(address, code) as process:
        assert await said(process) == ""
        await until(lambda: script.open == 0)


async def test_a_fork_is_told() -> None:
    code = """
        import os
        assert client.chat("hi").answer().text == "A"
        stream = client.chat("hi")
        if not os.fork():
            for call in (client.models, stream.answer, SyncClient("127.0.0.1:1").models):
                try:
                    call()
                except RuntimeError as error:
                    print(str(error).partition(",")[0], flush=True)
            client.close()
            os._exit(0)
        os.wait()
        print(stream.answer().text)
        """
    script = Scripted([text("A")], [text("B")])
    async with serving(script) as address, program(address, code) as process:
        out, _ = await asyncio.wait_for(process.communicate(), SOON_S)  # gRPC logs a fork
        told = "this process was forked while a SyncClient was in use\n"
        assert (process.returncode, out.decode()) == (0, 3 * told + "B\n")


async def test_a_fork_after_the_last_client_was_closed_is_none_of_its_business() -> None:
    code = """
        import os
        assert client.chat("hi").answer().text == "A"
        client.close()
        if not os.fork():
            with SyncClient(address) as client:
                print(client.chat("hi").answer().text, flush=True)
            os._exit(0)
        os.wait()
        """
    script = Scripted([text("A")], [text("B")])
    async with serving(script) as address, program(address, code) as process:
        assert await said(process) == "B\n"


async def test_it_works_in_a_thread_that_runs_a_loop() -> None:
    code = """
        import asyncio
        async def main():
            return client.chat("hi").answer().text
        print(asyncio.run(main()))
        client.close()
        """
    async with serving(Scripted([text("A")])) as address, program(address, code) as process:
        assert await said(process) == "A\n"


async def test_threads_share_a_client() -> None:
    def read(client: SyncClient, number: int) -> tuple[str, list[int]]:
        counted = client.tokenize(f"{number:3}")
        stream = client.chat(str(number))
        return "".join(delta.text for delta in stream), list(counted.token_ids)

    threads = 16
    script = Scripted(*[[text(f"{part} ") for part in range(50)] for _ in range(threads)])
    async with serving(script) as address, sync.connect(address) as client:
        answers = await asyncio.gather(
            *(asyncio.to_thread(read, client, number) for number in range(threads))
        )
    words = "".join(f"{part} " for part in range(50))
    assert answers == [(words, list(f"{number:3}".encode())) for number in range(threads)]


class _Counting(Scripted):
    """Streams numbers, and counts those that went out."""

    sent = 0

    async def Chat(self, request_iterator: Any, context: Any) -> Any:
        async for request in request_iterator:
            self.asked.append(request)
            for number in range(MANY):
                delta = processor_pb2.ChoiceDelta(text=f"{number} {'x' * 100_000}\n", token_count=1)
                yield processor_pb2.ChatResponse(turn=1, choices=[delta])
                self.sent += 1
            yield processor_pb2.ChatResponse(turn=1, finished=processor_pb2.TurnFinished())


async def test_a_slow_reader_gets_all_and_holds_back_the_server() -> None:
    script = _Counting()
    async with serving(script) as address, sync.connect(address) as client:
        stream = client.chat("hi")
        texts = [(await sync.next(stream)).text]
        before = -1
        while script.sent > before:  # until the server waits
            before = script.sent
            await asyncio.sleep(0.1)
        assert script.sent < MANY
        assert stream.result.text == texts[0]  # what was read, not what was read ahead
        texts += [delta.text for delta in await asyncio.to_thread(list, stream)]
        assert [int(line.split()[0]) for line in texts] == list(range(MANY))
        assert stream.result.text == "".join(texts)
        assert stream.result.complete


async def test_a_slow_reader_of_a_closed_client_is_told() -> None:
    script = _Counting()
    async with serving(script) as address, sync.connect(address) as client:
        stream = client.chat("hi", request_id="mine")
        await sync.next(stream)
        await sync.run(client.close)
        failed = await sync.failure(stream.answer)
        assert type(failed) is RequestCancelledError
        assert (failed.message, failed.request_id) == ("the client was closed", "mine")
        assert failed.partial is stream.result
        assert 0 < failed.partial.choices[0].token_count < MANY


async def test_a_stream_keeps_the_client_that_nobody_else_refers_to() -> None:
    def read(address: str) -> str:
        return "".join(delta.text for delta in SyncClient(address).chat("hi"))

    script = Scripted([text(f"{part} ") for part in range(100)])
    async with serving(script) as address:
        assert (await asyncio.to_thread(read, address)).split() == [str(n) for n in range(100)]
        await until(lambda: script.open == 0)


@pytest.mark.parametrize("leave", ["drop", "close"])
async def test_the_next_turn_may_follow_one_that_was_left(leave: str) -> None:
    def talk(address: str) -> list[str]:
        with SyncClient(address) as client:
            conversation = client.conversation()
            stream = conversation.say("one")
            next(stream)
            if leave == "close":
                stream.close()
            del stream
            return [conversation.say("two").answer().text, *map(str, conversation.messages)]

    script = Scripted([text("A"), hang], [text("B")])
    async with serving(script) as address:
        answer, *messages = await asyncio.to_thread(talk, address)
        assert answer == "B"
        assert len(messages) == 2
        await until(lambda: script.open == 0)


async def test_the_thread_ends_with_the_last_client() -> None:
    def threads() -> int:
        return sum(thread.name == "millstream-client" for thread in threading.enumerate())

    async with serving(Scripted([], [], [], [])) as address:
        async with sync.connect(address) as first:
            assert threads() == 0
            await sync.run(first.models)
            async with sync.connect(address) as second:
                await sync.run(second.models)
                assert threads() == 1
            assert threads() == 1
            await sync.run(first.models)
        assert threads() == 0
        dropped = sync.make(address)
        await sync.run(dropped.models)
        assert threads() == 1
        del dropped
        await until(lambda: threads() == 0)


async def test_a_client_may_be_closed_in_the_thread_of_the_one_before() -> None:
    """It mustn't wait for the thread that it is in."""
    before, after = SyncClient("127.0.0.1:1"), SyncClient("127.0.0.1:1")
    goes_on = asyncio.Event()
    before._background.submit(goes_on.wait())
    closing = asyncio.create_task(asyncio.to_thread(before.close))
    await until(lambda: before._background._thread is None and running() is None)

    async def close() -> None:
        after.close()

    await asyncio.wait_for(asyncio.wrap_future(after._background.submit(close())), 3)
    background._LoopThread._loops[os.getpid()].call_soon_threadsafe(goes_on.set)
    await closing


async def test_the_channel_of_a_synchronous_client_is_synchronous() -> None:
    async with serving(Scripted([])) as address, sync.connect(address) as client:
        assert isinstance(client.channel, grpc.Channel)
        request = processor_pb2.ListModelsRequest()
        response = await sync.run(client.stub.ListModels, request, metadata=client.metadata())
        assert response == processor_pb2.ListModelsResponse()
