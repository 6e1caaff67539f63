"""How many drafted tokens to verify for a sequence: grows while guesses are right, shrinks while wrong. Pure."""

from __future__ import annotations

START = 4
PROBE_EVERY = 16
MEMORY = 0.8
"""Weight of the past in the acceptance estimate: about the last five verifications count."""

GROW_ABOVE, SHRINK_BELOW = 0.7, 0.4


class DraftLength:
    """Adapts between 0 and `most`. At 0 it probes with one token now and then, since text may become easy again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(START, most)
        self._acceptance = 0.5
        self._idle_steps = 0

    @property
    def length(self) -> int:
        return self._length

    def observe(self, drafted: int, accepted: int) -> None:
        """Take the outcome of one step that verified `drafted` tokens; 0 is a step without a draft."""
        if drafted == 0:
            self._idle_steps += 1
            if self._length == 0 and self._idle_steps >= PROBE_EVERY:
                self._length, self._idle_steps = 1, 0
            return
        self._idle_steps = 0
        self._acceptance = MEMORY * self._acceptance + (1 - MEMORY) * accepted / drafted
        if self._acceptance >= GROW_ABOVE or accepted == drafted:
            self._length = min(self._length + 1, self._most)
        elif self._acceptance < SHRINK_BELOW:
            self._length = max(self._length - 1, 0)
