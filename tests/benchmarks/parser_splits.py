"""Divides answers of every format at random, and expects the same events: a million divisions.

    python -m tests.benchmarks.parser_splits --count 1000000

`tests/unit/formats` does it a few hundred times.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

import yaml

from millstream_server.formats.families import FORMATS
from tests.support.answers import divided, parser, read

_GOLDENS = Path(__file__).parents[1] / "unit" / "formats" / "goldens.yaml"
_SAME = 20
"""Divisions of one text."""


def main() -> int:
    """Return 1 at the first difference, and print what shows it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=1_000_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--seconds", type=float, default=math.inf, help="end after so long")
    given = arguments.parse_args()
    until_s, count = time.monotonic() + given.seconds, 0
    chance = random.Random(given.seed)
    answers = [each["answer"] for each in yaml.safe_load(_GOLDENS.read_text("utf-8"))]
    for number in range(given.count // _SAME):
        if time.monotonic() > until_s:
            break
        count += _SAME
        name = chance.choice(sorted(FORMATS))
        text = "".join(_piece(chance, chance.choice(answers)) for _ in range(chance.randint(1, 4)))
        whole = read(parser(FORMATS[name]), [text])
        for _ in range(_SAME):
            cuts = [chance.randint(0, len(text)) for _ in range(chance.randint(1, 12))]
            if read(parser(FORMATS[name]), divided(text, cuts)) != whole:
                sys.stdout.write(f"{name}, text {number}: {text!r} at {sorted(cuts)}\n")
                return 1
    sys.stdout.write(f"{count} divisions, no difference\n")
    return 0


def _piece(chance: random.Random, answer: str) -> str:
    """Return an answer, or the part of one."""
    if chance.random() < 1 / 2:
        return answer
    start = chance.randrange(len(answer))
    return answer[start : start + chance.randint(1, 60)]


if __name__ == "__main__":
    sys.exit(main())
