"""What is written into a model's directory beside the model: how far its download is.

`.millstream-complete` is written last, `.millstream-partial` while files are missing. Both are JSON
of a `State`. `.millstream-lock` is locked by the process that fills the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from millstream_server.runtime.settings import SettingsError

COMPLETE = ".millstream-complete"
PARTIAL = ".millstream-partial"
LOCK = ".millstream-lock"
OURS = frozenset({".cache", "lost+found"})
"""What an empty directory may hold besides `.millstream-*`. A new file system has lost+found."""
_HUB_ID = re.compile(r"(?:hf:/)?(\w[\w.-]*/\w[\w.-]*)")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class State:
    """Which files are, or will be, in a directory."""

    uri: str
    revision: str
    """The commit, or a digest of names, sizes and tags."""
    weights: bool
    """Whether the weights are among the files."""
    files: Mapping[str, int]
    """Bytes by name."""
    tags: Mapping[str, str]
    """Change with the files' content."""

    def lacking(self, directory: Path) -> list[str]:
        """List the files that aren't there in their size."""
        return [name for name, size in self.files.items() if size_of(directory / name) != size]


def size_of(path: Path) -> int | None:
    """Return a file's bytes; None: there is no such file."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def read(path: Path) -> State | None:
    """Read a state; None: there is none, or what is there can't be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return State(**content)
    except (FileNotFoundError, ValueError, TypeError):
        return None


def write(path: Path, state: State) -> None:
    """Write a state so that it is there completely or not at all, also after a crash."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(asdict(state), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def complete_in(directory: Path) -> State | None:
    """Return the state of a directory whose download has ended; None: it hasn't, or files are gone.

    Both marks are there for a moment when a download ends, and when one that left the weights out
    goes on with them.
    """
    complete, began = read(directory / COMPLETE), read(directory / PARTIAL)
    if complete is None or complete.lacking(directory):
        return None
    return None if began is not None and began.lacking(directory) else complete


def fetch_advice(directory: Path) -> str:
    """Return how to get a model that was named by its id on the Hub; empty: it wasn't."""
    named = _HUB_ID.fullmatch(str(directory))
    if named is None or directory.exists():
        return ""
    fetch = f"python -m millstream_server.model_files fetch hf://{named[1]} {named[1]}"
    return f"there is no directory {directory}; `{fetch}` gets the Hub's model of that name there"


def expect_usable(directory: Path) -> None:
    """Refuse a directory that `model_files` began to fill and hasn't completed, or a model's id.

    One without any state is somebody's own and isn't judged here.

    Raises:
        SettingsError: files are missing.
    """
    if advice := fetch_advice(directory):
        raise SettingsError(advice)
    began = read(directory / PARTIAL)
    if began is not None and complete_in(directory) is None:
        there = sum(size_of(directory / name) == size for name, size in began.files.items())
        raise SettingsError(
            f"the download of {began.uri} into {directory} isn't complete: {there} of "
            f"{len(began.files)} files are there. Wait for it or see its log; `python -m "
            f"millstream_server.model_files fetch {began.uri} {directory}` goes on with it"
        )
    complete = read(directory / COMPLETE)
    if complete is not None and (lacking := complete.lacking(directory)):
        raise SettingsError(
            f"{directory} lacks files of {complete.uri}, or has them in another size: "
            f"{', '.join(lacking[:5])}. `python -m millstream_server.model_files fetch "
            f"{complete.uri} {directory}` gets them again"
        )


def expect_weights(directory: Path) -> None:
    """Refuse a directory that isn't usable, or that was fetched without the weights.

    Raises:
        SettingsError: files are missing.
    """
    expect_usable(directory)
    complete = read(directory / COMPLETE)
    if complete is not None and not complete.weights:
        raise SettingsError(
            f"{directory} was fetched with --without-weights, for a Processor; a worker needs "
            f"`python -m millstream_server.model_files fetch {complete.uri} {directory}`"
        )


@contextlib.contextmanager
def locked(directory: Path, on_wait: Callable[[], None]) -> Iterator[bool]:
    """Hold the directory's lock; call ``on_wait`` as long as another process has it.

    The kernel frees it with its process. NFS from version 4 on, CephFS and Lustre (with `flock`)
    keep it for all machines. Yields False where a file system has no locks: two processes at once
    then load everything twice, but each file appears complete or not at all.

    Raises:
        OSError: the directory isn't writable.
    """
    with (directory / LOCK).open("a") as file:
        yield _lock(file, on_wait)


def _lock(file: IO[str], on_wait: Callable[[], None]) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        else:
            return True
