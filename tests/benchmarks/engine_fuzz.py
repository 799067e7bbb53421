"""Requests of all shapes at a real engine on the CPU: is there one that ends it, or hangs in it?

    python -m tests.benchmarks.engine_fuzz                          # SGLang, two minutes
    .venv-vllm/bin/python -m tests.benchmarks.engine_fuzz --engine vllm
    python -m tests.benchmarks.engine_fuzz --topology pair --seconds 600 --seed 7

A Processor over one aggregated worker, or over a prefill and a decode worker. A caller sends
completions with any options that the contract allows, short prompts and such as fill the context,
up to 24 at once, and cancels some of them; prompts are computed in parts. The engine's own knobs
are drawn from ordinary values and from the ends of what is allowed.

Wanted: each ends within its time, with OK or with a code that says what was wrong with it. The
workers live on, are idle afterwards, and answer as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import grpc
import uvloop

from millstream.v1 import processor_pb2, processor_pb2_grpc, sampling_pb2
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.models.models import make_random_model
from tests.support.processes import forked
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running
from tests.support.processor.chats import Answer, completion, gather, options, until_connected
from tests.support.wire.failures import failure
from tests.support.wire.long_streams import load_of

_AT_ONCE = 24
_CONTEXT = 2040
"""What all engines have of 2048."""
_VOCABULARY = 1000
_STUCK_S = 90.0
_IDLE_S = 60.0
_SHOWN, _SHOWN_REFUSALS = 120, 8
_FINE = {"OK", "CANCELLED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "FAILED_PRECONDITION"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": "[a-f]{3,40}"}}
_GRAMMARS: tuple[dict[str, str], ...] = (
    {"regex": "[a-z]{1,30}"},
    {"regex": "(a{10}b{10}){3}"},
    {"json_schema": json.dumps(_SCHEMA)},
    {"ebnf": 'root ::= "yes" | "no" | "perhaps" root'},
    {"structural_tag": json.dumps(_TAG)},
)
_PARTS = {"sglang": "--chunked-prefill-size 64", "vllm": "--max-num-batched-tokens 64"}
_LACKS = {"sglang": {"seed"}, "vllm": set[str]()}
"""On a CPU."""
_BEFORE = options(24, temperature=0, ignore_eos=True, return_token_ids=True)


class Shapes:
    """Draws requests."""

    def __init__(self, seed: int, lacks: Collection[str]) -> None:
        self._chance = random.Random(seed)
        self._lacks = lacks

    def _maybe(self, share: float) -> bool:
        return self._chance.random() < share

    def cancel_after_s(self) -> float | None:
        """Return when the caller leaves; None: it stays."""
        return self._chance.expovariate(1.0) if self._maybe(0.15) else None

    def draw(self) -> processor_pb2.CompleteRequest:
        chance = self._chance
        length = chance.choice((1, 2, 31, 32, 33, 63, 64, 65, 200, 700, 1900, _CONTEXT - 2))
        tokens = min(chance.choice((1, 2, 5, 30, 100)), _CONTEXT - length)
        shared = chance.randrange(4)  # some prompts begin alike
        ids = [(shared * 97 + 13 * i) % 900 + 50 for i in range(length)]
        if self._maybe(0.5):
            ids[-1] = chance.randrange(_VOCABULARY)
        given: dict[str, Any] = {"return_token_ids": self._maybe(0.5)}
        for knob, values in self._knobs(tokens).items():
            if knob not in self._lacks and self._maybe(0.25):
                given[knob] = chance.choice(values)
        if self._maybe(0.15):
            given["constraint"] = sampling_pb2.Constraint(**chance.choice(_GRAMMARS))
        if self._maybe(0.2):
            top = chance.choice((0, 1, 5, 20))
            given["logprobs"] = sampling_pb2.LogprobOptions(top=top, prompt=self._maybe(0.3))
        return completion(ids, options(tokens, **given))

    def _knobs(self, tokens: int) -> dict[str, list[Any]]:
        chance = self._chance
        bias = {chance.randrange(_VOCABULARY): chance.choice((-100.0, -1.0, 3.0, 100.0))}
        return {
            "temperature": [0.0, 1e-6, 0.01, 0.7, 1.0, 2.0],
            "top_p": [1e-6, 0.1, 0.95, 1.0],
            "top_k": [1, 2, 50, _VOCABULARY, 1 << 20],
            "min_p": [0.0, 0.05, 1.0],
            "frequency_penalty": [-2.0, 0.5, 2.0],
            "presence_penalty": [-2.0, 0.5, 2.0],
            "repetition_penalty": [0.01, 0.8, 1.3, 2.0],
            "min_new_tokens": [0, 1, tokens],
            "ignore_eos": [True],
            "seed": [0, 1, (1 << 63) - 1, chance.randrange(1 << 62)],
            "stop_token_ids": [[chance.randrange(_VOCABULARY)], list(range(256))],
            "logit_bias": [bias, dict.fromkeys(range(300), -100.0)],
            "stop": [["a"], ["never in here", "e"]],
            "n": [2, 3],
            "include_special_tokens": [True],
            "priority": [1, 3],
            "session": ["one"],
            "cache_salt": ["salt"],
        }


async def _send(stub: Any, request: Any, cancel_after_s: float | None) -> str:
    """Send one; return how it ended."""
    call = stub.Complete(request)
    answer = Answer()
    try:
        async with asyncio.timeout(_STUCK_S):
            if cancel_after_s is not None:
                asyncio.get_running_loop().call_later(cancel_after_s, call.cancel)
            async for response in call:
                answer.add(response)
    except TimeoutError:
        call.cancel()
        return "STUCK"
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        return "CANCELLED"
    except grpc.aio.AioRpcError as error:
        told = failure(error)
        return f"{told.code.name} {told.reason}: {told.message}"
    return "OK" if answer.finished else "OK without an end"


async def _fuzz(stub: Any, arguments: argparse.Namespace, verdict: Verdict) -> None:
    shapes = Shapes(arguments.seed, _LACKS[arguments.engine])
    until_s = time.monotonic() + arguments.seconds
    ends: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    asked = 0

    async def caller() -> None:
        nonlocal asked
        while time.monotonic() < until_s and len(verdict.broken) < _AT_ONCE:
            request, cancel_after_s = shapes.draw(), shapes.cancel_after_s()
            end = await _send(stub, request, cancel_after_s)
            asked += 1
            code = end.partition(" ")[0]
            ends[code] += 1
            if code not in ("OK", "CANCELLED"):
                refused[end[:_SHOWN]] += 1
            said = str(request.options).replace("\n", " ")[:400]
            length = len(request.token_ids.ids)
            verdict.expect(code in _FINE, f"{end}; a prompt of {length} tokens, {said}")

    await asyncio.gather(*(caller() for _ in range(_AT_ONCE)))
    verdict.measured |= {"requests": asked, "ends": dict(ends.most_common())}
    verdict.measured["refused"] = dict(refused.most_common(_SHOWN_REFUSALS))
    verdict.expect(ends["OK"] > asked / 2, "most requests should be fine")


def _workers(model: Path, logs: Path, arguments: argparse.Namespace) -> list[ServiceProcess]:
    flags: dict[str, object] = {
        "engine": arguments.engine,
        "model_path": model,
        "model_name": "tiny",
        "max_total_tokens": 16384,
        "engine_args": _PARTS[arguments.engine],
    }
    if arguments.engine == "sglang":
        flags["engine_tokenizer"] = True  # grammars and least lengths
    if arguments.topology == "aggregated":
        return [ServiceProcess("millstream_server.decode", flags, logs / "worker.log")]
    prefill = {**flags, "bootstrap_port": free_port()}
    return [
        ServiceProcess("millstream_server.prefill", prefill, logs / "prefill.log"),
        ServiceProcess(
            "millstream_server.decode", {**flags, "mode": "disaggregated"}, logs / "decode.log"
        ),
    ]


async def _run(
    front: ServiceProcess,
    workers: list[ServiceProcess],
    arguments: argparse.Namespace,
    verdict: Verdict,
) -> None:
    pids = [worker.pid for worker in workers]
    async with front.aio_channel() as channel:
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        await until_connected(stub, len(workers))
        prompt = list(range(60, 160))
        before = await gather(stub.Complete(completion(prompt, _BEFORE)))
        await _fuzz(stub, arguments, verdict)
        for worker, pid in zip(workers, pids, strict=True):
            verdict.expect(worker.alive and worker.pid == pid, f"{worker.module} has ended")
            if worker.alive:
                async with load_of(worker.address) as load:
                    await load.idle(_IDLE_S)
        if not verdict.broken:
            after = await gather(stub.Complete(completion(prompt, _BEFORE)))
            same = after.choices[0].token_ids == before.choices[0].token_ids
            verdict.expect(same, "the same prompt is answered otherwise afterwards")


def main() -> int:
    """Parse arguments, start the services, send."""
    parser = parser_of("engine_fuzz", __doc__)
    parser.add_argument("--engine", choices=tuple(_PARTS), default="sglang", help="(sglang)")
    parser.add_argument(
        "--topology",
        choices=("aggregated", "pair"),
        default="aggregated",
        help="one worker, or prefill and decode (aggregated)",
    )
    parser.add_argument("--seconds", type=float, default=120, help="how long (120)")
    parser.add_argument("--seed", type=int, default=os.getpid(), help="of the requests (any)")
    arguments = parser.parse_args()
    verdict = Verdict(measured={"engine": arguments.engine, "seed": arguments.seed})
    forked.begin("services", arguments.engine)
    try:
        with folder_for(arguments) as folder:
            model = make_random_model(folder / "model", heads=2)
            workers = _workers(model, folder, arguments)
            addresses = ",".join(worker.address for worker in workers)
            flags = {"models": f"tiny={model}", "workers": addresses}
            front = ServiceProcess("millstream_server.processor", flags, folder / "front.log")
            progress("starting")
            with running(*workers, front):
                uvloop.run(_run(front, workers, arguments, verdict))
    finally:
        forked.end()
    return verdict.conclude(as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
