"""Images and videos in chats by HTTP are those of gRPC: the same files, the same answer."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.http_api import CHAT, ask
from tests.support.media import media_files
from tests.support.media.media_suite import image, media_suite, user, video
from tests.support.models.vision_models import make_vision_model
from tests.support.processor.chats import chat, options

RED = media_files.solid(size=(56, 56), color="red")


def url(kind: str, data: bytes) -> dict[str, str]:
    return {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}


async def test_the_answer_is_the_same_as_grpcs(tmp_path: Path) -> None:
    model, film = make_vision_model(tmp_path / "qwen", "qwen2_5_vl"), media_files.video(8)
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "Compare "},
        {"type": "image_url", "image_url": url("image/png", RED)},
        {"type": "video_url", "video_url": url("video/mp4;codecs=x", film)},
    ]
    asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "ignore_eos": True}
    async with media_suite(model) as suite:
        by_grpc = await chat(
            suite.stub,
            messages=[user("Compare ", image(RED), video(film))],
            opts=options(6, ignore_eos=True),
        )
        response = await ask(suite.front.port, CHAT, asked)
        assert suite.front.core.media.budget.used == 0
    assert response.status == 200, response.body
    assert response.json["choices"][0]["message"]["content"] == by_grpc.text
    assert response.json["usage"]["prompt_tokens"] == by_grpc.usage.prompt_tokens


async def test_a_video_needs_no_max_tokens(tmp_path: Path) -> None:
    model = make_vision_model(tmp_path / "qwen", "qwen2_5_vl")

    def asked(film: bytes, **more: Any) -> dict[str, Any]:
        part = {"type": "video_url", "video_url": url("video/mp4", film)}
        return {"messages": [{"role": "user", "content": [part]}], **more}

    async with media_suite(model) as suite:
        response = await ask(suite.front.port, CHAT, asked(media_files.video(8)))
        long = asked(media_files.video(100, rate=1), max_tokens=8050)  # 200 positions of 8192
        refused = await ask(suite.front.port, CHAT, long)
    assert response.status == 200, response.body
    assert refused.status == 400
    error = refused.json["error"]
    assert error["param"] == "messages[0].content[0].video_url.url"
    assert error["code"] == "context_length_exceeded"
    assert "max_tokens 8050" in error["message"]


async def test_so_is_that_of_messages(tmp_path: Path) -> None:
    model = make_vision_model(tmp_path / "qwen", "qwen2_5_vl")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "See "},
        {"type": "image", "source": source},
    ]
    asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6}
    async with media_suite(model) as suite:
        by_grpc = await chat(suite.stub, messages=[user("See ", image(RED))], opts=options(6))
        response = await ask(suite.front.port, "/v1/messages", asked)
        refused = await ask(suite.front.port, "/v1/messages/count_tokens", asked)
    assert response.status == 200, response.body
    (block,) = response.json["content"]
    assert block["text"] == by_grpc.text
    assert refused.status == 400
    assert "images can't be counted" in refused.json["error"]["message"]


@pytest.mark.parametrize("where", ["https://example.org/a.png", "file:///a.png"])
async def test_urls_are_fetched_only_if_the_operator_allows_it(tmp_path: Path, where: str) -> None:
    model = make_vision_model(tmp_path / "qwen", "qwen2_5_vl")
    part = {"type": "image_url", "image_url": {"url": where}}
    async with media_suite(model) as suite:
        asked = {"messages": [{"role": "user", "content": [part]}]}
        response = await ask(suite.front.port, CHAT, asked)
    assert response.status == 400
    assert response.json["error"]["param"] == "messages[0].content[0].image_url.url"
