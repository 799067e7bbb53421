"""The `millstream` command as a person runs it: its own process, on a pipe or on a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

MILLSTREAM = (
    sys.executable,
    "-c",
    "import sys; from millstream_server.cli.entry import main; sys.exit(main())",
)
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


async def millstream(*args: str, stdin: str = "", cwd: Path | None = None) -> Outcome:
    """Run a command to its end, on pipes."""
    process = await asyncio.create_subprocess_exec(
        *MILLSTREAM,
        *args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), _WAIT_S)
    return Outcome(process.returncode or 0, out.decode(), err.decode())


async def without_reader(*args: str) -> Outcome:
    """Run a command whose output nobody reads any more, as `head` may leave it."""
    reader, writer = os.pipe()
    os.close(reader)
    process = await asyncio.create_subprocess_exec(
        *MILLSTREAM, *args, stdout=writer, stderr=asyncio.subprocess.PIPE
    )
    os.close(writer)
    _, err = await asyncio.wait_for(process.communicate(), _WAIT_S)
    return Outcome(process.returncode or 0, "", err.decode())


class Terminal:
    """A command on a pseudo-terminal; an async context manager."""

    def __init__(
        self, args: Sequence[str], command: Sequence[str] = MILLSTREAM, cwd: Path | None = None
    ) -> None:
        self._command = (*command, *args)
        self._cwd = cwd
        self._raw = ""
        self._seen = 0
        self._more = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CONTROLLED, *self._command),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=self._cwd,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            start_new_session=True,
        )
        os.close(slave)
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
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
        return await asyncio.wait_for(self.process.wait(), _WAIT_S)


# Makes its terminal the controlling one, so that Ctrl-C signals it as in a shell.
_CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
