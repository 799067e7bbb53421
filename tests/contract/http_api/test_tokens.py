"""/tokenize, /detokenize and /v1/chat/completions/render, in vLLM's shapes."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import CONTEXT_LENGTH, InProcessProcessor, suite
from tests.support.clients.http_api import CHAT, HI, ask
from tests.support.media import media_files
from tests.support.media.media_suite import media_suite
from tests.support.models.vision_models import make_vision_model

RED = media_files.solid(size=(56, 56), color="red")
RENDER = f"{CHAT}/render"
CHATTED = "user:hi\n@"


@pytest_asyncio.fixture
async def front(tmp_path: Path) -> AsyncIterator[InProcessProcessor]:
    async with suite(TextModel.load(alphabet_model(tmp_path / "model"))) as (served, _):
        yield served


async def test_a_prompt_becomes_tokens_and_text_again(front: InProcessProcessor) -> None:
    asked = {"model": "tiny", "prompt": "AB", "return_token_strs": True}
    tokens = (await ask(front.port, "/tokenize", asked)).json
    assert tokens == {
        "count": 2,
        "max_model_len": CONTEXT_LENGTH,
        "tokens": [35, 36],
        "token_strs": ["A", "B"],
    }
    text = await ask(front.port, "/detokenize", {"model": "tiny", "tokens": tokens["tokens"]})
    assert text.json == {"prompt": "AB"}


async def test_many_tokens_come_in_pieces(front: InProcessProcessor) -> None:
    asked = {"prompt": "A" * 9000, "return_token_strs": True}
    response = await ask(front.port, "/tokenize", asked)
    assert response.headers["transfer-encoding"] == "chunked"
    assert response.json["tokens"] == [35] * 9000
    assert response.json["token_strs"] == ["A"] * 9000
    text = await ask(front.port, "/detokenize", {"tokens": response.json["tokens"]})
    assert text.json == {"prompt": "A" * 9000}


async def test_nothing_becomes_no_tokens(front: InProcessProcessor) -> None:
    response = await ask(front.port, "/tokenize", {"prompt": ""})
    assert (response.json["count"], response.json["tokens"]) == (0, [])
    assert (await ask(front.port, "/detokenize", {"tokens": []})).json == {"prompt": ""}


@pytest.mark.parametrize(("skip", "text"), [(None, "A<|im_end|>"), (True, "A")])
async def test_special_tokens_are_text_too(
    front: InProcessProcessor, *, skip: bool | None, text: str
) -> None:
    asked = {"tokens": [35, 2], "skip_special_tokens": skip}
    assert (await ask(front.port, "/detokenize", asked)).json == {"prompt": text}


async def test_a_conversation_is_rendered_for_both(front: InProcessProcessor) -> None:
    tokens = (await ask(front.port, "/tokenize", HI)).json["tokens"]
    assert (await ask(front.port, "/detokenize", {"tokens": tokens})).json == {"prompt": CHATTED}
    body = {**HI, "max_tokens": 5, "n": 2, "stop": ["x"], "seed": 3, "logit_bias": {"7": 1}}
    response = await ask(front.port, RENDER, body, headers="X-Request-Id: me-1\r\n")
    assert response.json == {
        "request_id": "me-1",
        "model": "tiny",
        "token_ids": tokens,
        "prompt_text": CHATTED,
        "sampling_params": {
            "max_tokens": 5,
            "n": 2,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": 0,
            "ignore_eos": False,
            "seed": 3,
            "stop": ["x"],
            "stop_token_ids": [2],
            "logit_bias": {"7": 1.0},
            "structured_outputs": None,
        },
        "features": None,
        "cache_salt": None,
        "stream": False,
    }


async def test_media_have_their_places(tmp_path: Path) -> None:
    model = make_vision_model(tmp_path / "qwen", "qwen2_5_vl")
    url = "data:image/png;base64," + base64.b64encode(RED).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    asked = {"messages": [{"role": "user", "content": [part]}]}
    async with media_suite(model) as served:
        response = await ask(served.front.port, RENDER, asked)
        refused = await ask(served.front.port, "/tokenize", asked)
        assert served.front.core.media.budget.used == 0
    features, ids = response.json["features"], response.json["token_ids"]
    ((place,),) = features["mm_placeholders"].values()
    (same,) = set(ids[place["offset"] :][: place["length"]])
    assert ids.count(same) == place["length"]
    assert [len(digest) for digest in features["mm_hashes"]["image"]] == [64]
    assert refused.json["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/tokenize", {}, "prompt", "send prompt or messages"),
        ("/tokenize", {**HI, "prompt": "A"}, "prompt", "send one of them"),
        ("/tokenize", {**HI, "add_special_tokens": True}, "add_special_tokens", "leave it out"),
        ("/tokenize", {"messages": []}, "messages", "1 to 4096"),
        ("/tokenize", {"messages": HI["messages"], "chat_template_kwargs": {"thinking": True}},
         "chat_template_kwargs.thinking", "template"),
        ("/detokenize", {"tokens": [440]}, "tokens[0]", "vocabulary's size, 440"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", ">= 0"),
        (RENDER, {**HI, "temperature": -1}, "temperature", "0 or more"),
        (RENDER, {"messages": []}, "messages", "1 to 4096"),
    ],
)  # fmt: skip
async def test_refusals(
    front: InProcessProcessor, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    response = await ask(front.port, path, body)
    error = response.json["error"]
    assert (response.status, error["param"]) == (400, param), error
    assert says in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", RENDER])
async def test_a_model_that_is_not_served(front: InProcessProcessor, path: str) -> None:
    body = {**HI, "model": "none", "tokens": [35]}
    response = await ask(front.port, path, body)
    assert (response.status, response.json["error"]["code"]) == (404, "model_not_found")
