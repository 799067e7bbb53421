"""DiffusionService.GenerateText: the stream's rules, the same at a worker and at a Processor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream.v1 import (
    diffusion_pb2,
    generation_pb2,
    media_pb2,
    sampling_pb2,
)
from millstream_server.generation.ticket import Ticket
from millstream_server.generation.validation import REFUSED_IN_DIFFUSION
from millstream_server.processor.text.tokenizer import TextModel
from tests.support.wire.failures import refusal
from tests.support.worker.text_diffusion import DLLM, STEPPING, serving
from tests.support.worker.worker_streams import text_stream

ENDLESS = 400
LENGTH = generation_pb2.FINISH_REASON_LENGTH
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED

pytestmark = pytest.mark.parametrize("place", ["worker", "processor"])


async def test_tokens_come_in_blocks_and_in_order(place: str, text_model: TextModel) -> None:
    lengths: set[int] = set()
    async with serving(place, text_model, STEPPING) as at:
        stream = text_stream(at.stub)
        await stream.start(3, [7, 41], max_new_tokens=11)
        while not stream.slots[3].terminals:
            assert await stream.read()
            lengths.add(len(stream.slots[3].token_ids))
        await stream.drain()
    view = stream.slots[3]
    assert view.token_ids == list(range(42, 53))
    # The first block has the prompt's two tokens, the last one is cut.
    assert lengths <= {2, 6, 10, 11}
    assert view.finish is not None
    assert view.finish.reason == LENGTH
    assert view.finish.usage.prompt_tokens == 2
    assert view.finish.usage.completion_tokens == 11


async def test_a_stop_token_ends_a_request_inside_a_block(
    place: str, text_model: TextModel
) -> None:
    async with serving(place, text_model) as at:
        stream = text_stream(at.stub)
        await stream.start(0, [9], max_new_tokens=50, stop_token_ids=[14])
        await stream.start(1_048_575, [60], max_new_tokens=5)
        stopped, other = await stream.ended(0, 1_048_575)
        await stream.start(0, [70], max_new_tokens=1)
        (again,) = await stream.ended(0)
    assert stopped.token_ids == [10, 11, 12, 13, 14]
    assert stopped.finish is not None
    assert stopped.finish.reason == generation_pb2.FINISH_REASON_STOP
    assert stopped.finish.matched_token_id == 14
    assert stopped.finish.usage.completion_tokens == 5
    assert other.token_ids == [61, 62, 63, 64, 65]
    assert again.token_ids == [71]


async def test_without_a_length_the_context_is_filled(place: str, text_model: TextModel) -> None:
    async with serving(place, text_model) as at:
        stream = text_stream(at.stub)
        await stream.start(0, [9])
        (view,) = await stream.ended(0)
    assert len(view.token_ids) == DLLM.context_length - 1


async def test_an_absurd_timeout_is_a_long_one(place: str, text_model: TextModel) -> None:
    async with serving(place, text_model) as at:
        stream = text_stream(at.stub)
        await stream.start(0, [9], max_new_tokens=2, timeout_s=2**63 - 1)
        (view,) = await stream.ended(0)
    assert view.token_ids == [10, 11]


async def test_a_cancel_frees_the_worker_and_disturbs_nobody(
    place: str, text_model: TextModel
) -> None:
    async with serving(place, text_model, STEPPING) as at:
        stream = text_stream(at.stub)
        await stream.start(0, [1], max_new_tokens=ENDLESS)
        await stream.start(1, [1], max_new_tokens=60)
        await stream.first_token(0)
        await stream.cancel(0)
        view, other = await stream.ended(0, 1)
        await at.worker.until_idle()
        await stream.drain()
    assert view.finish is not None
    assert view.finish.reason == CANCELLED
    assert view.finish.usage.completion_tokens == len(view.token_ids) < 60
    assert other.token_ids == list(range(2, 62))


async def test_requests_beyond_the_workers_limit_wait_and_can_be_cancelled(
    place: str, text_model: TextModel
) -> None:
    async with serving(place, text_model, replace(STEPPING, max_running_requests=1)) as at:
        stream = text_stream(at.stub)
        for slot in range(3):
            await stream.start(slot, [slot + 10], max_new_tokens=40)
        await stream.first_token(0)
        await stream.cancel(1)
        first, cancelled, last = await stream.ended(0, 1, 2)
    assert len(first.token_ids) == 40
    assert cancelled.finish is not None
    assert cancelled.finish.reason == CANCELLED
    assert cancelled.token_ids == []
    assert last.token_ids == list(range(13, 53))


async def test_a_timeout_ends_its_slot_alone(place: str, text_model: TextModel) -> None:
    async with serving(place, text_model, STEPPING) as at:
        stream = text_stream(at.stub)
        await stream.start(0, [1], max_new_tokens=ENDLESS, timeout_s=0.1)
        await stream.start(1, [1], max_new_tokens=200)
        late, healthy = await stream.ended(0, 1)
        await at.worker.until_idle()
    assert late.reason == "DEADLINE_EXCEEDED"
    assert len(healthy.token_ids) == 200


async def test_a_caller_that_goes_away_leaves_nothing(place: str, text_model: TextModel) -> None:
    async with serving(place, text_model, STEPPING) as at:
        stream = text_stream(at.stub)
        await stream.start(0, [1], max_new_tokens=ENDLESS)
        await stream.first_token(0)
        stream.call.cancel()
        await at.worker.until_idle()


async def test_a_slot_used_twice_ends_the_stream(place: str, text_model: TextModel) -> None:
    async with serving(place, text_model, STEPPING) as at:
        stream = text_stream(at.stub)
        await stream.start(1, [1], max_new_tokens=ENDLESS)
        await stream.start(1, [1], max_new_tokens=2)
        failed = await refusal(stream.drain())
        assert failed.fields == ("start.slot",)
        await at.worker.until_idle()


# ---- refused by name

_REFUSED: dict[str, dict[str, Any]] = {
    "sampling.temperature": {"temperature": 0.7},
    "sampling.top_p": {"top_p": 0.9},
    "sampling.top_k": {"top_k": 5},
    "sampling.min_p": {"min_p": 0.1},
    "sampling.frequency_penalty": {"frequency_penalty": 0.5},
    "sampling.presence_penalty": {"presence_penalty": 0.5},
    "sampling.repetition_penalty": {"repetition_penalty": 1.1},
    "sampling.min_new_tokens": {"min_new_tokens": 3},
    "sampling.seed": {"seed": 7},
    "sampling.logit_bias": {"logit_bias": {5: 1.0}},
    "sampling.constraint": {"constraint": sampling_pb2.Constraint(json_schema="{}")},
    "logprobs": {"logprobs": sampling_pb2.LogprobOptions()},
    "ticket": {"ticket": Ticket("10.0.0.1", 9000, 1)},
    "adapter": {"adapter": "law"},
    "cache_salt": {"cache_salt": "tenant"},
}


def test_each_refused_field_has_a_case(place: str) -> None:
    assert set(_REFUSED) == REFUSED_IN_DIFFUSION, place


@pytest.mark.parametrize("field", _REFUSED)
async def test_what_the_engine_would_ignore_is_refused_by_name(
    place: str, text_model: TextModel, field: str
) -> None:
    async with serving(place, text_model) as at:
        stream = text_stream(at.stub)
        await stream.start(0, [1], **{"max_new_tokens": 4, **_REFUSED[field]})
        await stream.start(1, [1], max_new_tokens=4, temperature=0.0, top_p=1.0)
        refused, healthy = await stream.ended(0, 1)
        await at.worker.until_idle()
    assert refused.reason == "UNSUPPORTED_FEATURE"
    assert refused.fields == [field]
    assert refused.error is not None
    assert "leave it out" in refused.error.message
    assert healthy.token_ids == [2, 3, 4, 5]


async def test_several_are_refused_at_once_and_images_too(
    place: str, text_model: TextModel
) -> None:
    item = media_pb2.MediaItem(modality=media_pb2.MODALITY_IMAGE)
    item.spans.add(start=0, length=1)
    start = generation_pb2.StartGeneration(
        token_ids=[1, 2], media=[item], sampling=sampling_pb2.SamplingParams(seed=1, top_k=3)
    )
    async with serving(place, text_model) as at:
        stream = text_stream(at.stub)
        await stream.call.write(diffusion_pb2.GenerateTextRequest(start=start))
        (view,) = await stream.ended(0)
    assert view.reason == "UNSUPPORTED_FEATURE"
    assert view.fields == ["sampling.seed", "sampling.top_k", "media[0]"]
