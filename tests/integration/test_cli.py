"""The command line against a Processor, each a process of its own, over a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream_testing.fake_processor import FakeServer
from millstream_testing.in_process import worker
from tests.support.processes.command_line import Terminal, millstream, without_reader
from tests.support.worker.scripted_admin import control


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer() as running:
        yield running


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "cat.png").write_bytes(b"cat")
    (tmp_path / "my dog.png").write_bytes(b"a dog")
    return tmp_path


# ---- chat --once, complete, models


async def test_once_prints_the_answer_and_nothing_else(server: FakeServer) -> None:
    done = await millstream("chat", "--address", server.address, "--once", "all is well")
    assert (done.code, done.out, done.err) == (0, "You said: all is well\n", "")


async def test_a_question_needs_no_flag_and_no_quotes(server: FakeServer) -> None:
    done = await millstream("chat", "all", "is", "well", "--address", server.address)
    assert (done.code, done.out, done.err) == (0, "You said: all is well\n", "")
    piped = await millstream("chat", "-", "--address", server.address, stdin="hi")
    assert (piped.code, piped.out) == (0, "You said: hi\n")
    twice = await millstream("chat", "a", "--once", "b", "--address", server.address)
    assert (twice.code, twice.out) == (2, "")


async def test_the_address_may_be_in_the_environment(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_ADDRESS", server.address)
    for command in (["chat", "hi"], ["models"], ["health"], ["complete", "x"]):
        assert (await millstream(*command)).code == 0
    for command in (["health", "--address", "127.0.0.1:1"], ["health", "127.0.0.1:1"]):
        done = await millstream(*command)
        assert (done.code, done.out.partition(" ")[0]) == (1, "127.0.0.1:1:")


async def test_once_shows_usage_when_asked_to(server: FakeServer) -> None:
    done = await millstream("chat", "--address", server.address, "--once", "hi", "--show-usage")
    assert done.out == "You said: hi\n"
    assert "TTFT" in done.err
    assert "3 tokens" in done.err
    assert "0 of 10 prompt tokens cached" in done.err


async def test_once_reads_stdin_and_sends_the_system_message(server: FakeServer) -> None:
    done = await millstream(
        *("chat", "--address", server.address, "--system", "Be short.", "--once", "-"),
        stdin="context",
    )
    assert done.out == "system=Be short.|user=context\n"


async def test_once_with_an_empty_text_is_an_error(server: FakeServer) -> None:
    done = await millstream("chat", "--address", server.address, "--once", "-", stdin=" \n")
    assert done.code == 1
    assert "the text is empty" in done.err
    assert server.processor.streams == 0


async def test_sampling_flags_arrive_and_absent_ones_stay_unset(server: FakeServer) -> None:
    done = await millstream(
        *("chat", "--address", server.address, "--once", "options", "--temperature", "0"),
        *("--top-k", "5", "--seed", "0", "--max-new-tokens", "7", "--stop", "a", "--stop", "b"),
    )
    assert done.out == "max_new_tokens=7 seed=0 temperature=0 top_k=5 stop=a,b\n"


async def test_complete_streams_the_continuation(server: FakeServer) -> None:
    done = await millstream(
        *("complete", "-", "--address", server.address, "--model", "fake", "--show-usage"),
        stdin="wheels turn",
    )
    assert (done.code, done.out) == (0, " and so on\n")
    assert "cut off at the token limit" in done.err
    (request,) = server.processor.completions
    assert (request.model, request.text) == ("fake", "wheels turn")


async def test_models_lists_models_and_workers(server: FakeServer) -> None:
    done = await millstream("models", "--address", server.address)
    assert done.code == 0
    fake, away = (line for line in done.out.splitlines() if "fake" in line or "away" in line)
    assert "2048 tokens" in fake
    assert "1 prefill, 2 decode" in fake
    assert "text, images, videos" in fake
    assert "no" in away
    assert "images" not in away
    assert "gpt-4o" in fake
    assert "hermes: set by --formats" in fake
    assert "chat, complete" in fake
    listed = await millstream("models", "--address", server.address, "--json")
    first, second = map(json.loads, listed.out.splitlines())
    assert (first["aliases"], first["default_for"]) == (["gpt-4o"], ["chat", "complete"])
    assert first["answer_format"] == {"name": "hermes", "reason": "set by --formats"}
    assert (first["tokenizer"], first["chat_template"]) == ("tokenizer.json", "the checkpoint's")
    assert first["workers"] == {"prefill": 1, "decode": 2}
    assert (second["name"], second["ready"]) == ("away", False)


async def test_once_sends_images_and_videos_in_the_flags_order(
    server: FakeServer, pictures: Path
) -> None:
    done = await millstream(
        *("chat", "--address", server.address, "--once", "What?", "--show-usage"),
        *("--image", "cat.png", "--video", "https://x/v.mp4", "--image", "my dog.png"),
        cwd=pictures,
    )
    assert done.code == 0
    assert done.out == (
        "You said: <image of 3 bytes><video at https://x/v.mp4><image of 5 bytes>What?\n"
    )
    assert "0 of 10 prompt tokens cached · 12 for images and videos" in done.err


# ---- failures


async def test_an_image_that_is_missing_is_told_before_anything_is_sent(server: FakeServer) -> None:
    for more in (["--once", "What?"], []):
        done = await millstream("chat", "--address", server.address, "--image", "no.png", *more)
        assert (done.code, done.out) == (1, "")
        assert done.err == "error: no.png can't be sent: there is no such file\n"
    assert server.processor.streams == 0


async def test_a_model_that_takes_no_images_is_told(server: FakeServer, pictures: Path) -> None:
    done = await millstream(
        *("chat", "--address", server.address, "--once", "blind", "--image", "cat.png"),
        cwd=pictures,
    )
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "error: INVALID_ARGUMENT (UNSUPPORTED_FEATURE): the model fake takes no images;"
        " `millstream models` says what a model takes;"
        " `make up ARGS=--multimodal` starts one that does\n"
    )


async def test_invalid_fields_are_listed(server: FakeServer) -> None:
    done = await millstream("chat", "--address", server.address, "--once", "bad")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines() == [
        "error: INVALID_ARGUMENT (INVALID_REQUEST): two fields are wrong",
        "  --top-p: must be in (0, 1]",
        "  messages[0].role: must be set",
    ]


async def test_a_retry_hint_is_told(server: FakeServer) -> None:
    done = await millstream("complete", "busy", "--address", server.address)
    assert done.code == 1
    assert done.err.splitlines() == [
        "error: RESOURCE_EXHAUSTED (OVERLOADED): no room right now",
        "  try again in 1.5 s",
    ]


async def test_an_error_id_is_told(server: FakeServer) -> None:
    done = await millstream("chat", "--address", server.address, "--once", "internal")
    assert done.code == 1
    assert "error id e-42" in done.err


@pytest.mark.parametrize(
    "command", [["models"], ["complete", "x"], ["chat", "--once", "x"], ["chat"]], ids=" ".join
)
async def test_nobody_there_says_how_to_start_one(command: list[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        done = await millstream(*command, "--address", address)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: no server at {address}; start one with `millstream up`\n"


async def test_a_workers_address_is_said_to_be_one() -> None:
    async with worker() as other:
        done = await millstream("chat", "--once", "x", "--address", other.address)
    assert (done.code, done.out) == (1, "")
    assert "has no ProcessorService; give the Processor's address" in done.err


@pytest.mark.parametrize("command", [["models"], ["complete", "x"], ["chat", "--once", "x"]])
async def test_a_reader_that_left_is_no_traceback(server: FakeServer, command: list[str]) -> None:
    done = await without_reader(*command, "--address", server.address)
    assert (done.code, done.err) == (1, "")


async def test_nor_is_it_for_operations_on_workers() -> None:
    async with control(Undrain=[{}]) as served:
        done = await without_reader("admin", "undrain", "--admin", served.address)
    assert (done.code, done.err) == (1, "")


async def test_ctrl_c_ends_once_with_130(server: FakeServer) -> None:
    async with Terminal(["chat", "--address", server.address, "--once", "slow " * 50]) as terminal:
        await terminal.expect("You said:")
        terminal.type("\x03")
        assert await terminal.ends() == 130


# ---- interactive chat


async def test_a_conversation_is_one_stream(server: FakeServer) -> None:
    async with Terminal(["chat", "--address", server.address, "--system", "S"]) as terminal:
        await terminal.expect("fake, away")
        await terminal.expect(">")
        terminal.type("hello\r")
        await terminal.expect("You said: hello")
        await terminal.expect("0 of 10 prompt tokens cached")
        terminal.type("context\r")
        await terminal.expect("system=S|user=hello|assistant=You said: hello|user=context")
        await terminal.expect("10 of 20 prompt tokens cached")
        terminal.type("/usage\r")
        await terminal.expect("30 prompt tokens (10 cached), 4 answer tokens")
        await terminal.expect(">")
        terminal.type("\x04")
        assert await terminal.ends() == 0
    assert server.processor.streams == 1


async def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(server: FakeServer) -> None:
    async with Terminal(["chat", "--address", server.address]) as terminal:
        await terminal.expect(">")
        terminal.type("slow one two three four five six seven eight nine ten\r")
        await terminal.expect("You said:")
        terminal.type("\x03")
        await terminal.expect("stopped")
        terminal.type("context\r")
        await terminal.expect("|assistant=You said:")
        terminal.type("/quit\r")
        assert await terminal.ends() == 0
    assert (server.processor.streams, server.processor.cancels) == (1, 1)


async def test_ctrl_c_at_the_prompt_does_not_leave(server: FakeServer) -> None:
    async with Terminal(["chat", "--address", server.address]) as terminal:
        await terminal.expect(">")
        terminal.type("half a line\x03")
        await terminal.expect("Ctrl-D or /quit ends the chat")
        terminal.type("still here\r")
        await terminal.expect("You said: still here")


async def test_new_forgets_and_help_helps(server: FakeServer) -> None:
    async with Terminal(["chat", "--address", server.address]) as terminal:
        await terminal.expect(">")
        terminal.type("one\r")
        await terminal.expect("You said: one")
        terminal.type("/new\r")
        await terminal.expect("A new conversation.")
        terminal.type("context\r")
        await terminal.expect("\nuser=context")
        terminal.type("/help\r")
        await terminal.expect("start a new conversation")
        terminal.type("/nothing\r")
        await terminal.expect("no such command")
    assert server.processor.streams == 2


async def test_a_failed_turn_is_explained_and_the_next_one_remembers(server: FakeServer) -> None:
    async with Terminal(["chat", "--address", server.address]) as terminal:
        await terminal.expect(">")
        terminal.type("first\r")
        await terminal.expect("You said: first")
        terminal.type("busy\r")
        await terminal.expect("try again in 1.5 s")
        terminal.type("hang up\r")
        await terminal.expect("this turn is forgotten")
        terminal.type("context\r")
        await terminal.expect("user=first|assistant=You said: first|user=context")
    assert server.processor.streams == 3


async def test_the_chat_survives_a_restart_of_the_server() -> None:
    async with (
        FakeServer() as before,
        Terminal(["chat", "--address", before.address]) as terminal,
    ):
        await terminal.expect(">")
        terminal.type("first\r")
        await terminal.expect("You said: first")
        await terminal.expect("cached")
        await before.stop()
        async with FakeServer(before.address) as after:
            terminal.type("context\r")
            await terminal.expect("user=first|assistant=You said: first|user=context")
            assert after.processor.streams == 1


async def test_twice_ctrl_c_cuts_the_stream(server: FakeServer) -> None:
    async with Terminal(["chat", "--address", server.address]) as terminal:
        await terminal.expect(">")
        terminal.type("deaf " * 100 + "\r")
        await terminal.expect("You said:")
        terminal.type("\x03")
        async with asyncio.timeout(10):
            await server.processor.told_to_cancel.wait()
        terminal.type("\x03")
        await terminal.expect("cut off; this turn is forgotten")
        terminal.type("context\r")
        await terminal.expect("\nuser=context")


async def test_piped_lines_are_turns(server: FakeServer) -> None:
    done = await millstream("chat", "--address", server.address, stdin="one\n\ncontext\n")
    assert done.code == 0
    assert done.out == "You said: one\nuser=one|assistant=You said: one|user=context\n"
    assert "fake, away" in done.err
    assert server.processor.streams == 1


# ---- pictures in a chat


async def test_a_picture_goes_with_the_next_message(server: FakeServer, pictures: Path) -> None:
    args = ["chat", "--address", server.address, "--image", "cat.png"]
    async with Terminal(args, cwd=pictures) as terminal:
        await terminal.expect("[1 image] >")
        terminal.type("/image my")
        await terminal.expect("/image my")
        terminal.type("\t")  # completed by the directory's files
        await terminal.expect(" dog.png")
        terminal.type("\r")
        await terminal.expect("Attached: image my dog.png, 5 bytes. It goes with")
        await terminal.expect("[2 images] >")
        terminal.type("/image\r")
        await terminal.expect("1. image cat.png, 3 bytes")
        await terminal.expect("2. image my dog.png, 5 bytes")
        terminal.type("What?\r")
        await terminal.expect("You said: <image of 3 bytes><image of 5 bytes>What?")
        await terminal.expect("· 8 for images and videos")
        terminal.type("context\r")
        await terminal.expect("|user=context")
        terminal.type("/usage\r")
        await terminal.expect("30 prompt tokens (10 cached, 16 for images and videos)")
    assert server.processor.streams == 1


async def test_an_overloaded_server_leaves_the_picture_attached(
    server: FakeServer, pictures: Path
) -> None:
    server.processor.unavailable_turns = 1
    async with Terminal(["chat", "--address", server.address], cwd=pictures) as terminal:
        await terminal.expect(">")
        terminal.type("/image nothing.png\r")
        await terminal.expect("error: nothing.png can't be sent: there is no such file")
        terminal.type("/image 'cat.png'\r")
        await terminal.expect("[1 image] >")
        terminal.type("one\r")
        await terminal.expect("UNAVAILABLE")
        await terminal.expect("[1 image] >")
        terminal.type("blind\r")
        await terminal.expect("the model fake takes no images")
        terminal.type("context\r")
        await terminal.expect("\nuser=context")
