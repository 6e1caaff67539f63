"""Whether drafters bring more than they cost, found out by leaving them alone for a moment now and then. Pure.

Drafters take cores and memory bandwidth from decode's steps. What that costs depends on the machine and on the load,
and nothing but the tokens per second with them and without tells it: compared from one moment to the next, since texts
and machines change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SETTLE_STEPS = 4
"""Not counted behind a change: drafters have work left, or none of their guesses has come yet."""

WINDOW_STEPS, WINDOW_TOKENS = 16, 64
"""A window has so many steps at least, and so many tokens."""

FIRST_PAUSE, LONGEST_PAUSE = 2, 32
"""Windows from one trial to the next; twice as many after each that said the same as before."""

BELIEVED = 0.05
"""Gain from drafters that is thought of before any trial, as a logarithm of the ratio of speeds."""

TRUST, MEMORY = 1, 12
"""Trials that this weighs, and trials that are remembered."""

LARGEST_GAIN = 0.5
"""What one trial says at most."""


@dataclass
class _Window:
    skip: int = SETTLE_STEPS
    steps: int = 0
    tokens: int = 0
    plain_s: float = 0.0
    """What these tokens would have taken in plain steps."""
    seconds: float = 0.0

    @property
    def full(self) -> bool:
        return self.steps >= WINDOW_STEPS and self.tokens >= WINDOW_TOKENS

    @property
    def speed(self) -> float:
        """In speeds of plain steps."""
        return self.plain_s / self.seconds


@dataclass
class _Load:
    """What is known of one load."""

    gain: float = BELIEVED
    trials: int = 0
    pause: int = FIRST_PAUSE

    def learn(self, gain: float) -> None:
        agreed = (gain > 0) == (self.gain > 0)
        self.trials = min(self.trials + 1, MEMORY - TRUST)
        self.gain += (max(-LARGEST_GAIN, min(LARGEST_GAIN, gain)) - self.gain) / (self.trials + TRUST)
        self.pause = min(2 * self.pause, LONGEST_PAUSE) if agreed else FIRST_PAUSE


class Trials:
    """Of one worker. Loads are told apart by the sequences in a step: 1, 2 and 3, 4 to 7, and so on."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._load = 0
        self._window = _Window()
        self._usual: list[float] = []
        """Speeds of the last windows without a trial, as far as they stand side by side."""
        self._tried: float | None = None
        """The speed in the trial, until the window behind it is full."""
        self._trying = False
        self._plain_s: dict[int, float] = {}
        """By sequences, the same for all windows of a comparison: what is thought of plain steps changes with them."""

    @property
    def asks(self) -> bool:
        """Whether to ask drafters now."""
        return self._pays != self._trying

    def gain(self, sequences: int) -> float:
        """How much faster a step of so many sequences is thought to bring tokens with drafters, as a logarithm."""
        return self._loads.get(sequences.bit_length(), _Load()).gain

    def observe(self, sequences: int, tokens: int, plain_s: float, seconds: float) -> None:
        """A step of `sequences` brought `tokens` within `seconds`; a plain one would have taken `plain_s`."""
        load = sequences.bit_length()
        if load != self._load:
            self._load, self._trying, self._tried = load, False, None
            self._begin()
        window = self._window
        if window.skip:
            window.skip -= 1
            return
        window.steps += 1
        window.tokens += tokens
        window.plain_s += self._plain_s.setdefault(sequences, plain_s) * tokens / sequences
        window.seconds += seconds
        if window.full and window.seconds > 0:
            self._close(window.speed)

    def _begin(self, skip: int = SETTLE_STEPS) -> None:
        self._usual.clear()
        self._plain_s.clear()
        self._window = _Window(skip=skip)

    @property
    def _pays(self) -> bool:
        return self._loads.get(self._load, _Load()).gain > 0

    def _close(self, speed: float) -> None:
        load = self._loads.setdefault(self._load, _Load())
        self._window = _Window(skip=0)
        if self._trying:
            self._tried, self._trying = speed, False
            self._window = _Window()
            return
        self._usual.append(speed)
        if self._tried is not None:
            gain = math.log(sum(self._usual[-2:]) / 2 / self._tried)
            paid = self._pays
            load.learn(gain if paid else -gain)
            self._tried = None
            self._begin(skip=0 if self._pays == paid else SETTLE_STEPS)
        elif len(self._usual) >= load.pause:
            self._trying = True
            self._window = _Window()
