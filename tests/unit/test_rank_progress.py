"""How long a rank has made no progress, as load reports say it."""

from __future__ import annotations

from millstream_server.control.engine import RankLoad
from millstream_server.worker.load_report import RankSilence
from millstream_testing.waiting import until

IDLE = RankLoad(running_requests=0, queued_requests=0, used_blocks=0, total_blocks=8)
BUSY = RankLoad(running_requests=1, queued_requests=0, used_blocks=1, total_blocks=8)
QUEUED = RankLoad(running_requests=0, queued_requests=1, used_blocks=0, total_blocks=8)


class Steps:
    """Two ranks that make progress when the test says so."""

    def __init__(self) -> None:
        self.made = [0, 0]
        self.now_s = 100.0
        self.read = 0

    def progress(self, dp_rank: int) -> int:
        self.read += 1
        return self.made[dp_rank]

    async def probe(self, dp_rank: int) -> None:
        raise NotImplementedError


def test_each_rank_has_its_own_time() -> None:
    steps = Steps()
    progress = RankSilence(steps, lambda: steps.now_s)
    assert progress.silent_s([BUSY, BUSY]) == [0, 0]
    steps.now_s += 3
    steps.made[1] += 1
    assert progress.silent_s([BUSY, BUSY]) == [3, 0]
    steps.now_s += 2
    assert progress.silent_s([BUSY, QUEUED]) == [5, 2]
    steps.made[0] += 1
    assert progress.silent_s([BUSY, QUEUED]) == [0, 2]


def test_an_idle_ranks_time_grows_and_begins_anew_with_work() -> None:
    steps = Steps()
    progress = RankSilence(steps, lambda: steps.now_s)
    progress.silent_s([IDLE, IDLE])
    steps.now_s += 60
    assert progress.silent_s([IDLE, IDLE]) == [60, 60]
    steps.now_s += 1
    assert progress.silent_s([BUSY, QUEUED]) == [0, 0]
    steps.now_s += 4
    assert progress.silent_s([BUSY, BUSY]) == [4, 4]


async def test_progress_between_reports_is_seen_while_someone_watches() -> None:
    steps = Steps()
    progress = RankSilence(steps, lambda: steps.now_s)
    progress.silent_s([BUSY, BUSY])
    with progress.watching(), progress.watching():
        steps.made[0] += 1
        steps.now_s += 1
        read = steps.read
        await until(lambda: steps.read > read)
        steps.now_s += 4
        assert progress.silent_s([BUSY, BUSY]) == [4, 5]
