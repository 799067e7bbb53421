"""The page at `/`, in headless Chromium: a chat, a stop, pictures, an image; narrow and wide."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_testing.in_process import ALPHABET, MODEL, processor, suite, worker
from tests.support.clients.browser import CHROMIUM, Page, browsing
from tests.support.clients.client_builds import need
from tests.support.media import media_files
from tests.support.media.media_suite import media_suite
from tests.support.models.vision_models import make_vision_model
from tests.support.processor.another_port import another
from tests.support.processor.every_ability import PICTURES
from tests.support.processor.reading import SPOKEN, reading_model
from tests.support.processor.saying import saying
from tests.support.worker.diffusion_worker import Worker, diffusion_worker

pytestmark = pytest.mark.parametrize("width", [360, 1440])
TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]
LAST = "[...document.querySelectorAll('article')].at(-1)"
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
ANSWERED = "$('chat-status').textContent.includes('written')"


@pytest.fixture(autouse=True)
def browser() -> None:
    need(CHROMIUM)


@contextlib.asynccontextmanager
async def visiting(address: str, folder: Path, width: int) -> AsyncIterator[Page]:
    """Open the page; at the end nothing may have gone wrong, or elsewhere."""
    async with browsing(folder) as page:
        await page.open(address, width)
        await page.until("$('rows').children.length > 0")
        yield page
        assert page.errors == []
        assert page.hosts <= {address, ""}  # data URLs have no host
        assert await page.run(FITS)


async def ask(page: Page, text: str) -> None:
    """Send a message, by the keyboard."""
    await page.run("$('text').focus()")
    await page.type(text)
    await page.press("Enter")


async def test_reasoning_calls_and_their_results(tmp_path: Path, *, width: int) -> None:
    model = reading_model(tmp_path / "model")
    config = replace(ALPHABET, context_length=2048)
    async with (
        worker(config) as one,
        processor({MODEL: model}, [one.address], formats={MODEL: "hermes"}) as front,
        visiting(front.address, tmp_path / "profile", width) as page,
    ):
        await page.run(f"$('tools').value = {json.dumps(json.dumps(TOOLS))}")
        with saying(model, SPOKEN, "<think>so</think>Cold.") as prompts:
            await ask(page, "Is it cold?")
            await page.until(ANSWERED)
            said = await page.run(f"{LAST}.innerText")
            assert "Let me see." in said
            assert 'f({"s": "Oslo"})' in said
            assert await page.run(f"{LAST}.querySelector('details p').textContent") == "hm"
            assert (
                await page.run("document.activeElement.labels[0].innerText") == "What f returned "
            )
            await page.type("-3")
            await page.press("Tab")
            await page.type("snow")
            await page.press("Tab")
            await page.press("Enter")
            await page.until(f"{LAST}.innerText.includes('Cold.')")
            await page.until(ANSWERED)
    assert "user:Is it cold?|assistant:(hm)Let me see.[" in prompts[1]
    assert "tool:-3|tool:snow|" in prompts[1]


async def test_escape_stops_an_answer(tmp_path: Path, *, width: int) -> None:
    model = reading_model(tmp_path / "model", chat_template=None)
    slow = replace(ALPHABET, step_s=0.05)
    async with (
        suite(model, slow) as (front, one),
        visiting(front.address, tmp_path / "profile", width) as page,
    ):
        await ask(page, "Go on.")
        await page.until(f"{LAST}.innerText.includes('ABC')")
        await page.press("Escape")
        await page.until("$('chat-status').textContent === 'Stopped.'")
        await one.until_idle()
        assert await page.run("$('log').ariaBusy") == "false"
        await ask(page, "Again.")  # the answer so far is a part of the conversation
        await page.until("document.querySelectorAll('article').length === 4")
        assert (await page.run("turns.map((turn) => turn.role).join()")) == "user,assistant,user"


async def test_a_picture_is_sent_and_shown(tmp_path: Path, *, width: int) -> None:
    model = make_vision_model(tmp_path / "qwen", "qwen2_5_vl")
    file = tmp_path / "red.png"
    file.write_bytes(media_files.solid(size=(56, 56), color="red"))
    async with (
        media_suite(model) as served,
        visiting(served.front.address, tmp_path / "profile", width) as page,
    ):
        await page.run("$('most').value = 6")
        await page.choose("#pictures", file)
        await ask(page, "What is it?")
        await page.until(ANSWERED)
        shown = "document.querySelector('article img')"
        assert await page.run(f"[{shown}.naturalWidth, {shown}.alt]") == [
            56,
            "The picture that you sent",
        ]
        assert await page.run(f"{LAST}.querySelector('p').textContent.length") > 0


@contextlib.asynccontextmanager
async def drawing(folder: Path, width: int) -> AsyncIterator[tuple[Page, Worker]]:
    async with (
        diffusion_worker() as one,
        processor({PICTURES: None}, [one.settings.listen]) as front,
        visiting(front.address, folder, width) as page,
    ):
        one.engine.by_hand()
        await page.run("tabs[0].focus()")
        await page.press("ArrowRight")
        await page.run("$('prompt').focus()")
        await page.type("a red cat")
        await page.run("$('make').requestSubmit()")
        yield page, one


async def test_an_image_with_its_progress(tmp_path: Path, *, width: int) -> None:
    async with drawing(tmp_path / "profile", width) as (page, one):
        for step in range(1, 5):
            one.engine.allow(1)
            await page.until(f"$('progress').value === {step / 4}")
            assert await page.run("$('image-status').textContent") == f"Step {step} of 4."
        one.engine.allow(1)
        await page.until("$('image-status').textContent.startsWith('Done, with the seed ')")
        await page.until("$('result').naturalWidth === 64")
        assert await page.run("$('result').alt") == "a red cat"
        assert await page.run("$('download').download.endsWith('.png')")


async def test_an_image_can_be_stopped(tmp_path: Path, *, width: int) -> None:
    async with drawing(tmp_path / "profile", width) as (page, one):
        one.engine.allow(1)
        await page.until("$('progress').value > 0")
        await page.press("Escape")
        await page.until("$('image-status').textContent === 'Stopped.'")
        await one.until_open(0)


async def test_a_key_is_asked_for_and_kept(tmp_path: Path, *, width: int) -> None:
    model, key = reading_model(tmp_path / "model", chat_template=None), "k" * 32
    auth = AuthPolicy(keys=ApiKeys(inline=f"alice:{key}"))
    async with (
        suite(model) as (front, _),
        another(front, auth=auth) as port,
        browsing(tmp_path / "profile") as page,
    ):
        await page.open(f"127.0.0.1:{port}", width)
        await page.until("$('models-status').textContent.includes(\"can't be listed\")")
        assert await page.run("document.activeElement.id") == "key"
        await page.type(key)
        await page.press("Tab")
        await page.until("$('rows').children.length > 0")
        assert await page.run("sessionStorage.getItem('key')") == key
        await page.run("$('most').value = 3")
        await ask(page, "Go on.")
        await page.until(ANSWERED)


async def test_each_control_has_a_name_and_nothing_else_can_run(
    tmp_path: Path, *, width: int
) -> None:
    model = reading_model(tmp_path / "model")
    async with (
        suite(model) as (front, _),
        visiting(front.address, tmp_path / "profile", width) as page,
    ):
        for tab in ("chat", "image", "models"):
            await page.run(f"$('tab-{tab}').click()")
            await page.run(
                "document.querySelectorAll('details').forEach((d) => { d.open = true; })"
            )
            found = await page.controls()
            assert [role for role, name in found if not name and role != "status"] == []
            assert ("tab", "Models") in found
        await page.run(
            "const s = document.createElement('script'); s.textContent = 'window.hit = 1';"
            "document.body.append(s)"
        )
        with pytest.raises(RuntimeError, match="Failed to fetch"):
            await page.run("fetch('http://127.0.0.2:9/')")
        assert await page.run("window.hit") is None
        assert len(page.errors) >= 2
        page.errors.clear()
