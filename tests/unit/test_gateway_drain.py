"""What the gateway makes of the queue's counts: its drain rate, and how long a request would wait. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.drain import MOST_S, DrainRate, Sample, most_pulls_until, pulls_until
from services.gateway.patience import Patience
from services.gateway.quota import Turnover
from shared.bus.work import WEIGHTS, _interleave
from shared.protocol.subjects import PRIORITIES, Priority

STEP_S = 0.5


class Queue:
    """Counts as NATS would give them, sampled at a steady pace."""

    def __init__(self) -> None:
        self.rate = DrainRate()
        self.at_s = 100.0
        self.waiting = self.pulled = self.left = 0
        self.look()

    def look(self, *, served: bool = True) -> None:
        self.rate.add(Sample(self.at_s, self.waiting, self.pulled, self.left), served=served)
        self.at_s += STEP_S

    def run(self, looks: int, arriving: int, drained: int, *, served: bool = True) -> None:
        for _ in range(looks):
            taken = min(drained, self.waiting + arriving)
            self.waiting += arriving - taken
            self.pulled += taken
            self.left += taken
            self.look(served=served)


def test_the_rate_is_what_leaves_while_work_waits() -> None:
    queue = Queue()
    assert queue.rate.per_s() is None
    queue.run(20, arriving=50, drained=10)
    assert queue.rate.per_s() == pytest.approx(10 / STEP_S)


def test_idle_times_say_nothing_about_the_rate() -> None:
    queue = Queue()
    queue.run(20, arriving=50, drained=10)
    queue.run(80, arriving=0, drained=10)
    queue.run(500, arriving=1, drained=10)  # never any left over at a look
    assert queue.waiting == 0
    assert queue.rate.per_s() == pytest.approx(10 / STEP_S)


def test_a_queue_that_nobody_serves_keeps_its_rate() -> None:
    queue = Queue()
    queue.run(20, arriving=50, drained=10)
    queue.run(100, arriving=1, drained=0, served=False)
    assert queue.rate.per_s() == pytest.approx(10 / STEP_S)
    queue.run(100, arriving=1, drained=0)
    assert queue.rate.per_s() is not None
    assert queue.rate.per_s() < 1  # type: ignore[operator]


def test_the_rate_follows_a_change_soon() -> None:
    queue = Queue()
    queue.run(100, arriving=50, drained=10)
    queue.run(8, arriving=50, drained=2)
    assert queue.rate.per_s() == pytest.approx(2 / STEP_S)


def test_waiting_in_vain_is_a_rate_too_that_gets_smaller_the_longer_it_lasts() -> None:
    queue = Queue()
    queue.run(1, arriving=1, drained=0)
    assert queue.rate.per_s() is None
    queue.run(1, arriving=1, drained=0)
    assert queue.rate.per_s() == pytest.approx(1 / STEP_S)
    queue.run(18, arriving=1, drained=0)
    assert queue.rate.per_s() == pytest.approx(1 / 9.5)
    queue.run(1000, arriving=1, drained=0)
    assert queue.rate.per_s() == pytest.approx(1 / MOST_S, rel=0.05)


def test_repeated_deliveries_and_withdrawn_work_are_not_drained_work() -> None:
    queue = Queue()
    queue.waiting = 1000
    queue.look()
    for _ in range(20):
        queue.pulled += 100  # a crashed worker's
        queue.left += 5
        queue.look()
    assert queue.rate.per_s() == pytest.approx(5 / STEP_S)
    for _ in range(20):
        queue.pulled += 3
        queue.left += 100  # cancelled
        queue.look()
    assert queue.rate.per_s() == pytest.approx(3 / STEP_S)


def test_the_rate_is_seen_where_a_single_request_waits_and_each_pull_empties_the_queue() -> None:
    queue = Queue()
    queue.waiting = 1
    queue.look()
    for _ in range(200):  # a pull every fourth look, and the next request at the look after it
        for look in range(4):
            if look == 2:
                queue.pulled, queue.left, queue.waiting = queue.pulled + 1, queue.left + 1, 0
            elif look == 3:
                queue.waiting = 1
            queue.look()
    truth = 1 / (3 * STEP_S)  # of three looks at a time it was waiting when they began
    assert queue.rate.per_s() == pytest.approx(truth, rel=0.2)


def test_counts_that_begin_again_forget_the_rate() -> None:
    queue = Queue()
    queue.run(20, arriving=50, drained=10)
    queue.pulled = queue.left = 0
    queue.look()
    assert queue.rate.per_s() is None


waiting_counts = st.fixed_dictionaries({p: st.integers(0, 60) for p in PRIORITIES})
priorities = st.sampled_from(PRIORITIES)


def simulated_pulls(waiting: dict[Priority, int], priority: Priority, more: int) -> int:
    """How many pulls it takes by the rule of `shared.bus.work`, one by one."""
    left = {**waiting, priority: waiting[priority] + more}
    turns = _interleave(WEIGHTS)
    pulls = 0
    while left[priority]:
        first = turns[pulls % len(turns)]
        taken = next(p for p in (first, *(p for p in PRIORITIES if p != first)) if left[p])
        left[taken] -= 1
        pulls += 1
    return pulls


@given(waiting_counts, priorities, st.integers(1, 8))
def test_the_expected_wait_is_that_of_the_workers_weighted_pulls(
    waiting: dict[Priority, int], priority: Priority, more: int
) -> None:
    # The shares are kept over a whole cycle of turns, and not to the single pull.
    simulated = simulated_pulls(waiting, priority, more)
    assert pulls_until(waiting, priority, more) == pytest.approx(simulated, abs=sum(WEIGHTS.values()))


@given(waiting_counts, st.integers(1, 8))
def test_a_higher_priority_never_waits_longer(waiting: dict[Priority, int], more: int) -> None:
    same = dict.fromkeys(PRIORITIES, waiting["normal"])
    waits = [pulls_until(same, p, more) for p in PRIORITIES]
    assert waits == pytest.approx(sorted(waits), rel=1e-9)  # sums of fractions, in another order for each


@given(waiting_counts, priorities, st.integers(1, 8))
def test_no_other_work_makes_a_priority_wait_longer_than_its_share_allows(
    waiting: dict[Priority, int], priority: Priority, more: int
) -> None:
    assert pulls_until(waiting, priority, more) <= most_pulls_until(waiting[priority] + more, priority) + 1e-6


# Bursts and standing queues


def test_a_burst_may_wait_longer_than_what_comes_while_the_queue_stands() -> None:
    patience = Patience(burst_s=10, standing_s=2)
    patience.look(100.0, waiting=False)
    for at_s in (101, 105, 110):
        patience.look(at_s, waiting=True)
        assert patience.allowed_s(at_s) == 10
    for at_s in (110.5, 115, 500):
        patience.look(at_s, waiting=True)
        assert patience.allowed_s(at_s) == 2
    patience.look(501, waiting=False)
    assert patience.allowed_s(502) == 10


def test_a_queue_that_is_empty_because_everybody_is_refused_is_no_calm() -> None:
    patience = Patience(burst_s=10, standing_s=2)
    patience.look(100.0, waiting=False)
    for tenth in range(1010, 1300):  # a refusal every second keeps it short
        if tenth % 10 == 0:
            patience.refused(tenth / 10)
        patience.look(tenth / 10, waiting=tenth % 7 > 0)
    assert patience.allowed_s(130) == 2
    patience.look(131.9, waiting=False)
    assert patience.allowed_s(132) == 10


def test_the_shorter_wait_is_never_the_longer_one() -> None:
    assert Patience(burst_s=1, standing_s=5).allowed_s(1e9) == 1


# A tenant's own requests


def test_a_tenants_turnover_is_what_it_has_less_at_the_next_look() -> None:
    turnover = Turnover()
    turnover.look(0.0, frozenset("abcd"))
    assert turnover.per_s() is None
    turnover.look(4.0, frozenset("cdefgh"))
    assert turnover.per_s() == pytest.approx(2 / 4)
    turnover.look(8.0, frozenset("gh"))
    assert turnover.per_s() == pytest.approx(6 / 8)
    turnover.look(90.0, frozenset("gh"))
    turnover.look(91.0, frozenset("gh"))
    assert turnover.per_s() is None


def test_what_left_while_nobody_looked_is_no_turnover() -> None:
    turnover = Turnover()
    turnover.look(0.0, frozenset("abcd"))
    turnover.look(3600.0, frozenset("e"))
    assert turnover.per_s() is None
    turnover.look(3602.0, frozenset())
    assert turnover.per_s() == pytest.approx(1 / 2)
