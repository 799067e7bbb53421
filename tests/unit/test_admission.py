"""The admission queue: which requests run, in which order, and which are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream_server.processor.admission import (
    Admission,
    AdmissionQueue,
    QueueLimits,
)
from millstream_server.processor.waiting import MAX_OVERTAKEN
from millstream_server.runtime.errors import (
    DeadlinePassedError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
)
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.telemetry.metrics import REGISTRY

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


@dataclass
class Machine:
    """What the queue stands before: so much room, and a clock by hand."""

    capacity: int = 2
    now_s: float = 100.0
    admissions: list[Admission] = field(default_factory=list)

    def queue(self, **limits: Any) -> AdmissionQueue:
        return AdmissionQueue(
            "unit", QueueLimits(**limits), lambda: self.capacity, lambda: self.now_s
        )


def enter(queue: AdmissionQueue, count: int = 1, **request: Any) -> list[Admission]:
    return [queue.enter(**request) for _ in range(count)]


def teach(queue: AdmissionQueue, machine: Machine, held_s: float, count: int = 8) -> None:
    """Let so many requests run for so long each."""
    for _ in range(count):
        admission = queue.enter()
        assert admission.runs
        machine.now_s += held_s
        admission.leave()


def refused(cause: str) -> float:
    return REGISTRY.get_sample_value("millstream_admission_refused_total", {"cause": cause}) or 0.0


def gauge(name: str) -> float:
    value = REGISTRY.get_sample_value(f"millstream_admission_{name}", {"model": "unit"})
    assert value is not None
    return value


# ---- room and order


def test_what_fits_runs_at_once_and_the_rest_waits() -> None:
    queue = Machine(capacity=2).queue()
    first, second, third = enter(queue, 3)
    assert (first.runs, second.runs, third.runs, third.waits) == (True, True, False, True)
    assert (queue.running, queue.queued) == (2, 1)
    first.leave()
    assert third.runs
    assert (queue.running, queue.queued) == (2, 0)


async def test_ready_costs_no_turn_of_the_loop_when_there_is_room() -> None:
    (admission,) = enter(Machine().queue())
    coroutine = admission.admitted()
    with pytest.raises(StopIteration):
        coroutine.send(None)


def test_a_fixed_limit_replaces_the_capacity_while_there_is_any() -> None:
    machine = Machine(capacity=100)
    queue = machine.queue(max_running=1)
    enter(queue, 3)
    assert queue.running == 1
    machine.capacity = 0
    assert queue.limit == 0


def test_choices_are_counted_and_a_wide_request_is_not_overtaken_by_later_ones() -> None:
    queue = Machine(capacity=4).queue()
    (narrow,) = enter(queue, units=2)
    (wide,) = enter(queue, units=4)
    (later,) = enter(queue, units=1)
    assert narrow.runs
    assert wide.waits
    assert later.waits
    narrow.leave()
    assert wide.runs
    assert later.waits


def test_a_request_wider_than_all_there_is_runs_alone() -> None:
    queue = Machine(capacity=2).queue()
    (one,) = enter(queue)
    (wide,) = enter(queue, units=16)
    (after,) = enter(queue)
    one.leave()
    assert wide.runs
    assert after.waits
    wide.leave()
    assert after.runs


def test_priority_goes_before_arrival() -> None:
    queue = Machine(capacity=1).queue()
    (running,) = enter(queue)
    waiting = [
        queue.enter(priority=priority) for priority in (LOW, NORMAL, HIGH, LOW, NORMAL, HIGH)
    ]
    order = []
    for _ in waiting:
        running.leave()
        (running,) = [admission for admission in waiting if admission.runs]
        order.append(waiting.index(running))
    assert order == [2, 5, 1, 4, 0, 3]


def test_low_priority_waits_for_a_bounded_number_of_others() -> None:
    queue = Machine(capacity=1).queue()
    (running,) = enter(queue, priority=HIGH)
    (low,) = enter(queue, priority=LOW)
    overtakers = 0
    while low.waits:  # there is always one of high priority
        (following,) = enter(queue, priority=HIGH)
        running.leave()
        if following.runs:
            overtakers += 1
            running = following
    assert overtakers == MAX_OVERTAKEN
    assert queue.queued == 1


def test_a_wide_low_one_is_not_passed_by_for_ever_where_narrow_ones_fit() -> None:
    queue = Machine(capacity=4).queue()
    (narrow,) = enter(queue, priority=LOW)
    (wide,) = enter(queue, priority=LOW, units=4)
    overtakers = enter(queue, 20, priority=HIGH)
    while wide.waits:
        assert queue.running, "none runs and the wide one waits"
        next(admission for admission in (narrow, *overtakers) if admission.runs).leave()
    assert wide.runs
    assert sum(admission.waits for admission in overtakers) == 20 - MAX_OVERTAKEN


def test_capacity_that_grows_lets_waiting_ones_through() -> None:
    machine = Machine(capacity=1)
    queue = machine.queue()
    admissions = enter(queue, 4)
    machine.capacity = 3
    queue.changed()
    assert [admission.runs for admission in admissions] == [True, True, True, False]


def test_capacity_that_shrinks_admits_none_until_there_is_capacity_again() -> None:
    machine = Machine(capacity=4)
    queue = machine.queue()
    admissions = enter(queue, 5)
    machine.capacity = 2
    queue.changed()
    for admission in admissions[:2]:
        admission.leave()
        assert admissions[4].waits
    admissions[2].leave()
    assert admissions[4].runs


# ---- bounds


def test_so_many_wait_and_no_more() -> None:
    queue = Machine(capacity=1).queue(max_queued=2)
    enter(queue, 3)
    before = refused("requests")
    with pytest.raises(OverloadedError, match=r"the queue is full \(2 waiting\)") as caught:
        enter(queue)
    assert caught.value.retry_delay_s == pytest.approx(1.0, rel=0.21)
    assert refused("requests") == before + 1
    assert (queue.running, queue.queued) == (1, 2)


def test_so_many_tokens_wait_and_no_more() -> None:
    queue = Machine(capacity=1).queue(max_queued_tokens=100)
    enter(queue, tokens=5000)  # runs at once: no matter how long
    enter(queue, tokens=60)
    before = refused("tokens")
    with pytest.raises(OverloadedError, match=r"41 tokens .* more than 100"):
        enter(queue, tokens=41)
    assert refused("tokens") == before + 1
    (admission,) = enter(queue, tokens=40)
    assert queue.waiting.tokens == 100
    admission.cancel()
    assert queue.waiting.tokens == 60


async def test_higher_priority_displaces_the_latest_of_the_lowest() -> None:
    queue = Machine(capacity=1).queue(max_queued=3)
    enter(queue)
    low, later_low, normal = (queue.enter(priority=p) for p in (LOW, LOW, NORMAL))
    waiting = asyncio.ensure_future(later_low.admitted())
    await asyncio.sleep(0)
    before = refused("displaced")
    (high,) = enter(queue, priority=HIGH)
    assert refused("displaced") == before + 1
    with pytest.raises(OverloadedError, match="higher priority") as caught:
        await waiting
    assert caught.value.retry_delay_s is not None
    assert [p.waits for p in (low, later_low, normal, high)] == [True, False, True, True]
    with pytest.raises(OverloadedError):
        enter(queue, priority=LOW)
    enter(queue, priority=HIGH)
    assert not low.waits
    enter(queue, priority=HIGH)
    assert not normal.waits
    with pytest.raises(OverloadedError):
        enter(queue, priority=HIGH)


def test_none_is_displaced_for_one_that_would_not_fit_even_so() -> None:
    queue = Machine(capacity=1).queue(max_queued_tokens=100)
    enter(queue)
    (low,) = enter(queue, tokens=50, priority=LOW)
    enter(queue, tokens=50, priority=HIGH)
    with pytest.raises(OverloadedError):
        enter(queue, tokens=51, priority=HIGH)
    assert low.waits
    enter(queue, tokens=50, priority=HIGH)
    assert not low.waits


def test_one_that_displaces_what_it_waited_for_runs() -> None:
    """Without a look at the queue after that, it would wait for the next one to leave."""
    queue = Machine(capacity=4).queue(max_queued=1)
    enter(queue, 3)
    (wide,) = enter(queue, units=4, priority=LOW)
    queue.waiting.overtaken = MAX_OVERTAKEN  # it is the wide one's turn
    (high,) = enter(queue, priority=HIGH)
    assert not wide.waits
    assert high.runs


# ---- estimates


def test_waits_are_estimated_from_how_long_requests_ran() -> None:
    machine = Machine(capacity=4)
    queue = machine.queue()
    teach(queue, machine, 2.0, 7)
    assert queue.expected_wait_s() is None, "too little to go by"
    teach(queue, machine, 2.0, 1)
    assert queue.expected_wait_s() == 0
    enter(queue, 4)
    assert queue.expected_wait_s() == pytest.approx(0.5)
    enter(queue, 7, priority=NORMAL)
    assert queue.expected_wait_s(priority=NORMAL) == pytest.approx(4.0)
    assert queue.expected_wait_s(priority=HIGH) == pytest.approx(0.5)
    assert queue.expected_wait_s(priority=HIGH, units=3) == pytest.approx(1.5)
    machine.capacity = 2  # half of the workers are gone
    assert queue.expected_wait_s() == pytest.approx((4 + 7 + 1 - 2) * 2.0 / 2)
    machine.capacity = 0
    assert queue.expected_wait_s() is None


def test_what_runs_has_been_held_for_a_while_already() -> None:
    machine = Machine(capacity=1)
    queue = machine.queue()
    teach(queue, machine, 10.0)
    (running,) = enter(queue)
    assert queue.expected_wait_s() == pytest.approx(10.0)
    machine.now_s += 9.9
    assert queue.expected_wait_s() == pytest.approx(0.1)
    (waiting,) = enter(queue, timeout_s=8.0)
    assert queue.expected_wait_s() == pytest.approx(10.1)
    machine.now_s += 3600  # stuck, as it seems: it takes off one mean and no more
    assert queue.expected_wait_s() == pytest.approx(10.0)
    running.leave()
    assert waiting.runs


def test_a_wide_one_counts_as_all_there_is() -> None:
    machine = Machine(capacity=2)
    queue = machine.queue()
    teach(queue, machine, 10.0)
    (running,) = enter(queue)
    assert queue.expected_wait_s(units=16) == pytest.approx(5.0)
    (wide,) = enter(queue, units=16, timeout_s=60.0)
    assert queue.expected_wait_s() == pytest.approx((1 + 2 + 1 - 2) * 10.0 / 2)
    running.leave()
    assert wide.runs
    machine.now_s += 2.0
    assert queue.expected_wait_s() == pytest.approx((queue._held._mean_s - 2 * 2.0) / 2)
    wide.leave()
    assert queue.expected_wait_s(units=16) == 0


def test_the_estimate_follows_a_change() -> None:
    machine = Machine(capacity=1)
    queue = machine.queue()
    teach(queue, machine, 1.0, 100)
    teach(queue, machine, 9.0, 100)
    enter(queue)
    assert queue.expected_wait_s() == pytest.approx(9.0, rel=0.06)


def test_a_deadline_shorter_than_the_queue_is_refused_at_once() -> None:
    machine = Machine(capacity=1)
    queue = machine.queue()
    teach(queue, machine, 2.0)
    enter(queue, 3)
    before = refused("deadline")
    with pytest.raises(OverloadedError, match=r"about 6\.0 s .* deadline is in 5\.0 s") as caught:
        enter(queue, timeout_s=5.0)
    assert caught.value.retry_delay_s == pytest.approx(3.0, rel=0.21), "half of the queue"
    assert refused("deadline") == before + 1
    assert queue.enter(timeout_s=6.5).waits
    assert queue.enter(timeout_s=2.5, priority=HIGH).waits


def test_without_evidence_no_deadline_is_refused() -> None:
    queue = Machine(capacity=1).queue()
    enter(queue, 3)
    assert queue.enter(timeout_s=0.001).waits


@pytest.mark.parametrize(("delay_s", "middle_s"), [(0.0, 0.1), (5.0, 5.0), (900.0, 30.0)])
def test_delays_are_bounded_and_spread(delay_s: float, middle_s: float) -> None:
    delays = [jittered(delay_s) for _ in range(500)]
    assert 0.8 * middle_s <= min(delays) < 0.9 * middle_s
    assert 1.1 * middle_s < max(delays) <= 1.2 * middle_s


# ---- ways out


async def _waiting(queue: AdmissionQueue, **request: Any) -> tuple[Admission, asyncio.Task[None]]:
    (admission,) = enter(queue, **request)
    assert admission.waits
    task = asyncio.ensure_future(admission.admitted())
    await asyncio.sleep(0)
    return admission, task


async def test_a_deadline_that_passes_in_the_queue_ends_the_wait() -> None:
    queue = Machine(capacity=1).queue()
    enter(queue)
    admission, task = await _waiting(queue, timeout_s=0.01)
    with pytest.raises(DeadlinePassedError):
        await asyncio.wait_for(task, 5)
    assert queue.queued == 0
    assert not admission.waits


async def test_a_cancel_ends_the_wait_and_frees_the_place() -> None:
    queue = Machine(capacity=1).queue(max_queued=1)
    enter(queue)
    admission, task = await _waiting(queue)
    admission.cancel()
    await asyncio.wait_for(task, 5)
    assert not admission.runs
    assert queue.enter().waits


async def test_a_failure_ends_the_wait() -> None:
    queue = Machine(capacity=1).queue()
    enter(queue)
    admission, task = await _waiting(queue)
    admission.fail(InvalidRequestError("no"))
    with pytest.raises(InvalidRequestError):
        await asyncio.wait_for(task, 5)
    assert queue.queued == 0


async def test_stopping_a_place_that_runs_is_the_generations_business() -> None:
    (admission,) = enter(Machine().queue())
    admission.cancel()
    admission.fail(InvalidRequestError("no"))
    assert admission.runs
    await admission.admitted()


async def test_a_task_cancelled_in_the_moment_it_is_admitted_gives_the_place_back() -> None:
    queue = Machine(capacity=1).queue()
    (running,) = enter(queue)
    admission, task = await _waiting(queue)
    running.leave()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert admission.runs
    admission.leave()
    assert queue.running == 0


def test_leaving_twice_frees_one_place() -> None:
    queue = Machine(capacity=2).queue()
    first, _, third, fourth = enter(queue, 4)
    first.leave()
    first.leave()
    assert third.runs
    assert fourth.waits
    assert queue.running == 2


# ---- no workers


async def test_waiting_ones_wait_for_a_worker_to_come_back() -> None:
    machine = Machine(capacity=1)
    queue = machine.queue(comeback_s=30.0)
    (running,) = enter(queue)
    admission, task = await _waiting(queue)
    machine.capacity = 0
    queue.changed()
    running.leave()
    assert admission.waits
    machine.capacity = 1
    queue.changed()
    await asyncio.wait_for(task, 5)
    assert admission.runs
    assert queue._comeback is None


async def test_they_do_not_wait_for_ever() -> None:
    machine = Machine(capacity=1)
    queue = machine.queue(comeback_s=0.01)
    enter(queue)
    tasks = [(await _waiting(queue))[1] for _ in range(3)]
    machine.capacity = 0
    queue.changed()
    for task in tasks:
        with pytest.raises(NoWorkerError, match="none reconnected within") as caught:
            await asyncio.wait_for(task, 5)
        assert caught.value.retry_delay_s is not None
    assert queue.queued == 0


# ---- figures


def test_the_gauges_follow() -> None:
    queue = Machine(capacity=1).queue()
    before = gauge("running_requests"), gauge("queued_requests"), gauge("queued_tokens")
    admissions = enter(queue, 3, tokens=7)
    now = gauge("running_requests"), gauge("queued_requests"), gauge("queued_tokens")
    assert [b - a for a, b in zip(before, now, strict=True)] == [1, 2, 14]
    for admission in admissions:
        admission.leave()
    after = gauge("running_requests"), gauge("queued_requests"), gauge("queued_tokens")
    assert after == before


def test_waits_are_recorded_by_priority() -> None:
    def waits() -> float:
        labels = {"model": "unit", "priority": "low"}
        return REGISTRY.get_sample_value("millstream_admission_wait_seconds_sum", labels)  # type: ignore[return-value]

    machine = Machine(capacity=1)
    queue = machine.queue()
    (running,) = enter(queue)
    (low,) = enter(queue, priority=LOW)
    before = waits()
    machine.now_s += 3.0
    running.leave()
    assert low.runs
    assert waits() - before == pytest.approx(3.0)


# ---- callers


def _by(queue: AdmissionQueue, callers: str, **request: Any) -> list[Admission]:
    """Let a request of each caller enter, in this order."""
    return [queue.enter(caller=caller, **request) for caller in callers]


def test_callers_run_by_turns_within_a_priority() -> None:
    machine = Machine(capacity=1)
    queue = machine.queue()
    (running,) = _by(queue, "a")
    waiting = _by(queue, "aaaaabbc") + _by(queue, "a", priority=HIGH)
    ran: list[str] = []
    for _ in range(9):
        running.leave()
        (running,) = [admission for admission in waiting if admission.runs]
        waiting.remove(running)
        ran.append(f"{running.caller} {running.priority.name}")
    assert ran == ["a HIGH", *(f"{caller} NORMAL" for caller in "abcabaaa")]


async def test_a_full_queue_refuses_the_caller_who_has_most_in_it() -> None:
    queue = Machine(capacity=8).queue(max_queued=16)
    flood = _by(queue, "f" * 24)
    assert sum(admission.runs for admission in flood) == 8
    with pytest.raises(OverloadedError, match=r"the queue is full \(16 waiting\)"):
        _by(queue, "f")
    sound = _by(queue, "ssssssss")  # as many as the other one then has
    assert all(admission.waits for admission in sound)
    assert [admission.waits for admission in flood[8:]] == [True] * 8 + [False] * 8
    with pytest.raises(OverloadedError, match="of a caller who has fewer took this one's place"):
        await flood[-1].admitted()
    for callers in "sf":
        with pytest.raises(OverloadedError):
            _by(queue, callers)
    (third,) = _by(queue, "t")
    assert third.waits
    assert not flood[15].waits


def test_who_has_most_tokens_waiting_is_refused_if_those_are_too_many() -> None:
    machine = Machine(capacity=0)
    queue = machine.queue(max_queued=100, max_queued_tokens=1000)
    machine.capacity = 1
    running = _by(queue, "f")
    small, large = _by(queue, "s" * 20, tokens=1), _by(queue, "fff", tokens=300)
    new = _by(queue, "n", tokens=250)
    assert [a.waits for a in (*running, *small, *large, *new)] == [False, *[True] * 22, False, True]


async def test_the_caller_who_has_most_loses_nothing_to_lower_priorities() -> None:
    queue = Machine(capacity=1).queue(max_queued=4)
    flood = _by(queue, "fffff")
    with pytest.raises(OverloadedError):
        _by(queue, "s", priority=LOW)
    assert all(admission.waits for admission in flood[1:])


def test_a_deadline_counts_what_runs_before_by_turns() -> None:
    machine = Machine(capacity=1)
    queue = machine.queue()
    teach(queue, machine, held_s=1.0)
    _by(queue, "f" * 21)
    with pytest.raises(OverloadedError, match=r"would wait about 21\.0 s"):
        _by(queue, "f", timeout_s=10.0)
    (sound,) = _by(queue, "s", timeout_s=3.0)
    assert sound.waits


def test_a_caller_with_very_many_running_waits_while_the_process_is_full() -> None:
    full = True
    queue = AdmissionQueue("unit", QueueLimits(), lambda: 4096, is_full=lambda: full)
    (alone,) = _by(queue, "f", units=1023)
    more = _by(queue, "ff")
    assert [admission.runs for admission in (alone, *more)] == [True] * 3, "no other caller is here"
    sound = _by(queue, "ss")
    held = _by(queue, "ff")
    assert all(admission.runs for admission in sound)
    assert all(admission.waits for admission in held)
    assert all(admission.runs for admission in _by(queue, "st")), "others pass"
    more[0].leave()
    assert held[0].waits, "1,024 are left"
    more[1].leave()
    assert [admission.runs for admission in held] == [True, False]
    full = False
    sound[0].leave()
    assert held[1].runs
    assert queue.running == 1023 + 5


# ---- prompt tokens


async def test_prompts_above_what_workers_take_wait_in_order() -> None:
    most = 100
    queue = AdmissionQueue("unit", QueueLimits(), lambda: 9, open_tokens=lambda: most)
    (first,) = enter(queue, prompt=40)
    (second,) = enter(queue, prompt=60)
    (long,) = enter(queue, prompt=70)
    (short,) = enter(queue, prompt=1)
    assert [each.runs for each in (first, second, long, short)] == [True, True, False, False]
    first.leave()
    assert long.waits, "60 and 70 are more than 100"
    assert short.waits, "it isn't overtaken, or it could wait for ever"
    most = 131
    queue.changed()
    assert [long.runs, short.runs] == [True, True]


async def test_a_prompt_longer_than_what_workers_take_runs_alone() -> None:
    queue = AdmissionQueue("unit", QueueLimits(), lambda: 9, open_tokens=lambda: 100)
    (longest,) = enter(queue, prompt=500)
    (next_one,) = enter(queue, prompt=1)
    assert [longest.runs, next_one.runs] == [True, False]
    longest.leave()
    assert next_one.runs


# ---- anything in any order


class Anything(RuleBasedStateMachine):
    """Requests come, leave, are cancelled and fail, workers come and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.machine = Machine(capacity=3)
        self.limits = QueueLimits(max_queued=5, max_queued_tokens=40)
        self.queue = AdmissionQueue(
            "unit", self.limits, lambda: self.machine.capacity, lambda: self.machine.now_s
        )
        self._admit_one = self.queue._run
        self.queue._run = self._run  # type: ignore[method-assign]
        self.admissions: list[Admission] = []
        self.tasks: dict[Admission, asyncio.Task[None]] = {}

    def _do(self, act: Callable[[], Awaitable[None] | None]) -> None:
        async def step() -> None:
            done = act()
            if done is not None:
                await done
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        self.runner.run(step())

    @rule(
        units=st.integers(1, 5),
        tokens=st.integers(1, 20),
        priority=st.sampled_from(Priority),
        timeout_s=st.none() | st.just(1.0),
        caller=st.sampled_from("abc"),
    )
    def comes(
        self, units: int, tokens: int, priority: Priority, timeout_s: float | None, caller: str
    ) -> None:
        def act() -> None:
            try:
                admission = self.queue.enter(
                    units, tokens=tokens, priority=priority, timeout_s=timeout_s, caller=caller
                )
            except OverloadedError:
                return
            self.admissions.append(admission)
            self.tasks[admission] = asyncio.ensure_future(admission.admitted())

        self._do(act)

    @precondition(lambda self: self.admissions)
    @rule(
        index=st.integers(0, 99),
        way=st.sampled_from(["leave", "cancel", "fail", "drop", "leave twice"]),
        later_s=st.floats(0, 3),
    )
    def goes(self, index: int, way: str, later_s: float) -> None:
        admission = self.admissions[index % len(self.admissions)]
        self.machine.now_s += later_s

        def act() -> None:
            if way == "cancel":
                admission.cancel()
            elif way == "fail":
                admission.fail(InvalidRequestError("no"))
            else:
                if way == "drop":
                    self.tasks[admission].cancel()
                admission.leave()
                if way == "leave twice":
                    admission.leave()

        self._do(act)

    @rule(capacity=st.integers(1, 6))
    def workers_change(self, capacity: int) -> None:
        self.machine.capacity = capacity
        self._do(self.queue.changed)

    def _run(self, admission: Admission, now_s: float) -> None:
        self._admit_one(admission, now_s)
        alone = self.queue.running == admission.units
        assert self.queue.running <= self.machine.capacity or alone, "more than there is room for"

    @invariant()
    def the_books_are_right(self) -> None:
        running = [admission for admission in self.admissions if admission.runs]
        waiting = [admission for admission in self.admissions if admission.waits]
        assert self.queue.running == sum(admission.units for admission in running)
        assert self.queue.queued == len(waiting) <= self.limits.max_queued
        assert self.queue.waiting.tokens == sum(admission.tokens for admission in waiting)
        assert self.queue.waiting.tokens <= self.limits.max_queued_tokens

    @invariant()
    def none_waits_while_there_is_capacity(self) -> None:
        if any(admission.waits for admission in self.admissions):
            assert self.queue.running, "a lost waiter"

    @invariant()
    def a_task_waits_as_long_as_its_place_does(self) -> None:
        for admission, task in self.tasks.items():
            assert task.done() == (not admission.waits)

    def teardown(self) -> None:
        for admission in self.admissions:
            self._do(admission.leave)
        assert (self.queue.running, self.queue.queued, self.queue.waiting.tokens) == (0, 0, 0)
        for task in self.tasks.values():
            if not task.cancelled():
                task.exception()
        self.runner.close()


Anything.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase
