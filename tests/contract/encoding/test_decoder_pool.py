"""Decoder processes: what they may take, how they end, and that one's end disturbs no other."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from PIL import Image

from millstream_server.media.decoding.pool import DecoderPool
from millstream_server.media.items import Frames, MediaLimits, Modality
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
)
from millstream_testing.waiting import until
from tests.support.media.media_files import png_header, repeated_frame, saved, solid, video

LIMITS = MediaLimits()
SHORT = MediaLimits(decode_timeout_s=3.0)
ENDED = "the decoder of images and videos was ended; send it again"


@asynccontextmanager
async def _pool(limits: MediaLimits = LIMITS, processes: int = 2) -> AsyncIterator[DecoderPool]:
    pool = DecoderPool(limits, processes)
    try:
        yield pool
    finally:
        await pool.close()


def _pids(pool: DecoderPool) -> list[int]:
    return [decoder.pid for decoder in pool._decoders if decoder.pid is not None]


async def _red(pool: DecoderPool) -> Frames:
    frames = await pool.decode(solid(), Modality.IMAGE)
    assert bytes(frames.data[:3]) == b"\xff\0\0"
    return frames


async def _refusal(pool: DecoderPool, data: bytes, modality: Modality = Modality.IMAGE) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        await pool.decode(data, modality)
    (violation,) = refused.value.violations
    assert violation.field == "data"
    return violation.description


async def _stopped(pool: DecoderPool) -> int:
    """Let the only process hang; returns its id."""
    await _red(pool)
    (pid,) = _pids(pool)
    os.kill(pid, signal.SIGSTOP)
    return pid


def _has_a_file(pool: DecoderPool) -> bool:
    """Whether the only process has been sent something that it hasn't read: it hangs."""
    link = pool._decoders[0]._link
    assert link is not None
    (unread,) = struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)))
    return bool(unread > 0)


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_an_image() -> None:
    async with _pool() as pool:
        frames = await pool.decode(memoryview(solid("PNG", (7, 3))), Modality.IMAGE)
    assert (frames.width, frames.height, frames.count, frames.indices) == (7, 3, 1, (0,))
    assert bytes(frames.data) == b"\xff\0\0" * 21
    assert frames.data.readonly
    assert frames.modality is Modality.IMAGE


async def test_a_video() -> None:
    async with _pool() as pool:
        frames = await pool.decode(video(12), Modality.VIDEO)
    assert (frames.width, frames.height, frames.count) == (64, 48, 6)
    assert (frames.fps, frames.total_frames) == (4.0, 12)
    assert frames.indices == (0, 2, 4, 7, 9, 11)
    assert len(frames.data) == 6 * 64 * 48 * 3


async def test_processes_are_started_when_needed_and_used_again() -> None:
    async with _pool() as pool:
        assert _pids(pool) == []
        await _red(pool)
        (first,) = _pids(pool)
        await _red(pool)
        await _red(pool)
        assert len(pids := _pids(pool)) == 2
        await asyncio.gather(*(_red(pool) for _ in range(8)))
        assert _pids(pool) == pids
        assert first in pids


async def test_refusals_leave_the_process_alone() -> None:
    async with _pool(processes=1) as pool:
        await _red(pool)
        pids = _pids(pool)
        assert await _refusal(pool, png_header(20_000, 20_000)) == (
            "is 20000 x 20000 = 400000000 pixels; 36000000 are allowed: send a smaller one"
        )
        assert await _refusal(pool, solid()[:-30]) == (
            "is truncated or damaged: it can't be decoded as PNG"
        )
        assert await _refusal(pool, b"<svg/>") == (
            "is an SVG; PNG, JPEG, WebP and GIF are accepted"
        )
        await _red(pool)
        assert _pids(pool) == pids


async def test_a_decompression_bomb() -> None:
    # 115 KB that would be 115 MB.
    bomb = saved(Image.new("RGB", (6200, 6200)), "PNG")
    assert len(bomb) < 200_000
    async with _pool() as pool:
        assert (await _refusal(pool, bomb)).startswith("is 6200 x 6200 = 38440000 pixels;")


@pytest.mark.parametrize("container", ["mp4", "webm"])
async def test_a_video_of_100_000_frames(container: str) -> None:
    data = repeated_frame(100_000, container)
    frames = "100000" if container == "mp4" else "20001"  # WebM's header doesn't tell
    async with _pool() as pool:
        assert await _refusal(pool, data, Modality.VIDEO) == (
            f"has {frames} frames or more; 20000 are allowed: send a shorter video, or one with "
            "fewer frames per second"
        )


async def test_too_many_bytes() -> None:
    data = solid()
    async with _pool(MediaLimits(max_item_bytes=len(data) - 1)) as pool:
        assert await _refusal(pool, data) == f"has {len(data)} bytes; {len(data) - 1} are allowed"
        assert _pids(pool) == []


async def test_a_file_that_needs_too_much_memory_fails_alone() -> None:
    async with _pool(MediaLimits(decode_memory_bytes=300 << 20), processes=1) as pool:
        large = saved(Image.new("RGB", (6000, 6000)), "PNG")
        assert await _refusal(pool, large) == (
            "needs more memory to be decoded than the 314572800 bytes allowed: send a smaller one"
        )
        await _red(pool)


async def test_a_decoder_that_hangs_is_killed_and_others_go_on() -> None:
    async with _pool(SHORT) as pool:
        await _red(pool)
        (stuck,) = _pids(pool)
        await _red(pool)  # the other one has started, too: the first is the next one
        os.kill(stuck, signal.SIGSTOP)
        hanging = asyncio.create_task(_refusal(pool, solid()))
        await until(lambda: pool._free.qsize() == 1)
        for _ in range(5):
            await _red(pool)
        assert not hanging.done()
        assert await hanging == (
            "took longer than 3 s to be decoded, which is the most allowed: send a smaller one"
        )
        assert _gone(stuck)
        await asyncio.gather(*(_red(pool) for _ in range(4)))
        assert len(_pids(pool)) == 2


async def test_a_crash_fails_its_own_request() -> None:
    async with _pool(processes=1) as pool:
        pid = await _stopped(pool)
        crashing = asyncio.create_task(_refusal(pool, solid()))
        waiting = asyncio.create_task(_red(pool))
        await until(lambda: _has_a_file(pool))
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)
        assert await crashing == (
            "made the decoder crash: it may be damaged; save it anew and send that"
        )
        await waiting
        assert _gone(pid)


async def test_killed_from_outside() -> None:
    # As the kernel does when the machine is out of memory: the file need not be to blame.
    async with _pool(processes=1) as pool:
        pid = await _stopped(pool)
        killed = asyncio.create_task(_red(pool))
        await until(lambda: _has_a_file(pool))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(UnavailableError) as failed:
            await killed
        assert (failed.value.message, failed.value.retryable) == (ENDED, True)
        await _red(pool)


async def test_a_file_cancelled_while_its_process_starts_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _pool(processes=1) as pool:
        cancelled = asyncio.create_task(_red(pool))
        await until(lambda: len(_pids(pool)) == 1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await _red(pool)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_one_that_died_between_two_files_is_replaced() -> None:
    async with _pool(processes=1) as pool:
        await _red(pool)
        (pid,) = _pids(pool)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: _pids(pool) == [])
        await _red(pool)


async def test_cancelling_kills_the_process_and_leaves_the_pool_healthy() -> None:
    async with _pool(processes=1) as pool:
        pid = await _stopped(pool)
        running = asyncio.create_task(_red(pool))
        waiting = asyncio.create_task(_red(pool))
        last = asyncio.create_task(_red(pool))
        await until(lambda: _has_a_file(pool))
        waiting.cancel()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await last
        assert _gone(pid)
        assert _pids(pool) != [pid]


async def test_closing_fails_what_runs_and_what_waits() -> None:
    pool = DecoderPool(LIMITS, 1)
    pid = await _stopped(pool)
    calls = [asyncio.create_task(_red(pool)) for _ in range(3)]
    await until(lambda: _has_a_file(pool))
    await pool.close()
    await pool.close()
    results = await asyncio.gather(*calls, _red(pool), return_exceptions=True)
    closed = "the decoder of images and videos is closed"
    assert [type(result) for result in results] == [UnavailableError] * 4
    assert {r.message for r in results if isinstance(r, ServingError)} == {ENDED, closed}
    assert _gone(pid)


async def test_one_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _pool(processes=1) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", "/bin/false")
            with pytest.raises(UnavailableError) as failed:
                await _red(pool)
        assert failed.value.message == "the decoder of images and videos did not start"
        await _red(pool)


async def test_a_vendor_that_is_missing_is_our_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "PIL.py").write_text("raise ImportError('not here')")
    async with _pool(processes=1) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "path", [str(tmp_path), *sys.path])
            with pytest.raises(InternalError) as failed:
                await _red(pool)
        assert failed.value.error_id in failed.value.message
        assert "not here" not in failed.value.message


async def test_a_process_has_no_secrets_and_little_power(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILLSTREAM_TICKET_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    async with _pool() as pool:
        await _red(pool)
        (pid,) = _pids(pool)
        proc = Path(f"/proc/{pid}")
        assert "secret" not in (proc / "environ").read_text()
        limits = (proc / "limits").read_text().splitlines()
        found = {line[:25].strip(): line[26:].split()[:2] for line in limits}
        assert found["Max file size"] == ["0", "0"]
        assert found["Max core file size"] == ["0", "0"]
        assert found["Max address space"] == [str(2 << 30)] * 2
        assert int(found["Max cpu time"][0]) <= 45
        assert "NoNewPrivs:\t1" in (proc / "status").read_text()
        modules = (proc / "maps").read_text()
        assert "libtorch" not in modules
        assert "av/" not in modules  # not before the first video


_PARENT = """
import asyncio, sys
from millstream_server.media.decoding.pool import DecoderPool
from millstream_server.media.items import Modality
from millstream_server.media.items import MediaLimits

async def main():
    pool = DecoderPool(MediaLimits(), 2)
    data = bytes.fromhex(sys.argv[1])
    await asyncio.gather(*(pool.decode(data, Modality.IMAGE) for _ in range(2)))
    print(*(decoder.pid for decoder in pool._decoders), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_none_outlives_its_killed_parent() -> None:
    command = [sys.executable, "-c", _PARENT, solid().hex()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGSTOP)  # one can't read the end of its input
    parent.kill()
    await parent.wait()
    await until(lambda: all(map(_gone_or_zombie, pids)))


def _gone_or_zombie(pid: int) -> bool:
    """Whether a process ended, also where nobody collects orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_the_event_loop_goes_on_meanwhile() -> None:
    data = saved(Image.new("RGB", (6000, 6000)), "PNG", compress_level=1)
    async with _pool() as pool:
        decoding = asyncio.gather(*(pool.decode(data, Modality.IMAGE) for _ in range(3)))
        ticks = 0
        while not decoding.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert [len(frames.data) for frames in await decoding] == [6000 * 6000 * 3] * 3
    # They take a second and more; a few long waits are the machine's.
    assert ticks > 100
