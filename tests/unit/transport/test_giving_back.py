"""Memory is given back when callers hold much less, or when much has passed and it is quiet."""

from __future__ import annotations

import pytest

from millstream_server.runtime.transport import options as bounds_module
from millstream_server.runtime.transport.options import Bounds, TransportOptions

_MIB = 1 << 20


class Caller:
    caller_key = "ipv4:10.0.0.7"


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    done: list[None] = []
    monkeypatch.setattr(bounds_module, "trim_in_background", lambda: done.append(None))
    return done


def _bounds() -> Bounds:
    options = TransportOptions(max_receive_bytes=4 * _MIB)
    return Bounds(options)


def test_when_much_less_is_held(trims: list[None]) -> None:
    bounds, caller = _bounds(), Caller()
    bounds.received.add(caller, 40 * _MIB)
    bounds.tick()
    assert not trims
    bounds.received.remove(caller, 39 * _MIB)
    bounds.tick()
    bounds.tick()
    assert len(trims) == 1


def test_when_much_has_passed_and_it_is_quiet(trims: list[None]) -> None:
    bounds = _bounds()
    for _ in range(3):
        bounds.taken_bytes += 15 * _MIB
        bounds.tick()
    assert not trims  # it isn't quiet
    bounds.tick()
    bounds.tick()
    assert len(trims) == 1


def test_when_many_streams_have_ended_what_they_left_in_cycles_is_collected_later(
    trims: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    collections: list[None] = []
    monkeypatch.setattr("gc.collect", lambda: collections.append(None))
    bounds, caller = _bounds(), Caller()
    bounds.streams.add(caller, 400)
    bounds.tick()
    bounds.streams.remove(caller, 360)
    bounds.tick()
    assert not collections  # what was cut off may still run
    for _ in range(3):
        bounds.tick()
    assert len(trims) == len(collections) == 1
