"""docs/client.md: each snippet runs as it stands, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from pathlib import Path

import pytest

from millstream_client.service_config import RECOMMENDED
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.fake_processor import FakeServer
from millstream_testing.in_process import suite
from tests.support.processor.fake_generators import FakeDiffusion, FakeEmbedding, generators

_PAGE = Path(__file__).parents[2] / "docs" / "client.md"
_SNIPPETS = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)

_SAYS = {
    "client.chat": ["ABCDEFG", "tokens"],
    "Be short.": ["ABCDEFG"],
    "client.conversation": ["ABCDEFG", "5 messages"],
    "image=picture": ["You said: <image of 9 bytes>What is in", "4 of 10 prompt tokens are"],
    "Image(picture)": ["on the left:<image of 9 bytes>and on", "You said: What colour is it?"],
    "generate_image": ["step 3 of 3", "circle.png made with seed 7"],
    "client.embed": ["3 vectors of 2 numbers", "0.731 Mix flour and water", "0.500 A GPU"],
    "InvalidRequestError": ["start.options.sampling.top_p must be"],
    "client.models": ["healthy: True", "tiny True 512", "tokens of 'user:What is Millstream?"],
    "dns:///": [],
}
"""A word of each snippet, in the page's order, and what the snippet prints."""


@pytest.mark.parametrize(
    ("word", "code"), list(zip(_SAYS, _SNIPPETS, strict=True)), ids=list(_SAYS)
)
async def test_a_snippet_runs(text_model: TextModel, tmp_path: Path, word: str, code: str) -> None:
    assert word in code
    picture = tmp_path / "demo" / "vision" / "pictures" / "red-circle.png"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(b"a picture")
    async with contextlib.AsyncExitStack() as stack:
        address = await _serve(stack, text_model, word)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", code.replace("127.0.0.1:50051", address)),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, err.decode()) == (0, "")
        for said in _SAYS[word]:
            assert said in out.decode()


async def _serve(stack: contextlib.AsyncExitStack, text_model: TextModel, word: str) -> str:
    """Serve what a snippet needs: text, or one of the servers that are no models."""
    if "picture" in word:
        return (await stack.enter_async_context(FakeServer())).address
    if word in ("generate_image", "client.embed"):
        return await stack.enter_async_context(generators(FakeDiffusion(), FakeEmbedding()))
    front, _ = await stack.enter_async_context(suite(text_model))
    return front.address


def test_the_page_shows_the_config_that_is_recommended() -> None:
    (shown,) = re.findall(r"^```json\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert json.loads(shown) == RECOMMENDED
