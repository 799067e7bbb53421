"""`millstream chat`: talk to a model, streaming."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Protocol

from prompt_toolkit import PromptSession

from millstream_client import (
    Client,
    Conversation,
    IncompleteAnswerError,
    MillstreamError,
    RequestCancelledError,
    Usage,
)
from millstream_server.cli.answers import Stopwatch, dim, show, write_stats, write_text
from millstream_server.cli.client import call_processor, print_error
from millstream_server.cli.sampling import generation_options

HELP = """\
/new    start a new conversation
/usage  tokens used in this conversation
/help   this list
/quit   leave (also Ctrl-D)
Ctrl-C  stop the answer and keep the conversation; twice: cut it off"""


def run(args: argparse.Namespace) -> int:
    """Chat until the user leaves, or answer once; answers the exit code."""
    if args.once is None:
        return asyncio.run(call_processor(args.address, lambda client: _interactive(client, args)))
    text = sys.stdin.read() if args.once == "-" else args.once
    if not text.strip():
        print("error: there is nothing to ask: the text is empty", file=sys.stderr)
        return 1
    return asyncio.run(call_processor(args.address, lambda client: _once(client, args, text)))


async def _once(client: Client, args: argparse.Namespace, text: str) -> int:
    """Ask one question."""
    options = generation_options(args)
    stream = client.chat(
        text,
        system=args.system,
        model=args.model,
        sampling=options.sampling,
        stop=options.stop,
    )
    await show(stream, always_stats=args.show_usage)
    return 0


class _Input(Protocol):
    """Where the user's lines come from."""

    async def read(self) -> str:
        """Answer the next line.

        Raises:
            EOFError: there are no more.
        """


class _Keyboard:
    """Lines edited at a terminal, with history."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession()

    async def read(self) -> str:
        while True:
            try:
                return await self._session.prompt_async("> ")
            except KeyboardInterrupt:
                print(dim("Ctrl-D or /quit leaves.", sys.stdout))


class _Pipe:
    """Lines from a file or a pipe: each is a turn."""

    async def read(self) -> str:
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError
        return line


async def _interactive(client: Client, args: argparse.Namespace) -> int:
    source: _Input = _Keyboard() if sys.stdin.isatty() else _Pipe()
    served = ", ".join(model.name for model in await client.models()) or "no model yet"
    print(f"Millstream at {args.address}: {args.model or served}.")
    print(dim("/help lists commands; Ctrl-C stops an answer; Ctrl-D leaves.", sys.stdout))
    await _Chat(client, args, source).run()
    return 0


class _Chat:
    """The loop of an interactive chat."""

    def __init__(self, client: Client, args: argparse.Namespace, source: _Input) -> None:
        self._client = client
        self._args = args
        self._source = source
        self._conversation = self._new_conversation()
        self._usage = Usage()
        self._cancels: set[asyncio.Task[None]] = set()

    def _new_conversation(self) -> Conversation:
        options = generation_options(self._args)
        return self._client.conversation(
            system=self._args.system,
            model=self._args.model,
            sampling=options.sampling,
            stop=options.stop,
        )

    async def run(self) -> None:
        """Read, answer, repeat; a failed turn is explained and the chat goes on."""
        while True:
            try:
                line = (await self._source.read()).strip()
            except EOFError:
                line = "/quit"
            if line == "/quit":
                break
            if line.startswith("/"):
                await self._command(line)
            elif line:
                await self._turn(line)
        await self._conversation.close()

    async def _command(self, line: str) -> None:
        if line == "/new":
            await self._conversation.close()
            self._conversation = self._new_conversation()
            self._usage = Usage()
            print("A new conversation.")
        elif line == "/usage":
            print(
                f"{self._usage.prompt_tokens} prompt tokens "
                f"({self._usage.cached_tokens} cached), "
                f"{self._usage.completion_tokens} answer tokens"
            )
        else:
            print(HELP if line == "/help" else f"{line}: no such command\n{HELP}")

    async def _turn(self, line: str) -> None:
        stream = self._conversation.say(line)
        watch = Stopwatch()
        with self._stopping_on_ctrl_c():
            try:
                async for delta in stream:
                    write_text(watch.add(delta))
                print()
            except RequestCancelledError:
                print("\ncut off; this turn is forgotten", file=sys.stderr)
                return
            except IncompleteAnswerError as error:
                print(f"\n{error.message}; this turn is forgotten", file=sys.stderr)
                return
            except MillstreamError as error:
                write_text("\n" if stream.result.text else "")
                print_error(error, self._args.address)
                return
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            total = getattr(self._usage, name) + getattr(stream.result.usage, name)
            setattr(self._usage, name, total)
        write_stats(watch.stats(stream.result), always=self._args.show_usage)

    @contextlib.contextmanager
    def _stopping_on_ctrl_c(self) -> Iterator[None]:
        """While the model answers, Ctrl-C means the answer, not the program."""
        presses = 0

        def pressed() -> None:
            nonlocal presses
            presses += 1
            if presses > 1:
                self._conversation.hang_up()
                return
            task = loop.create_task(self._conversation.cancel())
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)

        loop = asyncio.get_running_loop()
        before = signal.getsignal(signal.SIGINT)
        loop.add_signal_handler(signal.SIGINT, pressed)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)
