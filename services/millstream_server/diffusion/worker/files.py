"""An output's file: its format, the settings in its metadata, and its storage."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from millstream_server.diffusion.request import DiffusionRequest, DiffusionSettings, FileFormat
from millstream_server.media import writing
from millstream_server.media.items import Frames
from millstream_server.runtime.errors import ServingError, StorageError
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.threads import DaemonThreads

log = get_log(__name__)

KEYWORD = "millstream"
"""PNG: the iTXt chunk with the settings, as JSON. WebP has them in EXIF's ImageDescription, MP4 in
the comment."""
EXTENSIONS = {FileFormat.PNG: "png", FileFormat.WEBP: "webp", FileFormat.MP4: "mp4"}


def write_file(
    frames: Frames, request: DiffusionRequest, settings: DiffusionSettings, output: int
) -> bytes:
    """Return the file of the ``output``-th output. It takes time: call it in a thread."""
    about = settings_text(request, settings, output)
    match request.format:
        case FileFormat.PNG:
            return writing.png(frames, request.prompt, {KEYWORD: about})
        case FileFormat.WEBP:
            return writing.webp(frames, about)
        case FileFormat.MP4:
            return writing.mp4(frames, settings.fps, request.prompt, about)


def settings_text(request: DiffusionRequest, settings: DiffusionSettings, output: int) -> str:
    """Return what an output was made with, as JSON in ASCII; ``seed`` is the output's own."""
    about: dict[str, str | int | float | None] = {
        "model": settings.model,
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt or None,
        "width": settings.width,
        "height": settings.height,
        "steps": settings.steps,
        "guidance_scale": settings.guidance_scale,
        "seed": settings.seed_of(output),
        "scheduler": settings.scheduler or None,
        "strength": settings.strength,
        "frames": settings.frames or None,
        "fps": settings.fps or None,
    }
    return json.dumps({name: value for name, value in about.items() if value is not None})


T = TypeVar("T")

_CHUNK_BYTES = 1 << 20
_THREADS = 4
_RETRY_S = 1.0
_CLEAN_UP_S = 10.0
"""Longest wait for the removal of files; it goes on in its thread."""
_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_RANDOM_BYTES = 16


class _Given(Exception):  # noqa: N818 - ends a write that nobody waits for
    """Nobody waits for the file any more."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in storage."""

    path: str
    url: str


class Storage:
    """Writes files under ``{prefix}/{request id}/{random}.{extension}``.

    A file is written under a temporary name in its folder and then renamed, so that a reader never
    sees a part of it. Used in one event loop; what blocks runs in threads.
    """

    def __init__(self, url: str, public_url: str, timeout_s: float) -> None:
        """Use the storage at ``url``; callers get URLs below ``public_url``, empty: below ``url``.

        Raises:
            SettingsError: fsspec has no file system for the URL, a package is missing, or callers
            would be sent a password.
        """
        if not public_url and "@" in url.partition("://")[2].partition("/")[0]:
            raise SettingsError(
                "--storage-url has a user name or a password in it, and callers get URLs: set "
                "--storage-public-url"
            )
        self._system, self._prefix = _open(url)
        self._public_url = (public_url or url).rstrip("/")
        self._timeout_s = timeout_s
        self._threads = DaemonThreads(_THREADS, "storage")

    async def write(self, request_id: str, extension: str, data: bytes) -> StoredFile:
        """Write a file. When it fails or is cancelled, nothing is left behind.

        A folder is named after the request's id if that can be a name, else at random.

        Raises:
            StorageError: it can't be written, or took too long.
        """
        folder = request_id if _FOLDER.fullmatch(request_id) else secrets.token_hex(_RANDOM_BYTES)
        name = f"{secrets.token_hex(_RANDOM_BYTES)}.{extension}"
        path = f"{self._prefix}/{folder}/{name}"
        given_up = threading.Event()
        writing = self._in_thread(self._write, path, data, given_up)
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(writing)
        except TimeoutError:
            given_up.set()
            writing.add_done_callback(lambda _: self._discard(writing, path))
            raise _failed(f"took longer than {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            given_up.set()
            await asyncio.wait({writing}, timeout=_CLEAN_UP_S)
            if writing.done():
                await asyncio.wait({self._discard(writing, path)}, timeout=_CLEAN_UP_S)
            else:
                writing.add_done_callback(lambda _: self._discard(writing, path))
            raise
        except ServingError:
            raise
        except Exception as error:  # what a vendor's file system raises
            log.warning("an output can't be stored", error=error)
            raise _failed("failed") from error
        return StoredFile(path, f"{self._public_url}/{folder}/{name}")

    async def remove(self, file: StoredFile) -> None:
        """Remove a file, if it is there; a failure is logged only."""
        await asyncio.wait({self._in_thread(self._remove, file.path)}, timeout=_CLEAN_UP_S)

    def close(self) -> None:
        self._threads.close()

    def _discard(self, writing: asyncio.Future[None], path: str) -> asyncio.Future[None]:
        """Remove what a write has finished that was given up at its very end."""
        failed = writing.cancelled() or writing.exception() is not None
        return writing if failed else self._in_thread(self._remove, path)

    # ---- in a thread -----------------------------------------------------------------------------

    def _write(self, path: str, data: bytes, given_up: threading.Event) -> None:
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.part"
        try:
            with self._created(temporary) as file:
                view = memoryview(data)
                for start in range(0, len(view), _CHUNK_BYTES):
                    _unless(given_up)
                    file.write(view[start : start + _CHUNK_BYTES])
            _unless(given_up)
            self._system.mv(temporary, path)
            _unless(given_up)
        except BaseException:
            self._remove(temporary, path)
            raise

    @contextlib.contextmanager
    def _created(self, path: str) -> Iterator[Any]:
        folder = path.rpartition("/")[0]
        self._system.makedirs(folder, exist_ok=True)
        try:
            file = self._system.open(path, "wb")
        except FileNotFoundError:  # another request of the same id removed the empty folder
            self._system.makedirs(folder, exist_ok=True)
            file = self._system.open(path, "wb")
        with file:
            yield file

    def _remove(self, *paths: str) -> None:
        for path in paths:
            try:
                if self._system.exists(path):
                    self._system.rm(path)
            except Exception as error:  # noqa: BLE001 - a vendor's file system; goes to the log
                log.warning("a file can't be removed from storage", error=error)
        with contextlib.suppress(Exception):  # other files may be in it
            self._system.rmdir(paths[0].rpartition("/")[0])

    def _in_thread(self, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future = asyncio.wrap_future(self._threads.submit(call, *args))
        future.add_done_callback(_take_exception)
        return future


def _open(url: str) -> tuple[Any, str]:
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise SettingsError(
            "--storage-url needs fsspec: pip install 'millstream[diffusion]'"
        ) from error
    try:
        system, prefix = core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SettingsError(f"--storage-url {url.partition('://')[0]}://…: {error}") from error
    return system, str(prefix).rstrip("/")


def _unless(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise _Given


def _failed(what: str) -> StorageError:
    return StorageError(
        f"writing an output to the worker's storage {what}; nothing was kept, send the request "
        "again",
        retry_delay_s=jittered(_RETRY_S),
    )


def _take_exception(future: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting a failure that nobody waits for any more."""
    if not future.cancelled():
        future.exception()
