"""Filling a directory with a model's files, or waiting until another process has done it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

from millstream_server.model_files import hub, state
from millstream_server.model_files.source import (
    FailedError,
    Listing,
    RefusedError,
    RemoteFile,
    Source,
    content_differs,
    disk_error,
    wanted,
    without_weights,
)
from millstream_server.runtime.telemetry.log import Log, get_log

MIB = 2**20
_SPEED_OVER = 6
"""Speeds are averages over so many lines."""


class Progress:
    """Counts files and bytes; `lines` logs them every ``period_s`` seconds."""

    def __init__(
        self,
        log: Log,
        files: int,
        size: int,
        *,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count up to ``files`` files of ``size`` bytes together."""
        self._log = log
        self._files, self._size = files, size
        self._clock = clock
        self._period_s = period_s
        self._lock = threading.Lock()
        self._complete: set[str] = set()
        self._bytes: dict[str, int] = {}
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=_SPEED_OVER)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def there(self, name: str, size: int) -> None:
        """Count a file that was there before; it doesn't count for the speed."""
        with self._lock:
            self._complete.add(name)
            self._bytes[name] = size
            self._seen = deque(((at, seen + size) for at, seen in self._seen), _SPEED_OVER)

    def add(self, name: str, count: int) -> None:
        """Count further bytes of a file; fewer than 0: they are lost."""
        with self._lock:
            self._bytes[name] = max(0, self._bytes.get(name, 0) + count)

    def reset(self, name: str) -> None:
        """Forget a file's bytes: it begins anew."""
        with self._lock:
            self._bytes.pop(name, None)
            self._complete.discard(name)

    def done(self, name: str, size: int) -> None:
        with self._lock:
            self._complete.add(name)
            self._bytes[name] = size

    def line(self) -> None:
        with self._lock:
            now, done = self._clock(), sum(self._bytes.values())
            then, before = self._seen[0]
            self._seen.append((now, done))
            files = len(self._complete)
        speed = max(0.0, (done - before) / (now - then)) if now > then else 0.0
        self._log.info(
            "downloading",
            files=f"{files}/{self._files}",
            mib=f"{done // MIB}/{self._size // MIB}",
            percent=100 * done // self._size if self._size else 100,
            mib_per_s=round(speed / MIB, 1),
            left_s=round((self._size - done) / speed) if speed else "unknown",
        )

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.line()


log = get_log(__name__)
T = TypeVar("T")
_RESERVE = 16 * MIB
"""Left free on the disk."""
_LONGEST_PAUSE_S = 30.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is wanted, and how."""

    weights: bool = True
    all_files: bool = False
    """Copies of the weights for other programs too."""
    parallel: int = 8
    """Files at once."""
    retries: int = 4
    """Further attempts after a failure that may pass."""
    period_s: float = 5.0
    """Between two lines of progress."""


def fetch(uri: str, source: Callable[[], Source], directory: Path, options: Options) -> None:
    """Bring the files of ``uri`` into ``directory``, or see that they are there already.

    Raises:
        FetchError: they can't be had; what is complete stays for the next attempt.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if _is_there(uri, directory, options):
            return
        with state.locked(directory, _waiting(directory, options.period_s)) as held:
            if not held:
                log.warning("the file system has no locks: start one download at a time")
            if not _is_there(uri, directory, options):
                _fill(uri, source(), directory, options)
    except OSError as error:
        raise disk_error(error, directory) from error


def remove_siblings(directory: Path) -> None:
    """Remove the directories beside ``directory`` that have our marks: other revisions of a model.

    Raises:
        FetchError: one can't be removed.
    """
    try:
        marked = {mark.parent for mark in directory.parent.glob("*/.millstream-*")}
        for other in marked - {directory}:
            shutil.rmtree(other)
            log.info("removed", directory=other)
    except OSError as error:
        raise disk_error(error, directory) from error


def _is_there(uri: str, directory: Path, options: Options) -> bool:
    """Whether the directory is complete.

    Raises:
        RefusedError: it belongs to something else.
    """
    known = state.read(directory / state.COMPLETE) or state.read(directory / state.PARTIAL)
    if known is None and (others := _foreign(directory)):
        raise RefusedError(
            f"{directory} has files that don't come from here: {', '.join(others[:3])}. Give an "
            "empty directory"
        )
    if known is not None and known.uri != uri:
        raise RefusedError(
            f"{directory} is for {known.uri}, not for {uri}. Give another directory, or delete "
            "everything in this one first"
        )
    complete = state.complete_in(directory)
    if complete is None or (options.weights and not complete.weights):
        return False
    log.info("the model's files are there", uri=uri, revision=complete.revision)
    return True


def _foreign(directory: Path) -> list[str]:
    names = (path.name for path in directory.iterdir())
    return sorted(n for n in names if n not in state.OURS and not n.startswith(".millstream-"))


def _fill(uri: str, source: Source, directory: Path, options: Options) -> None:
    began = state.read(directory / state.PARTIAL)
    found = _again(options, lambda: source.listing(began.revision if began else None))
    files = _chosen(found, options)
    _remove_changed(directory, files, began)
    target = state.State(
        uri=uri,
        revision=found.revision,
        weights=options.weights,
        files={file.name: file.size for file in files},
        tags={file.name: file.tag for file in files},
    )
    state.write(directory / state.PARTIAL, target)
    (directory / state.COMPLETE).unlink(missing_ok=True)
    _clean(directory)
    _get_missing(source, files, directory, target, options)
    state.write(directory / state.COMPLETE, target)
    (directory / state.PARTIAL).unlink()
    shutil.rmtree(directory / ".cache", ignore_errors=True)
    log.info("complete", uri=uri, revision=found.revision, directory=directory, files=len(files))


def _get_missing(
    source: Source,
    files: Sequence[RemoteFile],
    directory: Path,
    target: state.State,
    options: Options,
) -> None:
    size, lacking = sum(target.files.values()), set(target.lacking(directory))
    _expect_space(directory, sum(target.files[name] for name in lacking))
    log.info(
        "fetching",
        uri=target.uri,
        revision=target.revision,
        directory=directory,
        files=len(files),
        mib=size // MIB,
        missing=len(lacking),
    )
    with Progress(log, len(files), size, period_s=options.period_s) as progress:
        for file in files:
            if file.name not in lacking:
                progress.there(file.name, file.size)
        download = _Download(source, directory, target.revision, options, progress)
        download.all(files)
        progress.line()


def _chosen(found: Listing, options: Options) -> Sequence[RemoteFile]:
    if not options.weights:
        files = without_weights(found.files)
    else:
        files = list(found.files) if options.all_files else wanted(found.files)
    chosen = {file.name for file in files}
    left_out = [file for file in found.files if file.name not in chosen]
    if left_out:
        names = [file.name for file in left_out]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")  # noqa: PLR2004
        log.info("left out", files=shown, mib=sum(file.size for file in left_out) // MIB)
    if not files:
        raise RefusedError(f"of the {len(found.files)} files there is none to fetch")
    return files


def _remove_changed(
    directory: Path, files: Sequence[RemoteFile], began: state.State | None
) -> None:
    """Remove what an earlier attempt got, where the source has another content by now."""
    for file in files:
        if began is not None and began.tags.get(file.name, file.tag) != file.tag:
            (directory / file.name).unlink(missing_ok=True)


def _clean(directory: Path) -> None:
    """Remove what processes left that were killed: the Hub's library can't go on with it."""
    for left in (directory / hub.CACHE).rglob("*.incomplete"):
        left.unlink(missing_ok=True)


def _expect_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed + _RESERVE > free:
        raise RefusedError(
            f"{directory} has {free // MIB} MiB free; {needed // MIB} MiB are missing still. Give "
            "it more space (in the chart: models.<name>.size)"
        )


@dataclass(frozen=True, slots=True)
class _Download:
    """One run over the files of a revision."""

    source: Source
    directory: Path
    revision: str
    options: Options
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)

    def all(self, files: Sequence[RemoteFile]) -> None:
        """Download and check all files; the first failure ends it."""
        pool = ThreadPoolExecutor(self.options.parallel, "download")
        done, _ = wait([pool.submit(self._one, file) for file in files], None, FIRST_EXCEPTION)
        self.stop.set()
        # After a failure those that run can't be stopped: the process ends without them.
        pool.shutdown(wait=False, cancel_futures=True)
        for one in done:
            one.result()

    def _one(self, file: RemoteFile) -> None:
        if not self.stop.is_set():
            _again(self.options, lambda: self._attempt(file))

    def _attempt(self, file: RemoteFile) -> None:
        """Download a file unless it is there; check it.

        Raises:
            FailedError: also if its content isn't what the source tells; then it is removed.
        """
        arrived = 0
        place = self.directory / file.name
        if state.size_of(place) != file.size:
            self.progress.reset(file.name)
            place.unlink(missing_ok=True)

            def report(count: int) -> None:
                nonlocal arrived
                arrived += count
                self.progress.add(file.name, count)
                if arrived > file.size:  # it might have no end, and the disk has one
                    raise FailedError(f"{file.name} is damaged: it has more than {file.size} bytes")

            self.source.download(file, self.directory, self.revision, report)
        if differs := content_differs(file, place):
            place.unlink()
            raise FailedError(f"{file.name} is damaged: {differs}")
        self.progress.done(file.name, file.size)


def _again(options: Options, attempt: Callable[[], T]) -> T:
    """Repeat what may pass, with growing pauses."""
    for number in range(options.retries):
        try:
            return attempt()
        except FailedError as error:
            pause_s = min(2.0**number, _LONGEST_PAUSE_S)
            log.warning("trying again", reason=error, attempt=number + 2, pause_s=pause_s)
            time.sleep(pause_s)
    return attempt()


def _waiting(directory: Path, period_s: float) -> Callable[[], None]:
    """Make a function that waits a moment for another process, and says so now and then."""
    logged = -period_s

    def on_wait() -> None:
        nonlocal logged
        if time.monotonic() - logged >= period_s:
            logged = time.monotonic()
            log.info("another process fills the directory; waiting for it", directory=directory)
        time.sleep(_LOOK_S)

    return on_wait


def wait_for(directory: Path, *, timeout_s: float, period_s: float) -> None:
    """Wait until another process has filled a directory; log how far it is every ``period_s`` s.

    ``timeout_s`` bounds the time in which nothing further arrives, not the whole download.

    Raises:
        FailedError: nothing has arrived for so long.
    """
    size, since, logged = -1, time.monotonic(), 0.0
    while (complete := state.complete_in(directory)) is None:
        now, present = time.monotonic(), _present(directory)
        if present != size:
            size, since = present, now
        if now - since > timeout_s:
            raise FailedError(
                f"{directory} isn't complete, and nothing has arrived for {timeout_s:g} s "
                f"({size // MIB} MiB are there). See the log of what downloads into it"
            )
        if now - logged >= period_s:
            logged = now
            began = state.read(directory / state.PARTIAL)
            of = f"/{sum(began.files.values()) // MIB}" if began else ""
            log.info("waiting for the model's files", directory=directory, mib=f"{size // MIB}{of}")
        time.sleep(_LOOK_S)
    log.info("the model's files are there", directory=directory, uri=complete.uri)


def _present(directory: Path) -> int:
    """Add up the bytes on disk, of unfinished files too."""
    total = 0
    for folder, _, names in os.walk(directory):
        total += sum(state.size_of(Path(folder, name)) or 0 for name in names)
    return total
