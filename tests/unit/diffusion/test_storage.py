"""Storage of outputs: names, and that nothing is left of what failed, at whatever point."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from millstream_server.diffusion.worker.files import Storage
from millstream_server.runtime.errors import StorageError
from millstream_server.runtime.settings import SettingsError
from millstream_testing.waiting import until

DATA = bytes(range(256)) * (3 << 12)  # 3 MiB: several writes


class Breaking(LocalFileSystem):  # type: ignore[misc]
    """A local file system on which something goes wrong."""

    protocol = "breaking"
    cachable = False
    full_after: int | None = None
    """Bytes after which the disk is full."""
    hangs: threading.Event | None = None
    """A write waits for it."""
    refuses: frozenset[str] = frozenset()
    """Methods that aren't permitted."""

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _Checked(super()._open(path, mode, **options), self)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002
        self._check("makedirs")
        super().makedirs(path, exist_ok)

    def mv(self, *args: Any, **options: Any) -> None:
        self._check("mv")
        super().mv(*args, **options)

    def _check(self, name: str) -> None:
        if name in self.refuses:
            raise PermissionError(errno.EACCES, "Permission denied")


class _Checked:
    def __init__(self, file: Any, system: Breaking) -> None:
        self._file = file
        self._system = system
        self._written = 0

    def write(self, data: memoryview) -> int:
        self._written += len(data)
        most = self._system.full_after
        if most is not None and self._written > most:
            self._file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        if self._system.hangs is not None:
            self._file.flush()
            self._system.hangs.wait(30)
        return int(self._file.write(data))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


fsspec.register_implementation("breaking", Breaking, clobber=True)


def made(folder: Path, timeout_s: float = 20, **faults: Any) -> Storage:
    """Make a storage of which ``faults`` are the file system's."""
    storage = Storage(f"breaking://{folder}", "https://pictures.example/p/", timeout_s)
    for name, value in faults.items():
        setattr(storage._system, name, value)
    return storage


def found(folder: Path) -> list[str]:
    while True:
        with contextlib.suppress(FileNotFoundError):  # a folder was removed meanwhile
            return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def going() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_a_file_is_under_the_requests_id_and_a_random_name(tmp_path: Path) -> None:
    storage = made(tmp_path)
    one = await storage.write("r-1.a", "png", DATA)
    other = await storage.write("r-1.a", "png", b"other")
    assert found(tmp_path) == sorted(["r-1.a", *(_below(f.url) for f in (one, other))])
    assert (tmp_path / _below(one.url)).read_bytes() == DATA
    folder, _, name = _below(one.url).partition("/")
    assert folder == "r-1.a"
    assert len(name) == len("0" * 32 + ".png")
    await storage.remove(one)
    assert found(tmp_path) == sorted(["r-1.a", _below(other.url)])
    await storage.remove(other)
    assert found(tmp_path) == []


def _below(url: str) -> str:
    return url.removeprefix("https://pictures.example/p/")


@pytest.mark.parametrize("request_id", ["", "..", "../../etc", "a/b", ".hidden", "a b", "ü", "x\0"])
async def test_an_id_that_is_no_name_becomes_a_random_one(tmp_path: Path, request_id: str) -> None:
    storage = made(tmp_path / "inside")
    stored = await storage.write(request_id, "png", b"data")
    folder = _below(stored.url).partition("/")[0]
    assert len(folder) == 32
    assert int(folder, 16) >= 0
    assert found(tmp_path) == ["inside", f"inside/{folder}", f"inside/{_below(stored.url)}"]


@pytest.mark.parametrize(
    "faults",
    [
        {"full_after": 2 << 20},
        {"full_after": 0},
        {"refuses": frozenset({"makedirs"})},
        {"refuses": frozenset({"mv"})},
    ],
    ids=["full", "full at once", "unwritable", "no rename"],
)
async def test_a_failure_leaves_nothing_and_may_be_retried(
    tmp_path: Path, faults: dict[str, Any]
) -> None:
    with pytest.raises(StorageError) as caught:
        await made(tmp_path, **faults).write("r", "png", DATA)
    assert "nothing was kept, send the request again" in caught.value.message
    assert str(tmp_path) not in caught.value.message
    assert caught.value.retry_delay_s
    assert found(tmp_path) == []


async def test_a_cancel_in_the_middle_leaves_nothing(
    tmp_path: Path, going: threading.Event
) -> None:
    writing = asyncio.ensure_future(made(tmp_path, hangs=going).write("r", "png", DATA))
    await until(lambda: any(name.endswith(".part") for name in found(tmp_path)))
    writing.cancel()
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert found(tmp_path) == []


async def test_storage_that_hangs_is_given_up_and_cleans_up_when_it_goes_on(
    tmp_path: Path, going: threading.Event
) -> None:
    with pytest.raises(StorageError, match="took longer than 0"):
        await made(tmp_path, timeout_s=0.05, hangs=going).write("r", "png", DATA)
    going.set()
    await until(lambda: found(tmp_path) == [])


async def test_other_file_systems_work_too() -> None:
    storage = Storage("memory://pictures", "", 20)
    stored = await storage.write("r", "webp", DATA)
    assert stored.url.startswith("memory://pictures/r/")
    assert fsspec.filesystem("memory").cat(stored.url) == DATA
    await storage.remove(stored)
    assert fsspec.filesystem("memory").find("/pictures") == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nosuch://bucket", "--storage-url nosuch://…: Protocol not known"),
        ("ftp://me:secret@host/folder", "set --storage-public-url"),
    ],
)
def test_a_url_that_cannot_be_used_is_told_at_the_start(url: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        Storage(url, "", 20)
    assert "secret" not in str(caught.value)
