"""The order of text work, without threads: who is next, and who is refused."""

from __future__ import annotations

import pytest

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.work.fair_queue import FairQueue, PoolLimits, Work

LONG_S = 2.0
SHORT_S = 0.01


class Queue:
    """A `FairQueue` whose work is known by its caller."""

    def __init__(self, **limits: float) -> None:
        self.refused: list[str] = []
        self.queue = FairQueue(PoolLimits(**limits))  # type: ignore[arg-type]

    def add(self, caller: str, seconds: float, *, batch: bool = False) -> Work:
        work = Work(
            run=lambda: None,
            refuse=lambda _: self.refused.append(caller),
            seconds=seconds,
            caller=caller,
            batch=batch,
        )
        self.queue.add(work)
        return work

    def take(self) -> str | None:
        """Take work and leave it running."""
        work = self.queue.take()
        return work.caller if work else None

    def order(self, used_s: dict[str, float] | None = None) -> list[str]:
        """Do all work in one thread, each piece in its estimate or what ``used_s`` says."""
        order = []
        while (work := self.queue.take()) is not None:
            order.append(work.caller)
            self.queue.done(work, (used_s or {}).get(work.caller, work.seconds))
        return order


def test_a_chat_is_next_beside_30_callers_with_large_texts() -> None:
    queue = Queue()
    for number in range(30):
        queue.add(f"greedy-{number}", LONG_S)
        queue.add(f"greedy-{number}", LONG_S)
    assert queue.take() == "greedy-0"
    assert queue.take() is None  # the other thread stays free
    queue.add("chat", SHORT_S)
    assert queue.take() == "chat"


def test_a_chat_is_next_beside_its_own_callers_large_texts() -> None:
    queue = Queue()
    for _ in range(10):
        queue.add("a", LONG_S)
    assert queue.take() == "a"
    chat = queue.add("a", SHORT_S)
    assert queue.queue.take() is chat


def test_a_chat_with_a_long_text_is_next_among_long_ones() -> None:
    queue = Queue(max_waiting_s=1000.0)
    for _ in range(3):
        for number in range(30):
            queue.add(f"greedy-{number}", LONG_S)
    running = queue.queue.take()
    assert running is not None
    queue.add("chat", 0.1)
    queue.queue.done(running, LONG_S)
    assert queue.take() == "chat"


def test_callers_get_the_same_thread_time_not_the_same_number() -> None:
    queue = Queue()
    for _ in range(2):
        queue.add("large", 0.04)
    for _ in range(8):
        queue.add("small", 0.01)
    assert queue.order() == [*["small"] * 3, "large", *["small"] * 4, "large", "small"]


def test_measured_time_counts_not_the_estimate() -> None:
    queue = Queue()
    for _ in range(4):
        queue.add("slow", 0.01)
        queue.add("quick", 0.01)
    order = queue.order({"slow": 0.04})
    assert order == ["slow", "quick", "quick", "quick", "quick", "slow", "slow", "slow"]


def test_silence_is_not_saved_up() -> None:
    queue = Queue()
    first = queue.add("a", 0.01)
    for _ in range(10):
        queue.add("busy", 0.01)
    assert queue.queue.take() is first
    queue.queue.done(first, 0.01)
    for _ in range(5):
        work = queue.queue.take()
        assert work is not None
        queue.queue.done(work, 0.01)
    for _ in range(5):
        queue.add("a", 0.01)
    assert queue.order() in (["a", "busy"] * 5, ["busy", "a"] * 5)


def test_short_work_does_not_keep_long_work_from_running() -> None:
    queue = Queue()
    for _ in range(10):
        queue.add("short", SHORT_S)
    queue.add("long", LONG_S)
    assert [queue.take(), queue.take(), queue.take()] == ["short", "long", "short"]


def test_batches_leave_a_thread_free_however_short_their_pieces() -> None:
    queue = Queue(threads=3)
    for _ in range(5):
        queue.add("batch", SHORT_S, batch=True)
    assert [queue.take(), queue.take(), queue.take()] == ["batch", "batch", None]


def test_removed_work_is_not_done_and_frees_its_place() -> None:
    queue = Queue(max_caller_waiting_s=3.0)
    works = [queue.add("a", 1.0) for _ in range(3)]
    with pytest.raises(OverloadedError):
        queue.add("a", 1.0)
    assert queue.queue.remove(works[1])
    assert not queue.queue.remove(works[1])
    queue.add("a", 1.0)
    assert queue.order() == ["a"] * 3
    assert queue.queue.waiting_s == 0
    assert not queue.queue.remove(works[0])
    assert works[0].gone


def test_a_caller_who_leaves_does_not_lose_its_turn_later() -> None:
    queue = Queue()
    for _ in range(3):
        queue.queue.remove(queue.add("a", SHORT_S))
    queue.add("a", SHORT_S)
    assert queue.order() == ["a"]


def test_too_much_of_one_caller_is_refused_with_a_delay() -> None:
    queue = Queue(max_caller_waiting_s=4.0)
    queue.add("a", LONG_S)
    queue.add("a", LONG_S)
    with pytest.raises(OverloadedError) as refused:
        queue.add("a", SHORT_S)
    assert "this caller's bodies and texts" in refused.value.message
    assert "take about 4.0 s, and this one 0.0 s; at most 4 s may wait" in refused.value.message
    assert refused.value.retry_delay_s == pytest.approx(2.0, rel=0.25)
    queue.add("b", 9.0)  # one text may always wait


def test_above_the_bound_for_all_the_caller_with_most_pays() -> None:
    queue = Queue(max_waiting_s=10.0)
    for _ in range(4):
        queue.add("a", LONG_S)
    queue.add("b", LONG_S)
    queue.add("c", SHORT_S)
    assert queue.refused == ["a"]
    queue.add("c", LONG_S)
    assert queue.refused == ["a", "a"]
    for _ in range(2):
        with pytest.raises(OverloadedError, match="all callers' bodies and texts"):
            queue.add("c", 4.0)
    assert queue.refused == ["a", "a"]
