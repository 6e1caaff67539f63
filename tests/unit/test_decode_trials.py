"""Whether to ask drafters is found out from the steps alone, with both sides measured next to each other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from services.decode.trials import LONGEST_PAUSE, SETTLE_STEPS, WINDOW_STEPS, Trials

PLAIN_S = {1: 0.03, 2: 0.031, 8: 0.04, 9: 0.042}


class Worker:
    """Steps whose speed depends on whether drafters are asked, on texts that change, and on noise."""

    def __init__(self, gain: Callable[[int], float], *, noise: float = 0.05, seed: int = 1) -> None:
        self.trials = Trials()
        self._gain = gain
        self._noise = noise
        self._rng = random.Random(seed)
        self._machine = 1.0

    def run(self, steps: int, sequences: int) -> float:
        """The share of steps in which drafters were asked."""
        asked = 0
        for _ in range(steps):
            self._machine = max(0.7, min(1.4, self._machine * self._rng.lognormvariate(0, 0.01)))
            asks = self.trials.asks
            asked += asks
            faster = math.exp(self._gain(sequences)) if asks else 1.0
            tokens = sum(1 + (self._rng.random() < 0.2 * faster) for _ in range(sequences))
            usual = sequences * (1 + 0.2 * faster)
            seconds = PLAIN_S[sequences] * usual / sequences / faster * self._machine
            self.trials.observe(
                sequences, tokens, PLAIN_S[sequences], seconds * self._rng.lognormvariate(0, self._noise)
            )
        return asked / steps


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_drafters_that_cost_more_than_they_bring_are_left_alone(sequences: int, seed: int) -> None:
    worker = Worker(lambda n: -0.1, seed=seed)
    worker.run(3000, sequences)
    assert worker.trials.gain(sequences) < 0
    assert worker.run(3000, sequences) < 0.2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_drafters_that_help_are_asked_and_trials_become_rare(sequences: int, seed: int) -> None:
    worker = Worker(lambda n: 0.2, seed=seed)
    assert worker.run(3000, sequences) > 0.75
    assert worker.run(3000, sequences) > 1 - 2 / LONGEST_PAUSE
    assert worker.trials.gain(sequences) > 0.05


def test_loads_are_told_apart() -> None:
    worker = Worker(lambda n: 0.2 if n == 1 else -0.2)
    for _ in range(6):
        worker.run(1000, 1)
        worker.run(1000, 8)
    assert worker.run(500, 1) > 0.8
    assert worker.run(500, 8) < 0.3
    assert worker.run(500, 9) < 0.3, "about as many as 8"


def test_what_changes_is_found_out() -> None:
    gains = {1: 0.2}
    worker = Worker(lambda n: gains[1])
    worker.run(3000, 1)
    gains[1] = -0.2
    worker.run(40 * LONGEST_PAUSE * WINDOW_STEPS, 1)
    assert worker.run(2000, 1) < 0.2
    gains[1] = 0.2
    worker.run(40 * LONGEST_PAUSE * WINDOW_STEPS, 1)
    assert worker.run(2000, 1) > 0.8


def test_a_load_that_changes_all_the_time_is_asked_for_and_learns_nothing() -> None:
    worker = Worker(lambda n: -0.2)
    for _ in range(200):
        assert worker.run(SETTLE_STEPS + WINDOW_STEPS // 2, 1) == 1
        assert worker.run(SETTLE_STEPS + WINDOW_STEPS // 2, 8) == 1
    assert worker.trials.gain(1) == worker.trials.gain(8) > 0


def test_a_comparison_holds_what_plain_steps_take_still() -> None:
    """Else a plain step that is thought faster in a trial would hide that the trial was faster."""
    trials = Trials()
    for _ in range(3000):
        seconds = 0.042 if trials.asks else 0.04
        trials.observe(8, 8, seconds, seconds)
    assert trials.gain(8) == pytest.approx(-math.log(0.042 / 0.04), abs=0.01)
