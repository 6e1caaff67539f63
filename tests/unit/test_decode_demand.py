"""Drafters are asked where their guesses bring enough, at each load; else now and then, to see whether that changed."""

from __future__ import annotations

import random

import pytest

from services.decode.demand import FIRST_REST, LEAST_STEPS, LONGEST_REST, SETTLE_STEPS, TRY_STEPS, Demand

LEAST = 0.1


class Worker:
    """Steps in which each sequence takes over a token of a drafter with some probability, if drafters were asked."""

    def __init__(self, seed: int = 1, late: int = 0) -> None:
        """Drafters bring nothing for `late` steps from when they are asked."""
        self.demand = Demand(LEAST)
        self._rng = random.Random(seed)
        self._late = late
        self._asked_for = 0

    def run(self, steps: int, sequences: int, probability: float, *, asking: int | None = None) -> float:
        """The share of steps in which drafters were asked."""
        asked = 0
        for _ in range(steps):
            asks = self.demand.asks
            asked += asks
            could = sequences if asking is None else asking
            self._asked_for = self._asked_for + 1 if asks else 0
            helps = self._asked_for > self._late
            brought = sum(helps and self._rng.random() < probability for _ in range(could))
            self.demand.observe(sequences, could, brought)
        return asked / steps


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_drafters_that_bring_enough_are_asked_almost_always(sequences: int, seed: int) -> None:
    worker = Worker(seed)
    assert worker.run(4000, sequences, 0.25) > 0.95


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_drafters_that_bring_too_little_are_soon_asked_seldom(sequences: int, seed: int) -> None:
    worker = Worker(seed)
    worker.run(1000, sequences, 0.04)
    assert worker.run(4000, sequences, 0.04) < (max(TRY_STEPS, LEAST_STEPS) + SETTLE_STEPS) / LONGEST_REST + 0.15
    eight = Worker(seed)
    assert eight.run(200, 8, 0.04) < 0.5


@pytest.mark.parametrize("sequences", [1, 8])
def test_when_guesses_become_good_it_is_found_out(sequences: int) -> None:
    worker = Worker()
    worker.run(3000, sequences, 0.0)
    worker.run(LONGEST_REST + SETTLE_STEPS + TRY_STEPS, sequences, 0.4)
    assert worker.run(500, sequences, 0.4) == 1
    while worker.demand.asks:
        worker.run(1, sequences, 0.0)
    rested = 0
    while not worker.demand.asks:
        worker.run(1, sequences, 0.0)
        rested += 1
    assert rested == FIRST_REST, "no longer the longest"


@pytest.mark.parametrize("sequences", [1, 8, 64])
def test_drafters_that_are_good_but_late_are_found_out_behind_a_rest(sequences: int) -> None:
    worker = Worker(late=SETTLE_STEPS)
    worker.run(3000, sequences, 0.0)
    worker.run(2 * LONGEST_REST, sequences, 0.4)
    assert worker.run(1000, sequences, 0.4) == 1


def test_the_steps_in_which_drafters_read_do_not_count() -> None:
    passed = 0
    for seed in range(20):
        worker = Worker(seed, late=16)
        while worker.demand.asks:
            worker.run(1, 8, 0.0)
        worker.run(FIRST_REST, 8, 0.0)
        passed += worker.run(50, 8, 0.16) == 1
    assert passed >= 18


@pytest.mark.parametrize("sequences", [8, 64])
def test_nobody_is_judged_before_a_guess_can_have_come(sequences: int) -> None:
    worker = Worker(late=LEAST_STEPS // 2)
    assert worker.run(2000, sequences, 0.4) == 1


def test_loads_are_told_apart() -> None:
    worker = Worker()
    for _ in range(5):
        assert worker.run(200, 1, 0.3) > 0.99
        worker.run(200, 8, 0.02)
    assert worker.run(200, 9, 0.02) < 0.4, "about as many as 8"


def test_steps_in_which_nobody_could_use_a_guess_tell_nothing() -> None:
    worker = Worker()
    assert worker.run(5000, 4, 0.0, asking=0) == 1


def test_where_nothing_has_to_be_brought_drafters_are_always_asked() -> None:
    demand = Demand(0.0)
    for _ in range(5000):
        demand.observe(8, 8, 0)
        assert demand.asks
