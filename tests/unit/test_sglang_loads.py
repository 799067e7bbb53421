"""The load an SGLang engine reports, read from a file that its schedulers write."""

from __future__ import annotations

import asyncio
import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream_server.control.engine import RankLoad
from millstream_server.engines.sglang.engine import SglangEngine, SglangEngineConfig
from millstream_server.engines.sglang.launch import BuiltEngine
from millstream_server.engines.sglang.loads import KvBlocks

BLOCK_SIZE = 16


class SnapshotFile:
    """SGLang's reader: it waits for the file's lock, however long."""

    def __init__(self, descriptor: int) -> None:
        self.fd = descriptor
        self.queued = 0
        self.ranks = 1

    def read_all(self) -> list[Any]:
        fcntl.flock(self.fd, fcntl.LOCK_SH)
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return [
            SimpleNamespace(
                num_running_reqs=0,
                num_waiting_reqs=self.queued + rank,
                num_waiting_uncached_tokens=100 * rank,
                num_used_tokens=rank * BLOCK_SIZE + 1 if rank else 0,
                disaggregation=None,
                queues=None,
            )
            for rank in range(self.ranks)
        ]


class SnapshotSocket(SnapshotFile):
    """The reader of several nodes' loads: no file that a scheduler could hold."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._descriptor = descriptor
        del self.fd

    def read_all(self) -> list[Any]:
        self.fd = self._descriptor
        try:
            return super().read_all()
        finally:
            del self.fd


def _engine(reader: SnapshotFile) -> SglangEngine:
    engine = SglangEngine(SglangEngineConfig(model_path="nowhere"))
    manager = SimpleNamespace(load_snapshot_reader=reader)
    built = cast("BuiltEngine", SimpleNamespace(engine=SimpleNamespace(tokenizer_manager=manager)))
    info = cast("Any", SimpleNamespace(max_running_requests=1))
    engine._lifetime.blocks = KvBlocks(BLOCK_SIZE, 10)
    engine._lifetime.started(built, info, lambda _: None)
    return engine


@pytest.mark.timeout(10)
async def test_a_scheduler_that_hangs_in_its_report_doesnt_stop_the_worker(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    path.touch()
    with path.open("rb") as file, path.open("rb") as writer:
        reader = SnapshotFile(file.fileno())
        engine = _engine(reader)
        reader.queued = 3
        assert (await engine.load()).queued_requests == 3
        fcntl.flock(writer, fcntl.LOCK_EX)
        reader.queued = 4
        async with asyncio.timeout(1):
            assert (await engine.load()).queued_requests == 3, "what was read last"
        fcntl.flock(writer, fcntl.LOCK_UN)
        assert (await engine.load()).queued_requests == 4
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)  # reading has given the lock back


async def test_loads_that_come_over_a_socket_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    path.touch()
    with path.open("rb") as file:
        reader = SnapshotSocket(file.fileno())
        reader.queued = 2
        assert (await _engine(reader).load()).queued_requests == 2


async def test_each_rank_has_its_part(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    path.touch()
    with path.open("rb") as file:
        reader = SnapshotFile(file.fileno())
        engine = _engine(reader)
        reader.ranks = 2
        engine._runs._runs = dict.fromkeys("abc")  # type: ignore[assignment]
        load = await engine.load()
    idle = RankLoad(running_requests=0, queued_requests=0, used_blocks=0, total_blocks=5)
    busy = RankLoad(
        running_requests=0, queued_requests=1, queued_tokens=100, used_blocks=2, total_blocks=5
    )
    assert load.ranks == (idle, busy)
    assert load.queued_requests == 3, "two are on their way to either"
    assert (load.used_blocks, load.total_blocks) == (2, 10)
