"""Workers from a list, DNS, a file, and several of these."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millstream_server.routing.discovery import sources
from millstream_server.routing.discovery.sources import (
    Addresses,
    Discovery,
    DnsDiscovery,
    FileDiscovery,
    MergedDiscovery,
    StaticDiscovery,
    make_discovery,
)
from millstream_server.runtime.telemetry.metrics import REGISTRY
from millstream_testing.waiting import until


async def _next(watch: AsyncIterator[Addresses]) -> Addresses:
    return await asyncio.wait_for(anext(watch), 5)


async def test_a_list_is_named_once_and_never_changes() -> None:
    discovery = make_discovery(["a:1", "[::1]:2", "a:1"])
    assert isinstance(discovery, StaticDiscovery)
    assert [found async for found in discovery.watch()] == [{"a:1", "[::1]:2"}]


def _reasons(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.__dict__["fields"]["reason"] for record in caplog.records)


# ---- DNS


class Resolver:
    """Stands in for the system's: resolves every name to what the test sets."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self.fails = False
        self.asked = 0

    def __call__(self, host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        assert (host, port) == ("workers", 50061)
        self.asked += 1
        if self.fails:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in self.hosts]


async def test_changes_of_a_name_are_followed_and_a_failed_look_up_keeps_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver = Resolver("10.0.0.1", "fd00::1")
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    watch = DnsDiscovery("workers", 50061, interval_s=0.01).watch()
    assert await _next(watch) == {"10.0.0.1:50061", "[fd00::1]:50061"}
    change = asyncio.ensure_future(_next(watch))
    for fails in (False, True):
        resolver.fails, asked = fails, resolver.asked
        await until(lambda before=asked: resolver.asked >= before + 3)  # type: ignore[misc]
        assert not change.done()
    resolver.hosts, resolver.fails = ("10.0.0.2",), False
    assert await change == {"10.0.0.2:50061"}


async def test_a_failed_first_look_up_names_nobody_and_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = Resolver("10.0.0.1")
    resolver.fails = True
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    found = asyncio.ensure_future(_next(DnsDiscovery("workers", 50061, interval_s=0.01).watch()))
    await until(lambda: resolver.asked >= 3)
    assert not found.done()
    assert caplog.text.count("not resolved") == 1, "logged once, not at each attempt"
    resolver.fails = False
    assert await found == {"10.0.0.1:50061"}


async def test_a_real_name_is_resolved() -> None:
    assert "127.0.0.1:7" in await _next(DnsDiscovery("localhost", 7).watch())


# ---- file


async def test_changes_of_a_file_are_followed_and_what_cannot_be_read_keeps_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers"
    path.write_text("# prefill\na:1\n\n  b:2  \n")
    watch = FileDiscovery(path, interval_s=0.01).watch()
    assert await _next(watch) == {"a:1", "b:2"}
    change = asyncio.ensure_future(_next(watch))
    path.write_text("a:1\nnonsense\n")
    await until(lambda: "line 2: 'nonsense' is not HOST:PORT" in _reasons(caplog))
    path.unlink()
    await until(lambda: "No such file" in _reasons(caplog))
    assert not change.done()
    replaced = tmp_path / "new"
    replaced.write_text("c:3\n")
    replaced.rename(path)
    assert await change == {"c:3"}


# ---- several


async def test_several_are_merged_and_one_that_fails_does_not_hinder_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = Resolver("10.0.0.1")
    resolver.fails = True
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    path = tmp_path / "listed"
    path.write_text("b:2\na:1\n")
    sources: list[Discovery] = [
        StaticDiscovery(["a:1"]),
        DnsDiscovery("workers", 50061, interval_s=0.01),
        FileDiscovery(path, interval_s=0.01),
    ]
    async with contextlib.aclosing(MergedDiscovery(sources).watch()) as watch:
        found = await _next(watch)
        while found != {"a:1", "b:2"}:
            found = await _next(watch)
        resolver.fails = False
        assert await _next(watch) == {"a:1", "b:2", "10.0.0.1:50061"}
        replaced = tmp_path / "new"
        replaced.write_text("c:3\n")
        replaced.rename(path)
        assert await _next(watch) == {"a:1", "c:3", "10.0.0.1:50061"}, "a:1 is listed still"


async def test_a_source_that_fails_says_when_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> float | None:
        return REGISTRY.get_sample_value(
            "millstream_discovery_source_failing", {"source": str(path)}
        )

    path = tmp_path / "workers"
    path.write_text("a:1\n")
    discovery = FileDiscovery(path, interval_s=0.01)
    caplog.set_level("INFO")
    watch = discovery.watch()
    assert await _next(watch) == {"a:1"}
    news = asyncio.ensure_future(_next(watch))
    path.write_text("nonsense\n")
    await until(lambda: failing() == 1)
    assert "workers are found again" not in caplog.text
    path.write_text("b:2\n")
    assert await news == {"b:2"}
    assert failing() == 0
    assert "workers are found again" in caplog.text


class Breaking:
    """Names the next addresses at each watch, then breaks."""

    def __init__(self, *found: str) -> None:
        self._found = iter(found)

    async def watch(self) -> AsyncIterator[Addresses]:
        yield frozenset({next(self._found)})
        raise RuntimeError


def _failures() -> float:
    return REGISTRY.get_sample_value("millstream_discovery_failures_total") or 0.0


async def test_a_source_that_breaks_keeps_what_it_named_and_starts_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FIRST_PAUSE_S", 0.001)
    before = _failures()
    merged = MergedDiscovery([Breaking("b:2", "c:3"), StaticDiscovery(["a:1"])])
    async with contextlib.aclosing(merged.watch()) as watch:
        found = [await _next(watch)]
        while found[-1] != {"a:1", "c:3"}:
            found.append(await _next(watch))
    assert frozenset({"a:1", "b:2"}) in found
    assert "discovery failed; the known workers are kept, and it starts again" in caplog.text
    assert _failures() > before


async def test_a_file_that_is_watched_again_names_what_it_has_now(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("a:1\n")
    discovery = FileDiscovery(path, interval_s=0.01)
    watch = discovery.watch()
    assert await _next(watch) == {"a:1"}
    path.write_text("b:2\n")
    assert await _next(watch) == {"b:2"}
    assert await _next(discovery.watch()) == {"b:2"}
