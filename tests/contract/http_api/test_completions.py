"""/v1/completions: what it answers, whole and in events."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from millstream_server.processor.http import schema
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import ALPHABET, InProcessProcessor, suite
from tests.support.clients.http_api import ask, client
from tests.support.wire.http_service import post, raw

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(alphabet_model(tmp_path_factory.mktemp("plain") / "model"))


@pytest_asyncio.fixture
async def front(model: TextModel) -> AsyncIterator[InProcessProcessor]:
    async with suite(model) as (served, _):
        yield served


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [67, 68], [[67, 68]]])
async def test_a_text_or_token_ids_go_on(front: InProcessProcessor, prompt: Any) -> None:
    async with client(front.address) as openai:
        answer = await openai.completions.create(
            model="tiny", prompt=prompt, max_tokens=4, logprobs=1
        )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("cdef", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["c", "d", "e", "f"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 6


async def test_the_same_in_events(front: InProcessProcessor) -> None:
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 4, "stream": True, "logprobs": 0}
    response = await ask(front.port, PATH, body)
    choices = [event["choices"][0] for event in response.events]
    assert {event["object"] for event in response.events} == {"text_completion"}
    assert "".join(choice["text"] for choice in choices) == "cdef"
    assert [at for c in choices for at in c["logprobs"]["text_offset"]] == [0, 1, 2, 3]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_have_one_body(front: InProcessProcessor, *, stream: bool) -> None:
    body = {"model": "tiny", "prompt": ["a", [70], "xyA"], "n": 2, "max_tokens": 3, "logprobs": 0}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await ask(front.port, PATH, {**body, **options})
    said = response.events if stream else [response.json]
    texts, tokens, reasons = (dict.fromkeys(range(6), "") for _ in range(3))
    for choice in [choice for each in said for choice in each["choices"]]:
        index = choice["index"]
        texts[index] += choice["text"]
        tokens[index] += "".join(choice["logprobs"]["tokens"]) if choice["logprobs"] else ""
        reasons[index] += choice["finish_reason"] or ""
    assert list(texts.values()) == ["bcd", "bcd", "efg", "efg", "BCD", "BCD"]
    assert texts == tokens
    assert set(reasons.values()) == {"length"}
    assert len({each["id"] for each in said}) == 1
    assert [each["usage"] is None for each in said] == [True] * (len(said) - 1) + [False]
    usage = said[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 18)


async def test_a_reader_that_leaves_frees_all_prompts(model: TextModel) -> None:
    body = {"model": "tiny", "prompt": ["a"] * 3, "max_tokens": 400, "stream": True}
    async with suite(model, replace(ALPHABET, step_s=0.02)) as (front, one):
        async with raw(front.port) as wire:
            wire.send(post(PATH, json.dumps(body).encode()))
            await one.until_running(3)
        await one.until_idle()
        assert front.core.work.count == 0


async def test_a_prompt_that_is_refused_ends_those_before_it(model: TextModel) -> None:
    body = {"model": "tiny", "prompt": ["a", "a" * 600], "max_tokens": 400, "stream": True}
    async with suite(model, replace(ALPHABET, step_s=0.02)) as (front, one):
        response = await ask(front.port, PATH, body)
        assert (response.status, response.json["error"]["param"]) == (400, "prompt[1]")
        await one.until_idle()


async def test_without_a_number_it_has_16_tokens(front: InProcessProcessor) -> None:
    response = await ask(front.port, PATH, {"model": "tiny", "prompt": "A"})
    assert response.json["choices"][0]["text"] == "BCDEFGHIJKLMNOPQ"


@pytest.mark.parametrize(
    ("changed", "param", "says"),
    [
        ({"prompt": ["a", 1]}, "prompt[1]", "a text or a list of token ids"),
        ({"prompt": ["a", [100_000]]}, "prompt[1][0]", "0 to 439"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128, not 129"),
        ({"prompt": [1, "b"]}, "prompt", "a text or a list of token ids"),
        ({"prompt": []}, "prompt", "a text or a list of token ids"),
        ({"prompt": [-1]}, "prompt", "a text or a list of token ids"),
        ({"prompt": [100_000]}, "prompt[0]", "0 to 439"),
        ({"prompt": "a" * 600}, "prompt", "context length"),
        ({"echo": True}, "echo", "not supported by this server"),
        ({"suffix": "x"}, "suffix", "not supported by this server"),
        ({"best_of": 3}, "best_of", "must be n"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    ],
)
async def test_refusals(
    front: InProcessProcessor, changed: dict[str, object], param: str, says: str
) -> None:
    body = {"model": "tiny", "prompt": "ab", **changed}
    response = await ask(front.port, PATH, body)
    error = response.json["error"]
    assert (response.status, error["param"]) == (400, param)
    assert says in error["message"]


async def test_a_text_that_is_no_utf_8_is_refused(front: InProcessProcessor) -> None:
    response = await ask(front.port, PATH, b'{"model": "tiny", "prompt": "\xff"}')
    assert (response.status, response.json["error"]["param"]) == (400, None)


async def test_large_bodies_are_read_in_a_thread(front: InProcessProcessor) -> None:
    read_by = set[str]()
    unknown = {"model": "tiny", "prompt": "ab", "max_tokens": 2, "else": "x" * 70_000}
    with pytest.MonkeyPatch.context() as patch:
        read = schema.read

        def noted(*arguments: Any) -> Any:
            read_by.add(threading.current_thread().name)
            return read(*arguments)

        patch.setattr(schema, "read", noted)
        assert (await ask(front.port, PATH, unknown)).status == 200
        assert (await ask(front.port, PATH, {**unknown, "echo": True})).status == 400
    assert read_by
    assert read_by <= {"work-0", "work-1"}
