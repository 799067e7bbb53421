"""The cost fuzzer finds what is planted, and nothing in a reader that is linear."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from collections.abc import Callable

from tests.benchmarks.cost_fuzz import Climb
from tests.benchmarks.fuzzing.costs import Bound, Gauge, Reader
from tests.benchmarks.fuzzing.trees import Grammar, rendered, repeats, resize

_NESTS = Grammar(
    {
        "whole": ["⟨item*,⟩"],
        "item": ["a", "bb", "(⟨item⟩)", "[⟨item*,⟩]", "n①"],
    }
)


def _step() -> None: ...


def _linear(data: bytes) -> None:
    for _ in data:
        _step()


def _quadratic(data: bytes) -> None:
    """Take a look at all that is open for each parenthesis."""
    _linear(data)
    opened = 0
    for char in data:
        opened += {40: 1, 41: -1}.get(char, 0)
        for _ in range(opened if char == 40 else 0):
            _step()


def _exponential(data: bytes) -> None:
    """Read what is in brackets twice."""
    _linear(data)
    at = data.find(b"[")
    if at >= 0:
        _exponential(data[at + 1 :])
        _exponential(data[at + 1 :])


def _failing(data: bytes) -> None:
    if b"bb),(" in data:
        raise KeyError(data)


def _found(read: Callable[[bytes], None], *sizes: int) -> list[tuple[str, bytes]]:
    """Search in an interpreter of its own: it forks, and threads of tests don't live on then."""
    command = [sys.executable, "-m", __name__, read.__name__, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    found: list[tuple[str, bytes]] = ast.literal_eval(done.stdout)
    return found


def _search(read: Callable[[bytes], None], sizes: tuple[int, ...]) -> list[tuple[str, bytes]]:
    reader = Reader(
        name="planted",
        of="",
        make=lambda: read,
        grammar=_NESTS,
        bound=Bound(calls=8, us=1e6, total_s=0.1),
        sizes=sizes,
    )
    with Gauge.of(reader) as gauge:
        climb = Climb(reader, gauge, random.Random(1))
        while climb.inputs < 600 and not climb.findings:
            climb.turn(0)
        found = [climb.shrunk(each, 4.0) for each in climb.findings]
    return [(each.kind.split()[0], reader.encoded(rendered(each.tree))) for each in found]


def test_a_linear_reader_is_clean() -> None:
    assert not _found(_linear, 64, 512)


def test_a_quadratic_reader_is_found() -> None:
    ((kind, data),) = _found(_quadratic, 256, 4096)
    assert kind in {"calls", "growth"}
    assert data.count(b"(") > 20


def test_an_exponential_reader_is_found_and_its_input_made_small() -> None:
    ((kind, data),) = _found(_exponential, 256, 1024)
    assert kind in {"did", "calls"}
    assert 8 <= data.count(b"[") < 40


def test_an_error_that_is_no_refusal_is_found() -> None:
    ((kind, data),) = _found(_failing, 64, 256)
    assert kind == "raised"
    assert b"bb),(" in data
    assert len(data) < 20


def test_an_input_is_the_same_every_time_and_of_the_size_asked_for() -> None:
    for seed in range(50):
        first, again = (_NESTS.draw(random.Random(seed)) for _ in range(2))
        assert rendered(first) == rendered(again)
        for part in repeats(first):
            tree = first.copy()
            resize(tree, repeats(tree)[repeats(first).index(part)], 2000)
            least = first.copy()
            repeats(least)[repeats(first).index(part)].times = 1
            assert len(rendered(tree)) <= max(2000, least.size) * 2, "but for indexes"


def test_lists_are_numbered_and_count_their_parts() -> None:
    grammar = Grammar({"whole": ["start: a0\n⟨rule*⟩a◎: x"], "rule": ["a①: a② a②\n"]})
    tree = grammar.draw(random.Random(1))
    (part,) = repeats(tree)
    part.times = 2
    assert rendered(tree) == "start: a0\na0: a1 a1\na1: a2 a2\na2: x"
    assert rendered(next(grammar.smaller(tree))) == "start: a0\na0: a1 a1\na1: x"


if __name__ == "__main__":
    print(_search(globals()[sys.argv[1]], tuple(map(int, sys.argv[2:]))))  # noqa: T201
