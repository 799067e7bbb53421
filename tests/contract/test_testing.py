"""docs/testing.md: each program runs as an outside user would run it, in a process of its own."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

_PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
_PROGRAMS = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
_SAYS = {
    "FakeServer": "You said: all is well\ntry again in 1.5 s\n2 chats\n",
    "alphabet_model": "ABCDEFG 7 tokens\nthe worker is idle again\n",
}
"""A word of each program, in the page's order, and what the program prints."""


@pytest.mark.parametrize(
    ("word", "code"), list(zip(_SAYS, _PROGRAMS, strict=True)), ids=list(_SAYS)
)
async def test_a_program_runs(tmp_path: Path, word: str, code: str) -> None:
    assert word in code
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", code),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert out.decode() == _SAYS[word]
