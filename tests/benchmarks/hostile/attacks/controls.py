"""Callers that ask for much and are normal: they have to be served."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc

from tests.benchmarks.hostile.attacker import Attack
from tests.benchmarks.hostile.attacks import methods

_CHANNELS = 20
_DEADLINE_S = 60.0


def _start(channel: Any) -> Any:
    return channel.unary_stream(methods.CHAT)


async def many_chats(attack: Attack, *, count: int, tokens: int) -> None:
    """So many chats at once, over and over; not one may fail."""
    if attack.order.alone:
        return
    request = methods.chat(tokens)
    metadata = (("authorization", f"Bearer {attack.order.key}"),) if attack.order.key else ()
    outcomes: Counter[str] = Counter()

    async def one(start: Any) -> None:
        messages = 0
        try:
            async for _ in start(request, metadata=metadata, timeout=_DEADLINE_S):
                messages += 1
        except grpc.aio.AioRpcError as error:
            outcomes[f"{error.code().name}: {(error.details() or '')[:80]}"] += 1
        else:
            outcomes["OK" if messages else "no message"] += 1

    channels = [
        grpc.aio.insecure_channel(
            f"127.0.0.1:{attack.order.port}",
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)],
        )
        for _ in range(_CHANNELS)
    ]
    starts = [_start(channel) for channel in channels]
    await asyncio.gather(*(one(starts[i % _CHANNELS]) for i in range(count)))
    attack.tally.calls += count
    attack.tally.answers.update(outcomes)
    bad = {code: times for code, times in outcomes.items() if code != "OK"}
    if bad or outcomes["OK"] != count:
        attack.broken.append(f"of {count} chats {outcomes['OK']} were answered; {bad}")
