"""The `millstream` command as a person runs it: its own process, on a pipe or on a terminal.

In a session of tests it may be forked (`processes.forked`), which takes a tenth of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import tempfile
import termios
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from millstream_server.runtime.forking.client import Stream
from tests.support.processes import forked

MILLSTREAM = (
    sys.executable,
    "-c",
    "import sys; from millstream_server.cli.entry import main; sys.exit(main())",
)
"""It in an interpreter of its own."""
_COMMAND = "tests.support.processes.command"
_FORWARD = re.compile(r"\x1b\[(\d*)C")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")
_WAIT_S = 15.0


@dataclass(frozen=True)
class Outcome:
    """What a finished command left."""

    code: int
    out: str
    err: str


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition of the outside world, which nobody announces."""
    async with asyncio.timeout(_WAIT_S):
        while not condition():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def suite_up(
    *flags: str, python: str = sys.executable, cwd: Path | None = None
) -> AsyncIterator[dict[str, str]]:
    """Run `up`; give the addresses of what it has started."""
    process = await asyncio.create_subprocess_exec(
        *(python, *MILLSTREAM[1:], "up", *flags),
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said = ""
    try:
        while "Ctrl-C stops the suite" not in said:
            line = (await process.stdout.readline()).decode()
            assert line, said
            said += line
        yield dict(re.findall(r"^(\S+) +(127\.0\.0\.1:\d+) +:", said, re.MULTILINE))
    finally:
        process.terminate()
        await process.communicate()


async def millstream(*args: str, stdin: str = "", cwd: Path | None = None) -> Outcome:
    """Run a command to its end, its streams files."""
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(stdin.encode())
        given.seek(0)
        code = await _ended(args, (given, out, err), cwd)
        return Outcome(code, _text(out), _text(err))


async def without_reader(*args: str) -> Outcome:
    """Run a command whose output nobody reads any more, as `head` may leave it."""
    reader, writer = os.pipe()
    os.close(reader)
    with tempfile.TemporaryFile() as nothing, tempfile.TemporaryFile() as err:
        try:
            code = await _ended(args, (nothing, writer, err), None)
        finally:
            os.close(writer)
        return Outcome(code, "", _text(err))


async def _ended(
    args: Sequence[str],
    streams: tuple[Stream, Stream, Stream],
    folder: Path | None,
) -> int:
    process = forked.start("services", _COMMAND, args, streams, dict(os.environ), folder=folder)
    try:
        return await asyncio.to_thread(process.wait, _WAIT_S)
    except BaseException:
        process.send_signal(signal.SIGKILL)
        raise


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


class Terminal:
    """A module's process on a pseudo-terminal, `millstream` by default; an async context manager.

    The module takes the terminal as its controlling one.
    """

    def __init__(
        self, args: Sequence[str], module: str = _COMMAND, cwd: Path | None = None
    ) -> None:
        self._module, self._args = module, args
        self._cwd = cwd
        self._raw = ""
        self._seen = 0
        self._more = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        self.process = forked.start(
            "services",
            self._module,
            self._args,
            (slave, slave, slave),
            {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            folder=self._cwd,
        )
        os.close(slave)
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)

    def _read(self) -> None:
        try:
            self._raw += os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # The other side is closed.
            asyncio.get_running_loop().remove_reader(self._master)
        self._more.set()

    @property
    def text(self) -> str:
        """All that was shown, without the escapes.

        prompt_toolkit writes only what the screen doesn't show yet: instead of a blank on an empty
        place it moves the cursor forward. So such a move reads as blanks.
        """
        blanks = _FORWARD.sub(lambda move: " " * int(move[1] or 1), self._raw)
        return _ESCAPES.sub("", blanks)

    async def expect(self, text: str) -> None:
        """Wait until ``text`` is shown after what was expected last."""

        async def wait() -> None:
            while (at := self.text.find(text, self._seen)) < 0:
                self._more.clear()
                await self._more.wait()
            self._seen = at + len(text)

        try:
            await asyncio.wait_for(wait(), _WAIT_S)
        except TimeoutError:
            raise AssertionError(f"no {text!r} in {self.text[self._seen :]!r}") from None

    def type(self, keys: str) -> None:
        """Press keys; "\\x03" is Ctrl-C."""
        os.write(self._master, keys.encode())

    async def ends(self) -> int:
        """Wait for the end; answers the exit code."""
        return await asyncio.to_thread(self.process.wait, _WAIT_S)
