"""How long SGLang compiles a grammar, by our plugin: in stand-ins of what it hooks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines.sglang_plugin import PLUGIN, imported_plugin  # noqa: F401 - a fixture

POLLS, POLL_S = 6000, 0.005


def test_a_grammars_time_is_counted_by_the_clock(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy engine's polls take longer than SGLang thinks, and an idle one's are shorter here."""
    now_s = 100.0
    monkeypatch.setattr(plugin, "time", SimpleNamespace(monotonic=lambda: now_s))
    first, second = SimpleNamespace(grammar_wait_ct=0), SimpleNamespace(grammar_wait_ct=0)
    manager = SimpleNamespace(
        SGLANG_GRAMMAR_MAX_POLL_ITERATIONS=POLLS,
        SGLANG_GRAMMAR_POLL_INTERVAL=POLL_S,
        grammar_queue=[first],
    )
    plugin._count_seconds(manager)
    assert manager.SGLANG_GRAMMAR_POLL_INTERVAL < POLL_S / 5  # how long it may hold a step up
    manager.grammar_queue.append(second)
    now_s, first.grammar_wait_ct = 129.9, POLLS + 1
    plugin._count_seconds(manager)
    assert [first.grammar_wait_ct, second.grammar_wait_ct] == [0, 0]
    now_s = 130.0
    plugin._count_seconds(manager)
    assert [first.grammar_wait_ct, second.grammar_wait_ct] == [POLLS, 0]


def test_short_grammars_wait_for_no_long_ones(plugin: Any) -> None:
    backend = SimpleNamespace()
    plugin._compile_last(None, backend)
    blocked = threading.Event()

    def compiled(key: tuple[str, str], _reasoning: bool) -> str:  # noqa: FBT001
        if len(key[1]) > 1000:
            blocked.wait()
        return key[1]

    long = [
        backend.executor.submit(compiled, ("json", "x" * 20_000), False)  # noqa: FBT003
        for _ in range(200)
    ]
    try:
        short = backend.executor.submit(compiled, ("json", "{}"), False)  # noqa: FBT003
        assert short.result(timeout=30) == "{}"
        assert not any(each.done() for each in long)
    finally:
        blocked.set()
