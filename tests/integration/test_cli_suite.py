"""The whole path as a person walks it: `up` with the real services, then chat, models, a crash."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.command_line import MILLSTREAM, millstream
from tests.support.models import make_random_model

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


@pytest.mark.parametrize("topology", ["disaggregated", "aggregated"])
async def test_up_chat_crash_stop(tmp_path: Path, topology: str) -> None:
    make_random_model(tmp_path / "tiny")
    up = await asyncio.create_subprocess_exec(
        *MILLSTREAM,
        *("up", "--model", "tiny", "--engine", "simulated", "--topology", topology),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert up.stdout is not None
    try:
        shown = await _until(up.stdout, "Ctrl-C stops the suite")
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
        assert "sampling.top_p" in refused.err

        os.kill(int(row[1]), signal.SIGKILL)
        await _until(up.stdout, "decode-1 serves again")
        up.terminate()
        await _until(up.stdout, "stopped")
        assert await asyncio.wait_for(up.wait(), _WAIT_S) == 0
    finally:
        if up.returncode is None:
            up.kill()
            await up.wait()
