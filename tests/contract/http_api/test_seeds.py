"""A seed on workers that can't keep one: HTTP leaves it out and says so; gRPC only if asked to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import grpc
import pytest
import pytest_asyncio

from millstream.v1 import processor_pb2
from millstream_server.engines.simulated import engine
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import Ability
from millstream_server.generation.worker.core import GenerationWorker
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.turn import Turn
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import InProcessProcessor, suite
from tests.support.clients.http_api import CHAT, HI, ask
from tests.support.processor.chats import chat, completion, gather, options, start
from tests.support.wire.failures import refusal

HEADER = "x-millstream-seed"
ASKED: list[tuple[str, Any]] = [
    (CHAT, HI),
    (CHAT, {**HI, "n": 2, "temperature": 0}),
    ("/v1/completions", {"prompt": "ab"}),
    ("/v1/completions", {"prompt": ["ab", "cd"]}),
    ("/v1/responses", {"input": "hi"}),
]
SEED = {"seed": 7}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(alphabet_model(tmp_path_factory.mktemp("plain") / "model"))


@pytest_asyncio.fixture
async def front(model: TextModel) -> AsyncIterator[InProcessProcessor]:
    """Serve with workers as SGLang's are without its setting ``deterministic``."""
    without = frozenset(Ability) - {Ability.SEED}
    with mock.patch.object(engine, "_ABILITIES", without):
        async with suite(model) as (served, _):
            yield served


@contextlib.contextmanager
def seeds_at_workers() -> Iterator[list[int | None]]:
    """Keep what the workers get."""
    seeds: list[int | None] = []
    submit = GenerationWorker.submit

    def keep(self: GenerationWorker, request: GenerationRequest, sink: Any) -> str:
        seeds.append(request.sampling.seed)
        return submit(self, request, sink)

    with mock.patch.object(GenerationWorker, "submit", keep):
        yield seeds


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_it_is_left_out_and_a_header_says_so(
    front: InProcessProcessor, path: str, body: Any, *, stream: bool
) -> None:
    most = {"max_output_tokens" if "input" in body else "max_tokens": 3, "stream": stream}
    turns: list[Turn] = []
    end = front.core.end

    def keep(turn: Turn) -> None:
        turns.append(turn)
        end(turn)

    with seeds_at_workers() as seeds, mock.patch.object(front.core, "end", keep):
        seeded = await ask(front.port, path, {**body, **most, **SEED})
        plain = await ask(front.port, path, {**body, **most})
    assert (seeded.status, seeded.headers.get(HEADER)) == (200, "best-effort"), seeded.body
    assert (plain.status, plain.headers.get(HEADER)) == (200, None)
    assert set(seeds) == {None}
    # What a redispatch, the telemetry and the log take for the client's.
    assert {turn.seed for turn in turns} == {None}
    assert not [turn for turn in turns if turn.options.sampling.keys() & {"seed"}]


async def test_a_rendered_chat_says_so_too(front: InProcessProcessor) -> None:
    response = await ask(front.port, f"{CHAT}/render", {**HI, **SEED})
    assert response.headers[HEADER] == "best-effort"
    assert response.json["sampling_params"]["seed"] is None


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_workers_that_keep_one_get_it(model: TextModel, path: str, body: Any) -> None:
    most = {"max_output_tokens" if "input" in body else "max_tokens": 3}
    async with suite(model) as (front, _):
        with seeds_at_workers() as seeds:
            response = await ask(front.port, path, {**body, **most, **SEED})
        rendered = await ask(front.port, f"{CHAT}/render", {**HI, **SEED})
    assert (response.status, response.headers.get(HEADER)) == (200, None)
    assert sorted(map(str, seeds)) in (["7"], ["7", "7"], ["7", "8"])
    assert rendered.json["sampling_params"]["seed"] == 7
    assert HEADER not in rendered.headers


async def test_a_seed_out_of_range_is_refused_all_the_same(front: InProcessProcessor) -> None:
    response = await ask(front.port, CHAT, {**HI, "seed": 1 << 63})
    assert (response.status, response.json["error"]["param"]) == (400, "seed")


async def test_grpc_refuses_it_unless_best_effort_is_asked_for(front: InProcessProcessor) -> None:
    exact, loose = options(3, seed=7), options(3, seed=7, seed_best_effort=True)
    fields: list[str] = []
    for call in (
        front.stub.ChatOnce(processor_pb2.ChatOnceRequest(start=start("hi", opts=exact).start)),
        front.stub.Complete(completion("ab", exact)),
    ):
        failed = await refusal(call)
        assert (failed.code, failed.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "UNSUPPORTED_FEATURE",
        )
        fields += failed.fields
    assert fields == ["start.options.sampling.seed", "options.sampling.seed"]
    with seeds_at_workers() as seeds:
        answers = [
            await chat(front.stub, "hi", opts=loose),
            await gather(front.stub.Complete(completion("ab", loose))),
        ]
        rendered = await front.stub.Render(
            processor_pb2.RenderRequest(start=start("hi", opts=loose).start)
        )
    assert [len(answer.text) for answer in answers] == [3, 3]
    assert seeds == [None, None]
    assert not rendered.sampling.HasField("seed")


async def test_grpc_keeps_it_where_the_workers_can(model: TextModel) -> None:
    loose = options(3, seed=7, seed_best_effort=True)
    async with suite(model) as (front, _):
        with seeds_at_workers() as seeds:
            await chat(front.stub, "hi", opts=loose)
    assert seeds == [7]
