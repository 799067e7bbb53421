"""Images and videos in a chat, through Processor, encode worker and those that generate.

The engines are simulated: what they answer follows from the text's last token, from the items'
digests and from the tensors' bytes, so a mix-up shows in every token (`engines.simulated.state`).
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from millstream.v1 import chat_pb2, generation_pb2, media_pb2, processor_pb2, worker_pb2
from millstream_server.media.items import MediaFile, Modality
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.rpc.auth import ANONYMOUS
from millstream_testing import in_process
from millstream_testing.in_process import ALPHABET, MAX_ITEM_BYTES, MODEL
from millstream_testing.waiting import until
from tests.support.media import media_files
from tests.support.media.media_suite import (
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    MediaSuite,
    chunk,
    image,
    media_config,
    media_suite,
    own_tower_worker,
    user,
    video,
)
from tests.support.models.vision_models import make_vision_model
from tests.support.processor.chats import CANCEL, Conversation, gather, options, start, user_turn
from tests.support.wire.failures import failure

pytestmark = pytest.mark.asyncio(loop_scope="module")

FEW = options(6, ignore_eos=True, return_token_ids=True)
RED, BLUE, GREEN = (media_files.solid(size=(56, 56), color=c) for c in ("red", "blue", "lime"))
CELLS = 4
"""Cells of 28 x 28 pixels in these pictures."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model") / "qwen", "qwen2_5_vl")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(directory: Path) -> AsyncIterator[MediaSuite]:
    async with media_suite(directory) as started:
        yield started


async def ask(stub: Any, *parts: Any, opts: Any = FEW) -> Any:
    """Ask one question; return the answer."""
    chat = Conversation(stub)
    await chat.say(start(messages=[user(*parts)], opts=opts))
    answer = await chat.answer()
    await chat.end()
    return answer


async def refusal(stub: Any, *parts: Any) -> Any:
    """Ask what must fail."""
    chat = Conversation(stub)
    await chat.say(start(messages=[user(*parts)], opts=FEW))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await chat.answer()
    return failure(raised.value)


def by_hand(suite: MediaSuite, last_token: int, files: Sequence[bytes], colors: Any) -> list[int]:
    """Work out the tokens of a prompt with pictures of one colour each."""
    pipeline = suite.encode.engine.pipeline
    width = suite.encode.encoder.config.width
    digests = tensors = 0
    for place, (data, color) in enumerate(zip(files, colors, strict=True), 1):
        file = MediaFile(
            modality=Modality.IMAGE,
            data=data,
            sha256=media_files.sha256(data),
            salt=ANONYMOUS.name,
        )
        digests += place * zlib.crc32(pipeline.digest(file))
        rows = media_files.rows(color, CELLS, width)
        tensors += place * zlib.crc32(rows)
    step = 1 + digests % 2**32 + tensors % 2**32
    return [(last_token + n * step) % VOCAB_SIZE for n in range(1, 7)]


def last_token_of(directory: Path) -> int:
    model = TextModel.load(directory)
    return model.encode("<|im_start|>assistant\n", add_special_tokens=False)[-1]


# ---- what comes out ------------------------------------------------------------------------------


async def test_a_picture_reaches_the_model(suite: MediaSuite, directory: Path) -> None:
    answer = await ask(suite.stub, "What is this? ", image(RED))
    last = last_token_of(directory)
    assert answer.choices[0].token_ids == by_hand(suite, last, [RED], [(255, 0, 0)])
    assert answer.usage.media_tokens == CELLS
    assert answer.usage.prompt_tokens > CELLS


async def test_several_pictures_count_in_their_order(suite: MediaSuite, directory: Path) -> None:
    answer = await ask(suite.stub, image(BLUE), " and ", image(RED), image(BLUE))
    last = last_token_of(directory)
    colors = [(0, 0, 255), (255, 0, 0), (0, 0, 255)]
    assert answer.choices[0].token_ids == by_hand(suite, last, [BLUE, RED, BLUE], colors)
    assert answer.usage.media_tokens == 3 * CELLS
    other = await ask(suite.stub, image(RED), " and ", image(BLUE), image(BLUE))
    assert other.choices[0].token_ids != answer.choices[0].token_ids


async def test_the_aggregated_forms_give_the_same_answer(
    suite: MediaSuite, directory: Path
) -> None:
    parts = ("Compare ", image(RED), image(GREEN), video(media_files.video(8)))
    wanted = (await ask(suite.stub, *parts)).choices[0].token_ids
    async with media_suite(directory, hand_off=False) as aggregated:
        assert (await ask(aggregated.stub, *parts)).choices[0].token_ids == wanted
    models = {MODEL: TextModel.load(directory)}
    async with (
        own_tower_worker(directory, media_config(directory)) as one,
        in_process.processor(models, [one.address]) as front,
    ):
        assert (await ask(front.stub, *parts)).choices[0].token_ids == wanted


async def test_chats_with_equal_texts_and_different_pictures_never_mix(suite: MediaSuite) -> None:
    pictures = [
        media_files.solid(size=(56, 28 * (1 + n % 3)), color=f"rgb({9 * n},{255 - 9 * n},{n})")
        for n in range(24)
    ]
    alone = [await ask(suite.stub, "Which? ", image(data)) for data in pictures]
    at_once = await asyncio.gather(
        *(ask(suite.stub, "Which? ", image(data)) for data in [*pictures, *reversed(pictures)])
    )
    wanted = [answer.choices[0].token_ids for answer in alone]
    assert [answer.choices[0].token_ids for answer in at_once] == [*wanted, *reversed(wanted)]
    assert len({tuple(ids) for ids in wanted}) >= len(pictures) - 3, "modulo 1024 some are equal"


async def test_choices_share_a_picture(suite: MediaSuite) -> None:
    answer = await ask(suite.stub, image(RED), opts=options(6, n=3, return_token_ids=True))
    assert len({tuple(choice.token_ids) for choice in answer.choices.values()}) == 1
    assert len(answer.choices) == 3


async def test_list_models_says_what_a_model_takes(suite: MediaSuite) -> None:
    listed = await suite.stub.ListModels(processor_pb2.ListModelsRequest())
    (model,) = listed.models
    assert list(model.modalities) == [media_pb2.MODALITY_IMAGE, media_pb2.MODALITY_VIDEO]
    roles = {entry.role: entry.connected for entry in model.workers}
    assert roles[worker_pb2.WORKER_ROLE_ENCODE] == 1


# ---- ways in -------------------------------------------------------------------------------------


async def test_a_file_may_come_in_chunks_before_the_start(suite: MediaSuite) -> None:
    wanted = await ask(suite.stub, "What? ", image(RED))
    chat = Conversation(suite.stub)
    await chat.say(
        chunk("one", RED[:50], len(RED)),
        chunk("two", BLUE, len(BLUE)),
        chunk("one", RED[50:]),
        start(messages=[user("What? ", image(upload_id="one"))], opts=FEW),
    )
    assert (await chat.answer()).choices[0].token_ids == wanted.choices[0].token_ids
    await chat.end()


async def test_later_turns_see_earlier_pictures_and_may_bring_their_own(suite: MediaSuite) -> None:
    before = len(suite.encode.encoder.batches)
    data = media_files.solid(size=(56, 56), color="navy")
    chat = Conversation(suite.stub)
    await chat.say(start(messages=[user("What? ", image(data))], opts=FEW))
    assert (await chat.answer()).usage.media_tokens == CELLS
    await chat.say(user_turn("And now?"))
    assert (await chat.answer(2)).usage.media_tokens == CELLS
    turn = processor_pb2.UserTurn(content=[chat_pb2.ContentPart(text="? "), image(data)])
    await chat.say(processor_pb2.ChatRequest(user_turn=turn))
    assert (await chat.answer(3)).usage.media_tokens == 2 * CELLS
    await chat.end()
    assert len(suite.encode.encoder.batches) == before + 1, "encoded once"


@pytest.mark.parametrize(
    ("part", "field", "sentence"),
    [
        (image(upload_id="x"), "image.upload_id", "names no upload of this stream"),
        (chat_pb2.ContentPart(image=media_pb2.Media()), "image", "set one of data, upload_id, url"),
        (image(url="file:///etc/passwd"), "image.url", "file"),
        (image(b""), "image.data", "is empty"),
        (image(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "image.data", "SVG"),
        (image(RED[:-40]), "image.data", "truncated"),
        (image(media_files.png_header(20_000, 20_000)), "image.data", "400000000"),
        (video(RED), "video.data", "PNG"),
        (image(media_files.video(4)), "image.data", "MP4"),
        (video(media_files.video(8)[:200]), "video.data", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_item_is_refused_by_name_and_harms_nobody_else(
    suite: MediaSuite, part: Any, field: str, sentence: str
) -> None:
    other = asyncio.ensure_future(ask(suite.stub, "What? ", image(RED), image(GREEN)))
    refused = await refusal(suite.stub, "What? ", image(BLUE), part)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.fields == (f"start.messages[0].content[2].{field}",)
    assert sentence in refused.message
    assert (await other).usage.media_tokens == 2 * CELLS


async def test_a_data_url_is_taken_and_others_are_not(suite: MediaSuite) -> None:
    url = "data:image/png;base64," + base64.b64encode(RED).decode()
    wanted = await ask(suite.stub, image(RED))
    assert (await ask(suite.stub, image(url=url))).choices == wanted.choices
    refused = await refusal(suite.stub, image(url="http://example.com/cat.png"))
    assert refused.reason == "UNSUPPORTED_FEATURE"
    assert "--fetch-urls" in refused.message


async def test_bad_options_are_named_before_a_file_is_encoded_for_nothing(
    suite: MediaSuite,
) -> None:
    made = suite.encode.engine.store.used_bytes
    chat = Conversation(suite.stub)
    new = image(media_files.solid(size=(56, 56), color="#123456"))
    await chat.say(start(messages=[user(new)], opts=options(6, n=0), request_id="r" * 129))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await chat.answer()
    assert failure(raised.value).fields == ("start.options.n", "start.request_id")
    assert suite.encode.engine.store.used_bytes == made


async def test_the_models_own_placeholder_in_a_text_is_refused(suite: MediaSuite) -> None:
    refused = await refusal(suite.stub, "<|image_pad|>")
    assert refused.reason == "INVALID_REQUEST"
    assert "1 of the model's own placeholders" in refused.message
    refused = await refusal(suite.stub, "<|image_pad|>", image(RED))
    assert "2 image placeholders" in refused.message
    assert "for 1 image" in refused.message
    call = suite.stub.Complete(
        processor_pb2.CompleteRequest(text="<|vision_start|><|image_pad|>", options=FEW)
    )
    with pytest.raises(grpc.aio.AioRpcError, match="1 of the model's own placeholders"):
        await gather(call)


async def test_media_in_an_assistants_message_are_refused(suite: MediaSuite) -> None:
    messages = [
        user("Hi"),
        chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_ASSISTANT, content=[image(RED)]),
    ]
    chat = Conversation(suite.stub)
    await chat.say(start(messages=[*messages, user("?")], opts=FEW))
    with pytest.raises(grpc.aio.AioRpcError, match="only USER and TOOL messages may have images"):
        await chat.answer()


async def test_a_text_model_refuses_pictures(text_model: TextModel) -> None:
    async with in_process.suite(text_model, ALPHABET) as (front, _):
        refused = await refusal(front.stub, image(RED))
    assert refused.reason == "UNSUPPORTED_FEATURE"
    assert "this model takes no image now" in refused.message


async def test_without_an_encode_worker_text_still_works(directory: Path) -> None:
    models = {MODEL: TextModel.load(directory)}
    async with (
        in_process.worker(media_config(directory)) as one,
        in_process.processor(models, [one.address]) as front,
    ):
        refused = await refusal(front.stub, image(RED))
        assert (refused.reason, refused.retryable) == ("NO_WORKER", True)
        assert refused.message.startswith("no encode worker for this model is connected")
        assert (await ask(front.stub, "Hello")).usage.media_tokens == 0


async def test_a_prompt_that_is_too_long_with_its_pictures_is_refused(suite: MediaSuite) -> None:
    large = media_files.solid(size=(980, 980), color="red")  # 35 x 35 cells
    refused = await refusal(suite.stub, *([image(large)] * 7))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"exceed the context length of {CONTEXT_LENGTH} tokens" in refused.message


# ---- how it ends ---------------------------------------------------------------------------------


async def nothing_is_held(suite: MediaSuite) -> None:
    """Wait until no lease and no client's file is held."""
    await until(lambda: suite.encode.engine.store.pinned_bytes == 0)
    await until(lambda: suite.front.core.media.budget.used == 0)


async def test_results_and_files_are_given_back(suite: MediaSuite) -> None:
    await ask(suite.stub, image(RED), image(GREEN))
    await nothing_is_held(suite)


async def test_render_says_where_pictures_stand_and_keeps_none(suite: MediaSuite) -> None:
    asked = start(messages=[user("Look: ", image(RED), image(GREEN))], opts=FEW)
    rendered = await suite.stub.Render(processor_pb2.RenderRequest(start=asked.start))
    assert [place.modality for place in rendered.media] == [media_pb2.MODALITY_IMAGE] * 2
    ids = rendered.token_ids
    for place in rendered.media:
        (span,) = place.spans
        assert span.length == CELLS
        assert len(set(ids[span.start : span.start + CELLS])) == 1
    answer = await ask(suite.stub, "Look: ", image(RED), image(GREEN))
    assert len(ids) == answer.usage.prompt_tokens
    await nothing_is_held(suite)


async def rendered_budget(suite: MediaSuite, opts: Any, *parts: Any) -> tuple[int, int]:
    """Return a chat's prompt tokens and most new tokens, as Render says them."""
    asked = start(messages=[user(*parts)], opts=opts)
    rendered = await suite.stub.Render(processor_pb2.RenderRequest(start=asked.start))
    return len(rendered.token_ids), rendered.sampling.max_new_tokens


@pytest.mark.parametrize("film", [media_files.video(8), media_files.video(100, rate=1)])
async def test_a_video_needs_no_explicit_budget(suite: MediaSuite, film: bytes) -> None:
    """The one has more tokens than positions; the other, of 100 s, more positions than tokens."""
    parts = ("What is in this video? ", video(film))
    tokens, budget = await rendered_budget(suite, options(), *parts)
    answer = await ask(suite.stub, *parts, opts=options())
    assert answer.usage.prompt_tokens == tokens
    assert 0 < answer.usage.completion_tokens <= budget
    again = await ask(suite.stub, *parts, opts=options(budget))
    assert again.usage.completion_tokens == answer.usage.completion_tokens


async def test_a_video_too_long_for_the_budget_is_refused_by_its_part(suite: MediaSuite) -> None:
    parts = ("What? ", image(RED), video(media_files.video(100, rate=1)))
    tokens, budget = await rendered_budget(suite, options(), *parts)
    assert tokens + budget < CONTEXT_LENGTH - 100, "its positions take more than its tokens"
    chat = Conversation(suite.stub)
    await chat.say(start(messages=[user(*parts)], opts=options(budget + 1)))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await chat.answer()
    refused = failure(raised.value)
    assert refused.reason == "INVALID_REQUEST"
    assert refused.fields == ("start.messages[0].content[2].video.data",)
    assert f"the context length of {CONTEXT_LENGTH} tokens" in refused.message
    await nothing_is_held(suite)


@pytest.mark.parametrize("spelling", ["message", "rpc", "deadline"])
async def test_a_chat_is_cancelled_while_its_picture_is_encoded(
    directory: Path, spelling: str
) -> None:
    async with media_suite(directory, encoder={"prepare_s": 0.4}) as slow:
        chat = Conversation(slow.stub, timeout=0.2 if spelling == "deadline" else None)
        await chat.say(start(messages=[user("What? ", image(RED))], opts=FEW))
        await until(lambda: slow.encode.host.requests.count == 1)
        if spelling == "message":
            await chat.say(CANCEL)
            answer = await chat.answer()
            assert answer.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
            assert answer.usage.completion_tokens == 0
            await chat.say(user_turn("Go on"))
            assert (await chat.answer(2)).usage.media_tokens == CELLS
            await chat.end()
        elif spelling == "rpc":
            chat.call.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await chat.answer()
        await nothing_is_held(slow)
        await until(lambda: slow.encode.host.requests.count == 0)


async def test_a_picture_above_the_message_limit_of_memory_is_refused(suite: MediaSuite) -> None:
    """The budget is four of the largest items: the fifth has no place."""
    chats = [Conversation(suite.stub) for _ in range(4)]
    block = bytes(1 << 20)
    for chat in chats:
        await chat.say(chunk("a", block, MAX_ITEM_BYTES), *([chunk("a", block)] * 3))
    budget = suite.front.core.media.budget
    await until(lambda: budget.used == budget.most)
    late = Conversation(suite.stub)
    await late.say(chunk("a", b"x", 1))
    with pytest.raises(grpc.aio.AioRpcError, match="images and videos of open conversations"):
        await late.answer()
    for chat in chats:
        chat.call.cancel()
    await until(lambda: budget.used == 0)
    await ask(suite.stub, image(RED))
