"""What the streaming parser takes per token: in text, in reasoning, and inside of arguments.

    python -m tests.benchmarks.parser_cost
    python -m tests.benchmarks.parser_cost --against ../before --rounds 7   # seven minutes

Tokens of three characters, fed one by one; arguments of 10 kB and of 100 kB. The last column is the
ratio of the two: 1 is linear. Best of five runs. With --against (tests/benchmarks/against.py)
100 kB count, and each pass is a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from millstream_server.formats.families import FORMATS
from millstream_server.formats.parser import Parser
from millstream_server.formats.schema import Tools
from tests.benchmarks.against import (
    HERE,
    Figures,
    add_arguments,
    compare,
    environment_of,
    rounds_of,
)
from tests.support.writing import WRITERS

_TOOLS = Tools({"f": json.dumps({"properties": {"s": {"type": "string"}}})})
_PROSE = "The quick brown fox, number 17, jumps over the lazy dog; it isn't <b>there</b>.\n"
_CODE = 'def f(x):\n    if x < 3 and "a" in d[x]:\n        return {"k": [x]}\n'
_TOKEN_CHARS = 3
_RUNS = 5
_LARGE = 100_000


def _repeated(text: str, size: int) -> str:
    return (text * (size // len(text) + 1))[:size]


def _answer(name: str, size: int) -> tuple[str, str]:
    """Return a format, and an answer of it with about ``size`` characters."""
    if name == "text":
        return "hermes", _repeated(_PROSE, size)
    if name == "reasoning":
        return "hermes", f"<think>{_repeated(_PROSE, size)}</think>"
    return name, WRITERS[name].write("", "", [("f", {"s": _repeated(_CODE, size)})])


def seconds_per_token(name: str, size: int) -> float:
    """Return the CPU time of one token of an answer of about ``size`` characters."""
    form, text = _answer(name, size)
    pieces = [text[at : at + _TOKEN_CHARS] for at in range(0, len(text), _TOKEN_CHARS)]
    prompt = WRITERS[form].prompt
    best = float("inf")
    for _ in range(_RUNS):
        parser = Parser(FORMATS[form], _TOOLS, prompt=prompt)
        gc.collect()
        began = time.process_time()
        for piece in pieces:
            parser.feed(piece, (1,))
        parser.finish()
        best = min(best, time.process_time() - began)
    return best / len(pieces)


def _known() -> list[str]:
    """Return what is measured: a checkout that is compared may lack a format."""
    return ["text", "reasoning", *(name for name in WRITERS if name in FORMATS)]


def _of(checkout: Path) -> Figures:
    """Measure the parser of a checkout with this module, in a process of its own."""
    environment = environment_of(checkout)
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.parser_cost", "--json"],
        cwd=HERE,
        env={**os.environ, **environment},
        check=True,
        stdout=subprocess.PIPE,
    )
    figures: Figures = json.loads(done.stdout)
    return figures


def _table() -> None:
    print(f"{'':16}{'10 kB':>12}{'100 kB':>12}{'ratio':>8}")  # noqa: T201
    for name in _known():
        small, large = seconds_per_token(name, 10_000), seconds_per_token(name, _LARGE)
        row = f"{name:16}{small * 1e6:9.2f} us{large * 1e6:9.2f} us{large / small:8.2f}"
        print(row)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.parser_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: 100 kB alone")
    add_arguments(parser, figures="*_us_per_token")
    arguments = parser.parse_args()
    if arguments.against:
        return compare({"100 kB": _of}, arguments, as_json=arguments.json)
    for _ in range(rounds_of(arguments)):
        if arguments.json:
            figures = {
                f"{name}_us_per_token": seconds_per_token(name, _LARGE) * 1e6 for name in _known()
            }
            print(json.dumps(figures))  # noqa: T201
        else:
            _table()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
