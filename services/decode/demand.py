"""Whether to ask drafters at all: by the tokens that their guesses bring, at each load. Pure.

Drafters take cores and memory bandwidth from decode's steps, whatever becomes of their guesses; and the fuller a step
is, the fewer guesses it can verify. What they must bring to be worth that depends on where they run: see
`DecodeSettings`.
"""

from __future__ import annotations

from dataclasses import dataclass

USUAL, TRUST = 0.25, 50.0
"""Tokens thought to come from drafters in a step of a sequence before it is known, and the steps that this weighs."""

MEMORY = 0.9975
"""What the past counts for after each step of a sequence: about the last 400 are remembered."""

FIRST_REST, LONGEST_REST = 64, 512
"""Steps in which nobody is asked. Twice as many each time that drafters did not bring enough after a rest either."""

SETTLE_STEPS = 16
"""Behind a rest guesses do not count yet: drafters have to read what came meanwhile, maybe whole prompts."""

TRY_STEPS = 64
"""So many steps of sequences tell whether it pays after a rest."""

LEAST_STEPS = 32
"""And so many steps of the worker, at the beginning too: a guess takes its time, however many wait for one."""


@dataclass
class _Load:
    """What is known of one load."""

    brought: float = USUAL * TRUST
    """Tokens, and steps of sequences in which they came, where anybody asked; both fade."""
    steps: float = TRUST
    rest: int = FIRST_REST
    resting: int = 0
    """Steps that are left of a rest."""
    settling: int = 0
    trying: bool = False
    counted: int = 0
    """The worker's steps that were counted since the last rest."""

    def observe(self, sequences: int, asking: int, brought: int, least: float) -> None:
        if self.resting:
            self.resting -= 1
            if not self.resting:
                self.settling, self.trying = SETTLE_STEPS, True
                self.brought = self.steps = 0.0
                self.counted = 0
        elif self.settling:
            self.settling -= 1
        elif asking:
            fade = MEMORY**sequences
            self.brought = self.brought * fade + brought
            self.steps = self.steps * fade + sequences
            self.counted += 1
            if self.counted >= LEAST_STEPS and (not self.trying or self.steps >= TRY_STEPS):
                self._judge(self.brought >= least * self.steps)

    def _judge(self, pays: bool) -> None:
        if not pays:
            self.resting = self.rest
            self.rest = min(2 * self.rest, LONGEST_REST)
        elif self.trying:
            self.rest = FIRST_REST
        self.trying = False


class Demand:
    """Of one worker. Loads are told apart by the sequences in a step: 1, 2 and 3, 4 to 7, and so on."""

    def __init__(self, least: float) -> None:
        """`least`: tokens that drafters must bring in a step of a sequence to be asked."""
        self._least = least
        self._loads: dict[int, _Load] = {}
        self._load = 0

    @property
    def asks(self) -> bool:
        """Whether to ask drafters at the load of the last step."""
        load = self._loads.get(self._load)
        return load is None or not load.resting

    def observe(self, sequences: int, asking: int, brought: int) -> None:
        """A step of `sequences`, of which `asking` could use a drafter's guess, took `brought` tokens from such.

        What drafters cost a step all its sequences pay; where nobody asks they cost nothing.
        """
        self._load = sequences.bit_length()
        self._loads.setdefault(self._load, _Load()).observe(sequences, asking, brought, self._least)
