"""From arrivals to figures: the pace of a batch of streams, and what pairs of them say with which certainty. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec

from loadgen.chaos.observer import Entry
from loadgen.chaos.reading import Shown
from loadgen.report import percentile
from shared.protocol.records import Tokens

LEVEL: Final = 0.95
_DRAWS: Final = 4000


class Arrival(msgspec.Struct, frozen=True):
    """`tokens` reached the client at `at_s`."""

    at_s: float
    tokens: int


class Pace(msgspec.Struct, frozen=True):
    """Tokens that came within `seconds`."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 where there was nothing to time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def __add__(self, other: Pace) -> Pace:
        return Pace(self.tokens + other.tokens, self.seconds + other.seconds)


class Timing(msgspec.Struct, frozen=True):
    """Of one round: what its streams brought in their own seconds, and in those of the clock, waits included."""

    streams: Pace = Pace()
    clock: Pace = Pace()

    @property
    def at_once(self) -> float:
        """How many streams were at work on average."""
        return self.streams.seconds / self.clock.seconds if self.clock.seconds > 0 else 0.0


class Interval(msgspec.Struct, frozen=True):
    """A median of `n` values and its bootstrap interval at `LEVEL`; all zero without values."""

    median: float = 0.0
    low: float = 0.0
    high: float = 0.0
    n: int = 0


def arrivals(shown: Sequence[Shown], entries: Sequence[Entry]) -> list[Arrival]:
    """When each token reached the client: an event shows its record and what earlier records held back.

    Tokens without text make no event; they count with the next one, at the latest with the end.
    """
    waiting = [(entry.seq, len(entry.record.ids)) for entry in entries if isinstance(entry.record, Tokens)]
    found: list[Arrival] = []
    for event in shown:
        covered = [count for seq, count in waiting if seq <= event.seq]
        waiting = waiting[len(covered) :]
        if sum(covered):
            found.append(Arrival(event.at_s, sum(covered)))
    return found


def pace(streams: Sequence[Sequence[Arrival]], since_s: float = -math.inf, until_s: float = math.inf) -> Pace:
    """What `streams` brought between two times, each counted behind its first arrival in there.

    `seconds` are those of every stream: with N of them at once, N times its tokens per second is what they bring
    together. Time in which a stream was waited for is in none of them.
    """
    whole = Pace()
    for stream in streams:
        inside = [arrival for arrival in stream if since_s <= arrival.at_s <= until_s]
        if len(inside) > 1:
            tokens = sum(arrival.tokens for arrival in inside[1:])
            whole += Pace(tokens, inside[-1].at_s - inside[0].at_s)
    return whole


def timing(streams: Sequence[Sequence[Arrival]], since_s: float, until_s: float) -> Timing:
    """Of all that came between two times."""
    came = sum(arrival.tokens for stream in streams for arrival in stream if since_s < arrival.at_s <= until_s)
    return Timing(pace(streams, since_s, until_s), Pace(came, max(until_s - since_s, 0.0)))


def interval(values: Sequence[float], seed: int) -> Interval:
    """Pairs are drawn with replacement and their median taken, again and again."""
    if not values:
        return Interval()
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(_DRAWS))
    tail = 50 * (1 - LEVEL)
    return Interval(median(values), percentile(medians, tail), percentile(medians, 100 - tail), len(values))
