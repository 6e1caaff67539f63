"""Whether to ask drafters at all: by how many of the guesses that they were asked for got verified lately. Pure.

What a step can verify follows from its load. Where that is next to nothing, drafters would work for nobody, and take
cores and memory bandwidth from the steps.
"""

from __future__ import annotations

MEMORY = 0.98
"""What the past counts for after each time that was asked: about the last fifty are remembered."""

USUAL, TRUST = 0.5, 16.0
"""How many of the guesses are thought to be verified before that is known, and how many times asked this weighs."""

LEAST = 0.12
"""Where fewer are verified nobody is asked, but for one time in SELDOM."""

SELDOM = 8


class Demand:
    """Of one worker, over all its sequences."""

    def __init__(self) -> None:
        self._asked, self._used = TRUST, TRUST * USUAL
        self._turns = 0

    @property
    def pays(self) -> bool:
        return self._used >= LEAST * self._asked

    def ask(self) -> bool:
        """Whether to ask this time, for a sequence that could use a guess; if so it counts as asked."""
        self._turns += 1
        if not self.pays and self._turns % SELDOM:
            return False
        self._asked = self._asked * MEMORY + 1
        self._used *= MEMORY
        return True

    def used(self) -> None:
        """A step verified a guess from outside."""
        self._used += 1
