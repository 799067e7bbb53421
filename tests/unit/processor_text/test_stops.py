"""Stop strings: found where they first complete, never sent in part."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_server.processor.text.stops import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    StopMatcher,
    check_stops,
)
from tests.support.steps import steps

TEXT = st.text(alphabet="ab\n", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Find the stop that ends first, the longest of those."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def could_become_a_stop(held: str, stops: list[str]) -> bool:
    return held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@settings(deadline=None, database=None, max_examples=500)
@given(text=TEXT, stops=STOPS, seed=st.integers(0, 9))
def test_agrees_with_a_plain_search(text: str, stops: list[str], seed: int) -> None:
    chance = random.Random(seed)
    matcher, sent, read, matched = StopMatcher(stops), "", 0, None
    while read < len(text) and matched is None:
        size = chance.randint(1, 4)
        safe, matched = matcher.push(text[read : read + size])
        read += size
        sent += safe
        if matched is None:
            held = text[:read][len(sent) :]
            assert text.startswith(sent)
            assert could_become_a_stop(held, stops)
    if matched is None:
        sent += matcher.flush()
    assert (sent, matched) == expected(text, stops)


def test_holds_back_no_more_than_needed() -> None:
    matcher = StopMatcher(["\n\nUser:", "</s>"])
    assert matcher.push("Hello\n") == ("Hello", None)
    assert matcher.push("\nUs") == ("", None)
    assert matcher.push("ually") == ("\n\nUsually", None)
    assert matcher.push(" <") == (" ", None)
    assert matcher.flush() == "<"


def test_what_is_complete_first_wins_and_of_those_the_longest() -> None:
    assert StopMatcher(["abcd", "c"]).push("abcd") == ("ab", "c")
    assert StopMatcher(["cd", "abcd", "d"]).push("xabcd") == ("x", "abcd")
    assert StopMatcher(["abcx", "bc"]).push("abc") == ("a", "bc")


def test_text_after_a_stop_is_dropped() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("a END b") == ("a ", "END")
    assert matcher.push("more") == ("", "END")
    assert matcher.flush() == ""


def test_regex_characters_are_only_characters() -> None:
    for stop in ("]", "^", "-", "\\", "[a-z]", ".*"):
        assert StopMatcher([stop]).push(f"az{stop}") == ("az", stop)
        assert StopMatcher([stop]).push("az") == ("az", None)


def test_the_worst_text_costs_linear_time() -> None:
    matcher = StopMatcher(["a" * n + "b" for n in range(255, 239, -1)])
    started = time.perf_counter()
    for _ in range(20_000):
        matcher.push("a")
    # 0.03 s.
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    ("stops", "fields"),
    [
        ([], []),
        (["x" * 256, "y"], []),
        (["x" * 257, "ok", ""], ["stop[0]", "stop[2]"]),
        (["x"] * 17, ["stop"]),
    ],
)
def test_check_stops(stops: list[str], fields: list[str]) -> None:
    assert [violation.field for violation in check_stops(stops)] == fields


def test_choices_of_a_request_share_what_their_stops_need() -> None:
    stops = [f"{chr(97 + at)}" * MAX_STOP_CHARS for at in range(MAX_STOPS)]
    first = steps(lambda: StopMatcher(stops), 20 * MAX_STOPS * MAX_STOP_CHARS)
    assert steps(lambda: [StopMatcher(list(stops)) for _ in range(15)], first // 10) > 0
