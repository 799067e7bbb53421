"""`millstream chat` and `millstream complete`: answers stream."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from prompt_toolkit import PromptSession

from millstream_client import (
    AnswerStream,
    Client,
    Conversation,
    Function,
    GenerationUsage,
    Image,
    IncompleteAnswerError,
    MediaFileError,
    MillstreamError,
    RequestCancelledError,
    ToolRun,
    Video,
)
from millstream_client.requests import ChatKnobs
from millstream_server.cli.answers import (
    Screen,
    Stopwatch,
    add_usage,
    answers,
    dim,
    show,
    usage_line,
    write_stats,
)
from millstream_server.cli.attachments import Attachments, ChatCompleter
from millstream_server.cli.client import call_processor, print_error
from millstream_server.cli.flags import (
    WRONG_USAGE,
    Commands,
    Destination,
    add_target,
    command,
    fail,
    flag,
)
from millstream_server.cli.sampling_flags import add_sampling_flags, knobs_given
from millstream_server.cli.tool_files import (
    add_reasoning,
    add_tools,
    reasoning_given,
    with_tools,
)

_CHAT = """\
Chat with a model; answers stream.

One chat is one gRPC stream, so the conversation keeps its worker and its KV cache. Ctrl-C stops an
answer and keeps the conversation; Ctrl-D ends the chat. Inside a chat /image FILE attaches a
picture to the next message; /help lists all commands. A question gets one answer, and - reads it
from stdin: git diff | millstream chat --system 'Summarise this change.' -

--tools FILE has a JSON list of functions, as OpenAI's API takes them. The model's calls are shown,
and you are asked for their results. With --run-tools a function that has "command": ["prog", "arg"]
is run: without a shell, the call's arguments as JSON on stdin, the result from stdout
(docs/tools.md). Reasoning and calls go to stderr: stdout has the answer only.

examples:
  millstream chat
  millstream chat "What is it?" --image cat.png --temperature 0
  millstream chat --address processor.example:50051 --tls-ca-file ca.pem --api-key-file key
"""
HELP = """\
/image FILE  attach a picture to your next message; /image alone lists what is attached
/video FILE  attach a video
/detach      attach nothing
/new         start a new conversation
/usage       tokens used in this conversation
/help        this list
/quit        end the chat (also Ctrl-D)
Ctrl-C       stop the answer and keep the conversation; twice: abort the turn
Tab          complete a command or a file's path"""
_COMMANDS = tuple(re.findall(r"^/\w+", HELP, re.MULTILINE))
_COMPLETE = """\
Continue a raw prompt, without the model's chat template.

examples:
  millstream complete "Millstream is" --max-new-tokens 40
  millstream complete - --temperature 0 --show-usage < prompt.txt
"""


def add_chat(commands: Commands) -> None:
    """Add the command that chats."""
    parser = command(commands, "chat", run, _CHAT)
    flag(parser, "question QUESTION", "print its answer and exit; - reads it from stdin", nargs="*")
    add_target(parser)
    flag(parser, "--system TEXT", "instructions to the model")
    flag(parser, "--once TEXT", "the same as QUESTION")
    _add_tools(parser)
    _add_media(parser)
    add_sampling_flags(parser)


def _add_tools(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reasoning and tools", "see docs/tools.md")
    add_reasoning(group)
    flag(group, "--show-reasoning", "show what the model thinks, on stderr")
    add_tools(group)
    flag(group, "--run-tools", "run the commands that FILE gives for functions")


def _chat_knobs(args: argparse.Namespace, tools: Sequence[Function]) -> ChatKnobs:
    knobs: ChatKnobs = {"model": args.model, **knobs_given(args)}  # type: ignore[typeddict-item]
    knobs |= reasoning_given(args)
    if tools:
        knobs["tools"] = tools
    if args.show_reasoning:
        knobs["events"] = True
    return knobs


def _add_media(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "images and videos", "for models that take them; `millstream models` shows which do"
    )
    formats = {Image: "PNG, JPEG, WebP, GIF", Video: "MP4, MOV, WebM, MKV"}
    for kind, names in formats.items():
        flag(
            group,
            f"--{kind.kind} FILE",
            f"send this {kind.kind} with the first message: {names}; may be repeated",
            dest="media",
            action="append",
            type=kind,
            default=[],
        )


def add_complete(commands: Commands) -> None:
    """Add the command that continues a prompt."""
    parser = command(commands, "complete", run_complete, _COMPLETE)
    flag(parser, "prompt PROMPT", "text to continue; - reads it from stdin")
    add_target(parser)
    add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the user ends it, or ask once; return the exit code."""
    try:
        for item in args.media:
            item.check()
    except MediaFileError as error:
        return fail(error.message)
    question = " ".join(args.question) or None
    if question is not None and args.once is not None:
        return fail("give the question once: as --once TEXT, or without --once", WRONG_USAGE)
    asked = args.once if question is None else question
    if asked is None:
        return call_processor(args, partial(_interactive, args))
    text = sys.stdin.read() if asked == "-" else asked
    if not text.strip():
        return fail("the text is empty")
    return call_processor(args, lambda client, _: _once(client, args, text))


async def _once(client: Client, args: argparse.Namespace, text: str) -> int:
    tools = args.tools.tools(_Input().ask, run=args.run_tools)
    stream = client.chat([*args.media, text], system=args.system, **_chat_knobs(args, tools))
    screen = Screen(reasoning=args.show_reasoning)
    await show(with_tools(stream, tools), screen, always_stats=args.show_usage)
    return 0


class _Input:
    """The user's lines: edited at a terminal, with history; of a file or a pipe each is a turn."""

    def __init__(self) -> None:
        self._session: PromptSession[str] | None = None
        self._asking = asyncio.Lock()
        if sys.stdin.isatty():
            self._session = PromptSession(
                completer=ChatCompleter(_COMMANDS), complete_while_typing=False
            )

    async def read(self, prompt: str) -> str:
        """Return the next line; a terminal shows ``prompt`` before it.

        Raises:
            EOFError: there are no more.
        """
        if self._session is None:
            line: str = await asyncio.to_thread(sys.stdin.readline)
            if not line:
                raise EOFError
            return line
        while True:
            try:
                return await self._session.prompt_async(prompt)
            except KeyboardInterrupt:
                print(dim("Ctrl-D or /quit ends the chat.", sys.stdout))

    async def ask(self, call: str) -> str:
        """Return the user's result of a call; calls of one answer are asked for one by one.

        Raises:
            EOFError: nobody is there to ask, or the user gives none.
        """
        if self._session is None:
            raise EOFError("nobody is there who could give a result")
        async with self._asking:
            try:
                return await self._session.prompt_async(f"result of {call}: ")
            except (KeyboardInterrupt, EOFError):
                raise EOFError("the user gives no result") from None


async def _interactive(args: argparse.Namespace, client: Client, server: Destination) -> int:
    served = ", ".join(model.name for model in await client.models()) or "no model yet"
    # Not on stdout, which has answers only.
    print(f"Millstream at {args.address}: {args.model or served}.", file=sys.stderr)
    help_ = "/help lists commands; Ctrl-C stops an answer; Ctrl-D ends the chat."
    print(dim(help_, sys.stderr), file=sys.stderr)
    await _Chat(client, server, args).run()
    return 0


class _Chat:
    """The loop of an interactive chat."""

    def __init__(self, client: Client, server: Destination, args: argparse.Namespace) -> None:
        self._client = client
        self._server = server
        self._args = args
        self._input = _Input()
        self._tools = args.tools.tools(self._input.ask, run=args.run_tools)
        self._conversation = self._new_conversation()
        self._attached = Attachments(args.media)
        self._usage = GenerationUsage()
        self._cancels: set[asyncio.Task[None]] = set()

    def _new_conversation(self) -> Conversation:
        knobs = _chat_knobs(self._args, self._tools)
        return self._client.conversation(system=self._args.system, **knobs)

    async def run(self) -> None:
        """Read a line, run its turn, repeat; a failed turn is explained and the chat goes on."""
        while True:
            try:
                line = (await self._input.read(self._attached.prompt)).strip()
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
            self._usage = GenerationUsage()
            self._attached.take()
            print("A new conversation.")
        elif line == "/usage":
            print(usage_line(self._usage))
        elif (said := self._attached.command(line)) is not None:
            print(said)
        else:
            print(HELP if line == "/help" else f"{line}: no such command\n{HELP}")

    async def _turn(self, line: str) -> None:
        media = self._attached.take()
        source = with_tools(self._conversation.say([*media, line]), self._tools)
        watch = Stopwatch()
        with self._stopping_on_ctrl_c(source):
            try:
                await Screen(reasoning=self._args.show_reasoning).show(source, watch)
            except RequestCancelledError:
                print("cut off; this turn is forgotten", file=sys.stderr)
                return
            except IncompleteAnswerError as error:
                print(f"{error.message}; this turn is forgotten", file=sys.stderr)
                return
            except MillstreamError as error:
                print_error(error, self._server, self._args)
                if error.retryable:
                    self._attached.put_back(media)
                return
        for answer in answers(source):
            add_usage(self._usage, answer.usage)
        write_stats(watch.stats(answers(source)[-1]), always=self._args.show_usage)

    @contextlib.contextmanager
    def _stopping_on_ctrl_c(self, source: AnswerStream | ToolRun) -> Iterator[None]:
        """While an answer streams, Ctrl-C stops the answer, not the program."""
        presses = 0

        def pressed() -> None:
            nonlocal presses
            presses += 1
            if isinstance(source, ToolRun) and source.calling:
                source.cancel()
                return
            if presses > 1:
                self._conversation.abort()
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


def run_complete(args: argparse.Namespace) -> int:
    """Print the continuation while it streams; return the exit code."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        return fail("the prompt is empty")
    return call_processor(args, lambda client, _: _complete(client, args, prompt))


async def _complete(client: Client, args: argparse.Namespace, prompt: str) -> int:
    stream = client.complete(prompt, model=args.model, **knobs_given(args))
    await show(stream, Screen(), always_stats=args.show_usage)
    return 0
