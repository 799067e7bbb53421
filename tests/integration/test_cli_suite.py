"""The whole path as a person walks it: `up` with the real services, then chat, models, a crash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.media import media_files
from tests.support.models.models import make_random_model
from tests.support.models.vision_models import make_vision_model
from tests.support.processes.command_line import MILLSTREAM, millstream

_WAIT_S = 60.0


async def _until(output: asyncio.StreamReader, text: str) -> str:
    """Read lines up to one with ``text``."""
    seen = ""
    async with asyncio.timeout(_WAIT_S):
        while line := (await output.readline()).decode():
            seen += line
            if text in line:
                return seen
    raise AssertionError(f"no {text!r} in {seen}")


@contextlib.asynccontextmanager
async def _up(
    folder: Path, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """Run `up` with simulated engines; yield it and what it prints."""
    up = await asyncio.create_subprocess_exec(
        *MILLSTREAM,
        *("up", "--engine", "simulated", *flags),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert up.stdout is not None
    try:
        yield up, up.stdout
    finally:
        if up.returncode is None:
            up.kill()
            await up.wait()


async def _stop(up: asyncio.subprocess.Process, output: asyncio.StreamReader) -> None:
    up.terminate()
    await _until(output, "stopped")
    assert await asyncio.wait_for(up.wait(), _WAIT_S) == 0


@pytest.mark.parametrize("topology", ["disaggregated", "aggregated"])
async def test_up_chat_crash_stop(tmp_path: Path, topology: str) -> None:
    make_random_model(tmp_path / "tiny")
    async with _up(tmp_path, "--model", "tiny", "--topology", topology) as (up, output):
        shown = await _until(output, "Ctrl-C stops the suite")
        row = re.search(r"decode-1 +\S+ +:\d+ +:\d+ +(\d+) ", shown)
        address = re.search(r"processor +(\S+) ", shown)
        assert row is not None
        assert address is not None
        at = ("--address", address[1])

        asked = await millstream(
            "chat", *at, "--once", "Hello", "--max-new-tokens", "9", "--show-usage"
        )
        assert (asked.code, asked.out[-1:]) == (0, "\n")
        assert "· 9 tokens ·" in asked.err
        models = await millstream("models", *at)
        assert "1 decode" in models.out or "1 aggregated" in models.out
        refused = await millstream("complete", "x", *at, "--top-p", "2")
        assert refused.code == 1
        assert "(INVALID_REQUEST)" in refused.err
        assert "): --top-p: must be above 0" in refused.err

        os.kill(int(row[1]), signal.SIGKILL)
        await _until(output, "decode-1 serves again")
        await _stop(up, output)


async def test_up_with_an_encode_worker_answers_about_a_picture_and_a_video(tmp_path: Path) -> None:
    make_vision_model(tmp_path / "eyes", "qwen2_5_vl")
    (tmp_path / "v.mp4").write_bytes(media_files.video(8))
    (tmp_path / "red.png").write_bytes(media_files.solid(size=(56, 56)))
    async with _up(tmp_path, "--model", "eyes", "--multimodal") as (up, output):
        shown = await _until(output, "Ctrl-C stops the suite")
        address = re.search(r"processor +(\S+) ", shown)
        assert address is not None
        at = ("--address", address[1])
        asked = await millstream(
            *("chat", *at, "--image", "red.png", "--once", "What is it?"),
            *("--max-new-tokens", "9", "--show-usage"),
            cwd=tmp_path,
        )
        assert (asked.code, asked.out[-1:]) == (0, "\n")
        assert "· 9 tokens ·" in asked.err
        assert "· 4 for images and videos" in asked.err
        video = await millstream(
            *("chat", *at, "--video", "v.mp4", "--once", "What is in this video?", "--show-usage"),
            cwd=tmp_path,
        )
        assert video.code == 0, video.err
        assert "for images and videos" in video.err
        models = await millstream("models", *at)
        assert "text, images, videos" in models.out
        assert "1 encode" in models.out
        await _stop(up, output)
