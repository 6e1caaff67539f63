"""Times several contenders in turn, A B C A B C ..., so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles

Clock = Callable[[], float]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contender:
    """`run` is timed; `before` sets the stage outside the clock."""

    run: Callable[[], object]
    before: Callable[[], object] = _nothing


@dataclass
class Times:
    """Seconds of each round: CPU time of the calling thread, and by the clock on the wall.

    `alone` says that the calling thread does all the work, so that its CPU time, which other processes disturb less,
    stands for the whole. Figures derived from times (rates, ratios) rest on CPU time then, and else on wall time.
    """

    alone: bool
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return self.cpu_s if self.alone else self.wall_s

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def cpu_ms(self) -> float:
        return median(self.cpu_s) * 1e3

    @property
    def wall_ms(self) -> float:
        return median(self.wall_s) * 1e3


def interleave(
    contenders: Mapping[str, Contender],
    rounds: int,
    *,
    threads: int,
    warm_ups: int = 1,
    cpu_clock: Clock = time.thread_time,
    wall_clock: Clock = time.perf_counter,
) -> dict[str, Times]:
    """Run every contender once a round. `threads`: how many of them compute; CPU time counts with one only."""
    times = {name: Times(alone=threads == 1) for name in contenders}
    for round_ in range(-warm_ups, rounds):
        for name, contender in contenders.items():
            contender.before()
            cpu_s, wall_s = cpu_clock(), wall_clock()
            contender.run()
            cpu_s, wall_s = cpu_clock() - cpu_s, wall_clock() - wall_s
            if round_ >= 0:
                times[name].cpu_s.append(cpu_s)
                times[name].wall_s.append(wall_s)
    return times


def ratio(over: Times, under: Times) -> float:
    """Median of the rounds' own quotients: two neighbours in time met the same machine."""
    return median(a / b for a, b in zip(over.seconds, under.seconds, strict=True))


def p95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
