"""Bodies made of the OpenAPI document, for every endpoint: no server error, answers as documented.

    python -m tests.benchmarks.openapi_fuzz --examples 200 --seed 7

They go to a Processor over simulated workers for text, vectors and images.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import requests

from tests.support.clients.openapi_fuzz import fuzz
from tests.support.processor.every_ability import every_ability


async def _run(examples: int, seed: int) -> Sequence[str]:
    with tempfile.TemporaryDirectory() as folder:
        async with every_ability(Path(folder)) as suite:
            address = suite.front.address
            return await asyncio.to_thread(_fuzz, address, examples, seed)


def _fuzz(address: str, examples: int, seed: int) -> Sequence[str]:
    began_s = time.monotonic()
    document = requests.get(f"http://{address}/openapi.json", timeout=10).json()
    wrong = fuzz(document, address, examples, seed)
    took_s = time.monotonic() - began_s
    print(f"{len(document['paths'])} endpoints, seed {seed}, {took_s:.0f} s")  # noqa: T201
    return wrong


def main() -> None:
    """Parse arguments, run; exit with 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.openapi_fuzz")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    wrong = asyncio.run(_run(given.examples, given.seed))
    print("\n\n".join(wrong) or "nothing is wrong")  # noqa: T201
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
