"""How many of 50 loops of each function end well, with the demo model on real SGLang on the CPU.

    python -m tests.benchmarks.tool_loops                # two minutes; 50 loops of each
    python -m tests.benchmarks.tool_loops --loops 200 --json

Prefill and decode are processes of their own. Each loop is a question, a call, its result and an
answer, streamed by the Python client. The right function has to be called once, with the right
arguments, and the answer has to hold its result. The clock and the calculator are asked with
reasoning too, which has to be there then.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

from millstream_client import Client
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.demo_tools import USES, Outcome, run_loop
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running

_MODEL = Path(__file__).parents[2] / "demo" / "model"
_AT_ONCE = 8
_WAYS = (
    ("clock", False),
    ("calculator", False),
    ("clock", True),
    ("calculator", True),
    ("weather", False),
)


def main() -> int:
    """Run all ways; return 1 if a loop isn't as it has to be."""
    parser = parser_of("tool_loops", __doc__)
    parser.add_argument("--loops", type=int, default=50, help="of each function")
    parser.add_argument("--seed", type=int, default=28, help="of times, numbers and cities")
    arguments = parser.parse_args()
    verdict = Verdict()
    with folder_for(arguments) as folder:
        services = _services(folder)
        progress("starting")
        with running(*services, timeout_s=300):
            draw = random.Random(arguments.seed)
            asyncio.run(_measure(services[-1].address, arguments.loops, draw, verdict))
    return verdict.conclude(as_json=arguments.json)


def _services(folder: Path) -> tuple[ServiceProcess, ...]:
    """Return the services, the Processor last."""
    common = {"model_path": _MODEL, "model_name": "demo"}
    flags = {
        "prefill": {**common, "bootstrap_port": free_port()},
        "decode": {**common, "mode": "disaggregated"},
    }
    workers = [
        ServiceProcess(f"millstream_server.{role}", own, folder / f"{role}.log")
        for role, own in flags.items()
    ]
    addresses = ",".join(worker.address for worker in workers)
    front = {"models": f"demo={_MODEL}", "workers": addresses}
    log = folder / "processor.log"
    return *workers, ServiceProcess("millstream_server.processor", front, log)


async def _measure(address: str, loops: int, draw: random.Random, verdict: Verdict) -> None:
    turns = asyncio.Semaphore(_AT_ONCE)
    async with Client(address) as client:

        async def one(kind: str, *, reasoning: bool) -> Outcome:
            use = USES[kind](draw)
            async with turns:
                return await run_loop(client, use, reasoning=reasoning)

        for kind, reasoning in _WAYS:
            started = time.monotonic()
            tried = (one(kind, reasoning=reasoning) for _ in range(loops))
            outcomes = await asyncio.gather(*tried)
            wrong = [outcome.wrong for outcome in outcomes if outcome.wrong]
            name = f"{kind}, with reasoning" if reasoning else kind
            verdict.measured[name] = {
                "loops": loops,
                "right": loops - len(wrong),
                "pieces": sum(outcome.pieces for outcome in outcomes),
                "seconds": round(time.monotonic() - started, 1),
            }
            pieces = verdict.measured[name]["pieces"]
            verdict.expect(pieces > loops, f"{name}: {pieces} pieces, so answers weren't streamed")
            progress(f"{name}: {loops - len(wrong)} of {loops}")
            for sentence in wrong[:10]:
                verdict.expect(holds=False, otherwise=f"{name}: {sentence}")


if __name__ == "__main__":
    sys.exit(main())
