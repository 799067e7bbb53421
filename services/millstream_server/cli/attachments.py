"""Images and videos that go with the next message of a chat."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from millstream_client import Image, MediaFileError, Video

_KINDS: dict[str, type[Image | Video]] = {"/image": Image, "/video": Video}
_COMMAND = re.compile(r"(/image|/video)(?:\s+(.+))?")


class Attachments:
    """What is attached; the next message takes it all."""

    def __init__(self, media: Sequence[Image | Video] = ()) -> None:
        self._media = list(media)

    @property
    def prompt(self) -> str:
        counts = []
        for kind in (Image, Video):
            number = sum(isinstance(item, kind) for item in self._media)
            if number:
                counts.append(f"{number} {kind.kind}{'s' if number > 1 else ''}")
        return f"[{', '.join(counts)}] > " if counts else "> "

    def take(self) -> list[Image | Video]:
        """Return what is attached, for a message; nothing is then."""
        taken, self._media = self._media, []
        return taken

    def put_back(self, taken: Sequence[Image | Video]) -> None:
        """Attach again what a message that failed had."""
        self._media[:0] = taken

    def command(self, line: str) -> str | None:
        """Run `/image`, `/video` or `/detach`; return what to tell, None for another command."""
        if line == "/detach":
            return "Nothing was attached." if not self.take() else "Nothing is attached any more."
        match = _COMMAND.fullmatch(line)
        if match is None:
            return None
        return self._attach(_KINDS[match[1]], match[2]) if match[2] else self._list()

    def _attach(self, kind: type[Image | Video], text: str) -> str:
        media = kind(_source(text))
        try:
            media.check()
        except MediaFileError as error:
            return f"error: {error.message}"
        self._media.append(media)
        return f"Attached: {describe(media)}. It goes with your next message."

    def _list(self) -> str:
        if not self._media:
            return "Nothing is attached; /image FILE attaches a picture to your next message."
        return "\n".join(f"{i}. {describe(item)}" for i, item in enumerate(self._media, 1))


def describe(media: Image | Video) -> str:
    """Return its kind, its name, and a file's size."""
    name = os.fspath(media.source) if isinstance(media.source, (str, os.PathLike)) else "bytes"
    try:
        size = f", {_size(Path(name).stat().st_size)}"
    except (OSError, ValueError):  # a URL, or it is gone
        size = ""
    return f"{media.kind} {name}{size}"


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def _source(text: str) -> str:
    """Return what a user typed as a path or a URL; terminals quote a file dropped on them."""
    if "://" in text or os.path.exists(os.path.expanduser(text)):  # noqa: PTH110, PTH111 - text stays text
        return os.path.expanduser(text)  # noqa: PTH111
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe, say
        words = []
    return os.path.expanduser(words[0] if len(words) == 1 else text)  # noqa: PTH111


class ChatCompleter(Completer):
    """Completes commands, and paths after `/image` and `/video`."""

    def __init__(self, commands: Iterable[str]) -> None:
        """``commands`` with their slash."""
        self._commands = tuple(commands)
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        line = document.text_before_cursor
        match = re.fullmatch(r"(?:/image|/video)\s+(.*)", line)
        if match is not None:
            yield from self._paths.get_completions(Document(match[1]), complete_event)
            return
        for command in self._commands:
            if line.startswith("/") and command.startswith(line):
                yield Completion(command, start_position=-len(line))
