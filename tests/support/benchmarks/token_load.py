"""Streams of a token a step, at an engine or at a worker, and a count of what comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millstream_server.generation.output import Finish, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest, Prompt, new_engine_id
from millstream_server.generation.sampling import Sampling
from millstream_server.links.fleet import Fleet
from millstream_server.routing.discovery.sources import StaticDiscovery
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.router import Router
from millstream_server.runtime.errors import ServingError
from tests.support.processes.processes import cpu_s
from tests.support.processes.suite import ServiceProcess

_PROMPT_TOKENS = 8


class Counter:
    """A sink that counts."""

    def __init__(self) -> None:
        self.tokens = 0
        self.messages = 0
        self.ended = asyncio.get_running_loop().create_future()

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        self.tokens += len(token_ids)
        self.messages += 1

    def finish(self, finish: Finish) -> None:
        self.ended.set_result(None)

    def fail(self, error: ServingError) -> None:
        self.ended.set_exception(error)


def prompt(number: int) -> list[int]:
    """Return a short prompt; there is no EOS in it."""
    return [(7 * number + i) % 1000 + 10 for i in range(_PROMPT_TOKENS)]


def request(number: int, tokens: int) -> GenerationRequest:
    return GenerationRequest(
        engine_id=new_engine_id(),
        prompt=Prompt(prompt(number)),
        sampling=Sampling(max_new_tokens=tokens, temperature=0.0, ignore_eos=True),
    )


async def answered(
    submit: Callable[[GenerationRequest, OutputSink], object], streams: int, tokens: int
) -> int:
    """Run so many requests at once; return the number of messages that came."""
    sinks = [Counter() for _ in range(streams)]
    for number, sink in enumerate(sinks):
        submit(request(number, tokens), sink)
    await asyncio.gather(*(sink.ended for sink in sinks))
    assert [sink.tokens for sink in sinks] == [tokens] * streams
    return sum(sink.messages for sink in sinks)


@dataclass(frozen=True)
class Spent:
    """What a burst took."""

    cpu_s: float
    messages: int


async def over_the_wire(worker: ServiceProcess, streams: int, tokens: int) -> Spent:
    """Do the same at a worker of the model "tiny", as a Processor; count the worker's CPU."""
    router = Router(lambda: make_policy(PolicyName.LEAST_LOADED))
    fleet = Fleet(StaticDiscovery([worker.address]), router)
    fleet.open()
    while not router.ready("tiny"):
        await asyncio.sleep(0.01)
    leg = router.plan(RoutingRequest(model="tiny")).legs[0]

    def submit(asked: GenerationRequest, sink: OutputSink) -> None:
        asked = replace(asked, request_id=asked.engine_id)
        fleet.generate(leg.place.worker.address, asked, sink)

    before = cpu_s(worker.pid)
    messages = await answered(submit, streams, tokens)
    spent_s = cpu_s(worker.pid) - before
    await fleet.close()
    return Spent(spent_s, messages)
