"""/v1/images/generations and /v1/images/edits: what they answer, whole and in events."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from PIL import Image
from python_multipart.multipart import parse_options_header

from millstream_server.engines.simulated.diffuser import SimulatedDiffuserConfig
from millstream_server.runtime.errors import OverloadedError
from millstream_testing.waiting import until
from tests.support.clients.http_api import ask, client
from tests.support.processor.every_ability import PICTURES, EveryAbility, every_ability
from tests.support.wire.http_service import post, raw
from tests.support.worker.diffusion_worker import SIZE, Setup

MAKE = "/v1/images/generations"
EDIT = "/v1/images/edits"


@pytest_asyncio.fixture
async def suite(tmp_path: Path) -> AsyncIterator[EveryAbility]:
    async with every_ability(tmp_path / "model") as served:
        yield served


def opened(encoded: str | None) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(encoded or "")))


def png(size: int = 8) -> bytes:
    file = BytesIO()
    Image.new("RGB", (size, size), "red").save(file, "PNG")
    return file.getvalue()


async def test_images_of_a_prompt(suite: EveryAbility) -> None:
    async with client(suite.front.address) as api:
        answer = await api.images.generate(
            model=PICTURES,
            prompt="a red cat",
            n=2,
            size="auto",
            extra_body={"seed": 7, "num_inference_steps": 3},
        )
    assert answer.data is not None
    assert [opened(one.b64_json).size for one in answer.data] == [(SIZE, SIZE)] * 2
    assert [one.model_extra for one in answer.data] == [{"seed": 7}, {"seed": 8}]
    assert (answer.output_format, answer.usage and answer.usage.input_tokens) == ("png", 3)
    assert [job.steps for job in suite.pictures.engine.jobs] == [3, 3]
    assert suite.front.core.front.held.used == 0


async def test_a_size_and_a_format(suite: EveryAbility) -> None:
    body = {"prompt": "a cat", "size": f"{2 * SIZE}x{SIZE}", "output_format": "webp"}
    response = await ask(suite.port, MAKE, body)
    image = opened(response.json["data"][0]["b64_json"])
    assert (image.size, image.format) == ((2 * SIZE, SIZE), "WEBP")


async def test_previews_and_the_image_in_events(suite: EveryAbility) -> None:
    engine = suite.pictures.engine
    engine.by_hand()
    engine.allow(2)  # a preview that a later one overtakes isn't sent
    async with client(suite.front.address, _strict_response_validation=False) as api:
        stream = await api.images.generate(
            model=PICTURES, prompt="a cat", stream=True, partial_images=2
        )
        events: list[Any] = [await anext(stream)]
        engine.allow(100)
        events += [event async for event in stream]
    *partial, done = events
    assert done.type == "image_generation.completed"
    assert opened(done.b64_json).size == (SIZE, SIZE)
    assert done.usage.input_tokens == 2
    assert {event.type for event in partial} == {"image_generation.partial_image"}
    assert [event.partial_image_index for event in partial] == list(range(len(partial)))
    assert 1 <= len(partial) <= 2
    assert opened(partial[0].b64_json).format == "WEBP"
    assert engine.jobs[-1].preview_every_steps == 2  # of 4 steps


async def test_progress_step_by_step_if_it_is_asked_for(suite: EveryAbility) -> None:
    engine = suite.pictures.engine
    engine.by_hand()
    async with raw(suite.port) as wire:
        body = {"prompt": "a cat", "stream": True, "progress": True, "partial_images": 1, "n": 2}
        wire.send(post(MAKE, json.dumps(body).encode()))
        said = b""
        for step in range(1, 5):
            engine.allow(1)
            while b'"step":%d,' % step not in said:
                said += await asyncio.wait_for(wire.reader.read(1 << 20), 5)
        engine.allow(100)
        while not said.endswith(b"0\r\n\r\n"):
            said += await asyncio.wait_for(wire.reader.read(1 << 20), 5)
    assert b'"type":"image_generation.progress","queue_position":0,"image_index":0,' in said
    assert 1 <= said.count(b"event: image_generation.partial_image\n") <= 2
    assert said.count(b"event: image_generation.completed\n") == 2


async def test_a_client_that_leaves_frees_the_worker(suite: EveryAbility) -> None:
    suite.pictures.engine.by_hand()
    async with raw(suite.port) as wire:
        wire.send(post(MAKE, b'{"prompt": "a cat", "stream": true}'))
        await suite.pictures.until_open(1)
    await suite.pictures.until_open(0)
    await until(lambda: suite.front.core.front.work.count == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_event_has_a_status(
    suite: EveryAbility, *, stream: bool
) -> None:
    suite.pictures.engine.fault = lambda *_: OverloadedError("too little memory")
    response = await ask(suite.port, MAKE, {"prompt": "a cat", "stream": stream})
    assert (response.status, response.json["error"]["message"]) == (429, "too little memory")


async def test_a_failure_behind_an_event_is_one(suite: EveryAbility) -> None:
    engine = suite.pictures.engine
    engine.by_hand()
    async with client(suite.front.address, _strict_response_validation=False) as api:
        stream: Any = await api.images.generate(
            prompt="a cat", stream=True, extra_body={"progress": True}
        )
        events = aiter(stream)
        engine.allow(1)
        await anext(events)
        engine.die()
        with pytest.raises(openai.APIError, match="engine"):
            [event async for event in events]


# ---- edits ---------------------------------------------------------------------------------------


async def test_an_image_is_edited(suite: EveryAbility) -> None:
    async with client(suite.front.address) as api:
        answer = await api.images.edit(
            model=PICTURES,
            image=("in.png", png(), "image/png"),
            prompt="blue",
            extra_body={"strength": 0.5, "seed": 3},
        )
    assert answer.data is not None
    assert opened(answer.data[0].b64_json).size == (SIZE, SIZE)
    (job,) = suite.pictures.engine.jobs
    assert (job.strength, job.seed, job.prompt) == (0.5, 3, "blue")
    assert job.input_image is not None


async def test_an_edit_in_events(suite: EveryAbility) -> None:
    async with client(suite.front.address, _strict_response_validation=False) as api:
        stream = await api.images.edit(image=[png()], prompt="blue", stream=True)
        events = [event async for event in stream]
    assert [event.type for event in events] == ["image_edit.completed"]


async def test_a_pipeline_that_edits_nothing_says_so(tmp_path: Path) -> None:
    setup = Setup(SimulatedDiffuserConfig(image_to_image=False))
    async with (
        every_ability(tmp_path / "model", setup) as suite,
        client(suite.front.address) as api,
    ):
        with pytest.raises(openai.BadRequestError, match="images from prompts only") as refused:
            await api.images.edit(image=png(), prompt="blue")
    assert refused.value.body == {
        "message": "image: this model makes images from prompts only",
        "type": "invalid_request_error",
        "param": "image",
        "code": "unsupported_feature",
    }


def form(*parts: tuple[str, bytes]) -> bytes:
    lines = [
        b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (head.encode(), data)
        for head, data in parts
    ]
    return b"".join(lines) + b"--x--\r\n"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b"{}", None, "the body is no form"),
        (form(("prompt", b"x")), None, "missing required field `image`"),
        (form(("prompt", b"x"), ('image"; filename="a', b"")), "image", "is empty"),
        (form(("prompt", b"x"), ("prompt", b"y")), "prompt", "comes twice"),
        (form(("prompt", b"\xff")), "prompt", "isn't UTF-8"),
        (form(("n", b"two")), "n", "Expected `int"),
        (form(("", b"x")), None, "each with a name"),
        (form(("prompt", b"x"), ('image"; filename="a', b"?"), ('mask"; filename="b', b"?")),
         "mask", "not supported"),
        (form(("prompt", b"x"), ('image"; filename="a', b"?")), "image", "image"),
    ],
)  # fmt: skip
async def test_refused_edits(
    suite: EveryAbility, body: bytes, param: str | None, says: str
) -> None:
    async with raw(suite.port) as wire:
        kind = "Content-Type: multipart/form-data; boundary=x\r\n"
        wire.send(post(EDIT, body, headers=kind))
        status, _, parts = await wire.response()
    error = json.loads(b"".join(parts))["error"]
    assert (status, error["param"]) == (400, param), error
    assert says in error["message"]


async def test_a_forms_boundary_may_be_too_long(suite: EveryAbility) -> None:
    kind = f"Content-Type: multipart/form-data; boundary={'x' * 7000}\r\n"
    async with raw(suite.port) as wire:
        wire.send(post(EDIT, b"", headers=kind))
        status, _, (body,) = await wire.response()
    assert (status, b"Boundary length 7000 exceeds" in body) == (400, True), body


@pytest.mark.parametrize("where", ["the body's", ""], ids=["body", "part"])
async def test_a_forms_headers_have_few_parameters(
    suite: EveryAbility, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The library takes 1 us for each, on the event loop."""
    counts = list[int]()

    def counted(value: bytes) -> Any:
        counts.append(value.count(b";"))
        return parse_options_header(value)

    monkeypatch.setattr("millstream_server.processor.http.form.parse_options_header", counted)
    many = ";" * 4000
    kind = f"Content-Type: multipart/form-data; boundary=x{where and many}\r\n"
    body = form((f'prompt"{many}; a="', b"x"))
    async with raw(suite.port) as wire:
        wire.send(post(EDIT, body, headers=kind))
        status, _, (said,) = await wire.response()
    assert (status, b"at most 32 parameters" in said) == (400, True), said
    assert max(counts, default=0) <= 32


@pytest.mark.parametrize(
    ("changed", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "say what to show"),
        ({"size": "64"}, "size", "WIDTHxHEIGHT"),
        ({"size": "65x64"}, "size", "multiple of"),
        ({"n": 0}, "n", "1 to 4 are"),
        ({"num_inference_steps": 0}, "num_inference_steps", "1 to 50 are"),
        ({"seed": -1}, "seed", "below 2^63"),
        ({"response_format": "url"}, "response_format", "no storage"),
        ({"response_format": "url", "stream": True}, "response_format", "leave stream out"),
        ({"output_format": "jpeg"}, "output_format", "png or webp"),
        ({"partial_images": 2}, "partial_images", "needs stream"),
        ({"partial_images": 4, "stream": True}, "partial_images", "<= 3"),
        ({"quality": "hd"}, "quality", "not supported"),
        ({"style": "vivid"}, "style", "not supported"),
        ({"model": "tiny"}, "model", "chats and continues"),
    ],
)
async def test_refusals(
    suite: EveryAbility, changed: dict[str, Any], param: str, says: str
) -> None:
    response = await ask(suite.port, MAKE, {"prompt": "a cat", **changed})
    error = response.json["error"]
    assert (response.status, error["param"]) == (400, param), error
    assert says in error["message"]
