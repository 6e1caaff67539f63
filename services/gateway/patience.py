"""How long a request may be going to wait: a burst longer than what comes while the queue stands. Pure.

A queue that empties again has done its work, it has taken up a burst. One that stands adds its length to everybody's
latency and serves nobody sooner (Nichols and Jacobson 2012, CoDel). So once it has stood for as long as a burst may
take, only a short one is kept up.
"""

from __future__ import annotations

from typing import Final

CALM_S: Final = 2.0
"""Nobody was refused for this long: an empty queue then means little load, and not that the door is shut."""


class Patience:
    """Times are of one steady clock, in seconds.

    Args:
        burst_s: the longest expected wait, while the queue was empty within as long a time.
        standing_s: the longest expected wait when it was not.
    """

    def __init__(self, burst_s: float, standing_s: float) -> None:
        self._burst_s = burst_s
        self._standing_s = min(standing_s, burst_s)
        self._refused_s = -CALM_S
        self._empty_s = 0.0

    def look(self, at_s: float, *, waiting: bool) -> None:
        """How the queue stands now."""
        if not waiting and at_s - self._refused_s >= CALM_S:
            self._empty_s = at_s

    def refused(self, at_s: float) -> None:
        self._refused_s = at_s

    def allowed_s(self, at_s: float) -> float:
        return self._burst_s if at_s - self._empty_s <= self._burst_s else self._standing_s
