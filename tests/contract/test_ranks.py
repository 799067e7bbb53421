"""A Processor over workers with several data-parallel ranks each."""

from __future__ import annotations

from dataclasses import replace

from millstream_server.control.engine import Role
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import ALPHABET, MODEL, InProcessWorker, processor, worker
from millstream_testing.waiting import until
from tests.support.processor.chats import Conversation, chat, options, start, user_turn

RANKS = replace(ALPHABET, dp_size=2, block_size=4)


def _cached(one: InProcessWorker) -> list[int]:
    """Return how many blocks each rank has cached."""
    log = one.host.plan.kv
    assert log
    return [len(log.rank(rank)._blocks) for rank in range(2)]


async def test_hand_offs_use_all_ranks_of_both_workers(text_model: TextModel) -> None:
    async with (
        worker(replace(RANKS, role=Role.PREFILL)) as prefill,
        worker(replace(RANKS, role=Role.DECODE)) as decode,
        processor({MODEL: text_model}, [prefill.address, decode.address]) as front,
    ):
        answers = [await chat(front.stub, "hi" * n, opts=options(5)) for n in range(1, 5)]
        assert [answer.text for answer in answers] == ["ABCDE"] * 4
        await until(lambda: all(_cached(prefill) + _cached(decode)))


async def test_a_conversation_stays_at_its_rank(text_model: TextModel) -> None:
    async with worker(RANKS) as one, processor({MODEL: text_model}, [one.address]) as front:
        conversation = Conversation(front.stub)
        await conversation.say(start("a" * 64, opts=options(4)))
        first = await conversation.answer(1)
        for turn in range(2, 6):
            await conversation.say(user_turn("more"))
            answer = await conversation.answer(turn)
            assert answer.usage.cached_tokens >= first.usage.prompt_tokens // 4 * 4
        await conversation.end()
        assert sorted(map(bool, _cached(one))) == [False, True]
