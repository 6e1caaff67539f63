"""How fast a work queue drains, and how many pulls come before a new request's. Pure: counts and time are passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shared.bus import WEIGHTS
from shared.protocol.subjects import PRIORITIES, Priority

ENOUGH: Final = 8
"""Requests after which a stretch tells the rate well; shorter ones are noise, longer ones are the past."""

LEAST_S: Final = 2.0
"""A stretch is not shorter than this: the last word of a fast queue must not be one busy moment."""

MOST_S: Final = 60.0
"""Busy time that is remembered."""

FORGOTTEN_S: Final = 600.0
"""What was measured this long ago tells nothing any more."""

_TURNS: Final = sum(WEIGHTS.values())


@dataclass(frozen=True)
class Sample:
    """A queue at `at_s`, all priorities together: see `shared.bus.QueueReading`."""

    at_s: float
    waiting: int
    pulled: int
    left: int


@dataclass(frozen=True)
class _Span:
    """A time at whose beginning work was waiting, and the growth of the counts in it.

    Were it to wait at the end as well, a pull that empties a short queue would never be seen.
    """

    ended_s: float
    busy_s: float
    pulled: int
    left: int


class DrainRate:
    """Requests that workers take from the queue per second, measured only while some were waiting.

    What left the stream counts other models' work and what was withdrawn, too; what was pulled counts repeated
    deliveries. Both are at least what was drained, so the smaller one is taken.
    """

    def __init__(self) -> None:
        self._last: Sample | None = None
        self._spans: deque[_Span] = deque()

    def add(self, sample: Sample, *, served: bool) -> None:
        """`served`: workers of the stage are ready, and nothing behind them holds them up. Else a queue stands still
        and tells no rate.
        """
        last, self._last = self._last, sample
        if last is None:
            return
        pulled, left = sample.pulled - last.pulled, sample.left - last.left
        if pulled < 0 or left < 0:  # the stream or its consumers were made again
            self._spans.clear()
        elif served and last.waiting > 0:
            self._spans.append(_Span(sample.at_s, sample.at_s - last.at_s, pulled, left))
        while self._spans and (
            self._spans[0].ended_s < sample.at_s - FORGOTTEN_S
            or sum(span.busy_s for span in self._spans) - self._spans[0].busy_s >= MOST_S
        ):
            self._spans.popleft()

    def per_s(self) -> float | None:
        """Over the shortest recent stretch that tells enough; None before any work was seen to wait.

        A stretch with few counts the one that may be about to leave: so it tells the most that the rate can well be.
        """
        if not self._spans:
            return None
        busy_s, pulled, left = 0.0, 0, 0
        for span in reversed(self._spans):
            busy_s, pulled, left = busy_s + span.busy_s, pulled + span.pulled, left + span.left
            if min(pulled, left) >= ENOUGH and busy_s >= LEAST_S:
                break
        drained = min(pulled, left)
        return (drained if drained >= ENOUGH else drained + 1) / busy_s


def pulls_until(waiting: Mapping[Priority, int], priority: Priority, more: int) -> float:
    """How many pulls until the last of `more` new requests of a priority has been pulled.

    Workers give each priority its share of their pulls, and the share of an empty one to the highest that is not (see
    `shared.bus.work`).
    """
    left = {p: float(waiting.get(p, 0)) for p in PRIORITIES}
    left[priority] += more
    pulls = 0.0
    while True:
        shares = _shares({p for p in PRIORITIES if left[p] > 0})
        needed = {p: left[p] / share for p, share in shares.items()}
        step = min(needed.values())
        pulls += step
        if needed[priority] <= step:
            return pulls
        for p, share in shares.items():
            left[p] = 0.0 if needed[p] <= step else left[p] - step * share


def most_pulls_until(ahead: int, priority: Priority) -> float:
    """The same behind `ahead` of its own priority, if work of all others kept coming: by its own share alone."""
    return ahead * _TURNS / WEIGHTS[priority]


def _shares(waiting: set[Priority]) -> dict[Priority, float]:
    """The part of all pulls that each priority with waiting work gets."""
    first = next(p for p in PRIORITIES if p in waiting)
    shares = {p: WEIGHTS[p] / _TURNS for p in PRIORITIES if p in waiting}
    shares[first] += 1 - sum(shares.values())
    return shares
