"""What a load report says, by a clock and a process made up here; and the real limits' sources."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from millstream_server.runtime.telemetry.counts import (
    LoadMeter,
    ProcessUse,
    cores_available,
    memory_limit_bytes,
)


@dataclass
class World:
    """A clock, a process on four cores with 1,000 bytes, and a service's utilization."""

    now: float = 100.0
    cpu_s: float = 7.0
    memory: int = 250
    utilization: float = 0.5

    def meter(self) -> LoadMeter:
        return LoadMeter(
            lambda: self.utilization,
            process=ProcessUse(
                cpu_s=lambda: self.cpu_s,
                memory_bytes=lambda: self.memory,
                cores=4,
                memory_limit_bytes=1000,
            ),
            clock=lambda: self.now,
        )


def test_rates_are_over_the_window_and_forget() -> None:
    world = World()
    meter = world.meter()
    for tenth in range(100):  # ten a second for ten seconds, every fifth one our fault
        world.now = 100 + tenth / 10
        meter.finished(failed=tenth % 5 == 0)
    world.now = 110
    load = meter.read()
    assert load.rps == pytest.approx(10)
    assert load.eps == pytest.approx(2, rel=0.1)
    world.now = 112.5  # two seconds of them are left in the last 4.5
    assert meter.read().rps == pytest.approx(20 / 4.5)
    world.now = 116
    assert (meter.read().rps, meter.read().eps) == (0, 0)


def test_a_young_meter_divides_by_its_age_but_not_by_moments() -> None:
    world = World()
    meter = world.meter()
    for _ in range(4):
        meter.finished()
    world.now += 0.001
    assert meter.read().rps == 4
    world.now += 2
    assert meter.read().rps == pytest.approx(2, rel=0.01)


def test_counting_keeps_no_more_than_the_window() -> None:
    world = World()
    meter = world.meter()
    for _ in range(1000):
        meter.finished()
        world.now += 0.7
    assert len(meter._periods) <= 10


def test_cpu_is_a_share_of_all_cores_over_the_window() -> None:
    world = World()
    meter = world.meter()
    world.now, world.cpu_s = 102, 7 + 4  # two of four cores
    assert meter.read().cpu_utilization == 0.5
    for second in range(3, 20):  # idle from then on
        world.now = 100 + second
        load = meter.read()
    assert load.cpu_utilization == 0


def test_cpu_after_a_pause_is_over_the_pause() -> None:
    world = World()
    meter = world.meter()
    world.now, world.cpu_s = 160, 7 + 60
    assert meter.read().cpu_utilization == 0.25
    world.now, world.cpu_s = 161, 67 + 4  # and then of what came since
    assert meter.read().cpu_utilization == 1


def test_a_reading_at_the_very_start_is_no_error() -> None:
    assert World().meter().read().cpu_utilization == 0


def test_memory_is_a_share_of_the_limit() -> None:
    world = World()
    meter = world.meter()
    assert meter.read().mem_utilization == 0.25
    world.memory = 3000
    assert meter.read().mem_utilization == 1


@pytest.mark.parametrize(("said", "told"), [(0.0, 0.01), (0.5, 0.5), (1.75, 1.75)])
def test_utilization_is_the_services_own_but_never_zero(said: float, told: float) -> None:
    world = World(utilization=said)
    load = world.meter().read()
    assert load.application_utilization == told


def test_limits_are_the_containers(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert cores_available(tmp_path) == 0.5
    assert memory_limit_bytes(tmp_path) == 1048576


@pytest.mark.parametrize("unlimited", [True, False], ids=["unlimited", "no cgroup"])
def test_limits_are_the_machines_without_a_containers(tmp_path: Path, *, unlimited: bool) -> None:
    if unlimited:
        (tmp_path / "cpu.max").write_text("max 100000\n")
        (tmp_path / "memory.max").write_text("max\n")
    assert cores_available(tmp_path) == len(os.sched_getaffinity(0))
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_limit_bytes(tmp_path) == machine


def test_a_quota_above_the_machine_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000000 100000\n")
    assert cores_available(tmp_path) == len(os.sched_getaffinity(0))


def test_this_process_has_memory_and_a_clock() -> None:
    process = ProcessUse.of_this()
    assert process.memory_bytes() > 1_000_000
    assert process.cpu_s() > 0
    assert process.cores > 0
    assert process.memory_limit_bytes > process.memory_bytes()
