"""Runs pairs: the same requests with speculation and without, one side right behind the other, in turns."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Final

import httpx

from loadgen.chaos.observer import connect
from loadgen.spec_bench.client import Answered, Clients
from loadgen.spec_bench.counters import read_counters, risen
from loadgen.spec_bench.report import Cell, accepted_length, proposers_of, ready_share
from loadgen.spec_bench.stack import Target
from loadgen.spec_bench.statistics import Timing, interval
from loadgen.spec_bench.workloads import Script, Size, WorkloadName, repeated_share, script

WAVES: Final = 3
"""With several in flight so many requests for each client: slow streams stay in a batch for longer, and a load of one
wave would hardly show that."""

_WITHOUT: Final = False
_WITH: Final = True


@dataclass(frozen=True)
class Plan:
    """`warm_ups` are pairs before those that count, at each workload and concurrency."""

    pairs: int
    workloads: Sequence[WorkloadName]
    concurrencies: Sequence[int]
    size: Size
    seed: int
    warm_ups: int = 1

    @property
    def scripts(self) -> int:
        """Of each workload."""
        return (self.warm_ups + self.pairs) * sum(map(scripts_of_pair, self.concurrencies))


def scripts_of_pair(concurrency: int) -> int:
    """Requests, or loops of an agent, that each side makes."""
    return concurrency * (WAVES if concurrency > 1 else 1)


@dataclass
class _Sums:
    """Of the pairs of one cell, by side."""

    timings: dict[bool, list[Timing]] = field(default_factory=lambda: {_WITHOUT: [], _WITH: []})
    speculated: list[Answered] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)


class Comparison:
    """Owner of both sides' clients. One comparison at a time on a stack."""

    def __init__(self, target: Target, plan: Plan, clients: dict[bool, Clients], http: httpx.AsyncClient) -> None:
        self._target = target
        self._plan = plan
        self._clients = clients
        self._http = http
        self._numbers: dict[WorkloadName, Iterator[int]] = {name: count() for name in plan.workloads}

    async def cell(self, workload: WorkloadName, concurrency: int, progress: Callable[[int], None]) -> Cell:
        """All pairs of one workload at one concurrency; `progress` is told how many are done. Raises NotMeasured."""
        sums = _Sums()
        for pair in range(-self._plan.warm_ups, 0):
            warm_up = _Sums()
            await self._pair(workload, concurrency, pair, warm_up)
            sums.differing += warm_up.differing
        before = await read_counters(self._http, self._target.metrics_urls)
        for pair in range(self._plan.pairs):
            await self._pair(workload, concurrency, pair, sums)
            progress(pair + 1)
        counters = risen(before, await read_counters(self._http, self._target.metrics_urls))
        return figures(
            workload,
            concurrency,
            sums.timings[_WITHOUT],
            sums.timings[_WITH],
            sums.speculated,
            repeated=sums.repeated,
            differing=sums.differing,
            counters=counters,
            seed=self._plan.seed,
        )

    async def _pair(self, workload: WorkloadName, concurrency: int, pair: int, sums: _Sums) -> None:
        """The same scripts on both sides."""
        numbers = [next(self._numbers[workload]) for _ in range(scripts_of_pair(concurrency))]
        scripts = [script(workload, self._plan.size, self._plan.seed, number) for number in numbers]
        rounds = {side: await self._clients[side].answers(scripts, concurrency) for side in self._order(pair)}
        for side, found in rounds.items():
            sums.timings[side].append(found.timing)
        for turn in range(scripts[0].turns):
            without, speculated = ([turns[turn] for turns in rounds[side].answers] for side in (_WITHOUT, _WITH))
            sums.speculated += speculated
            sums.differing += differences(f"{workload} {pair}.{turn}", numbers, without, speculated)
            sums.repeated += _repeated(scripts, without)

    def _order(self, place: int) -> tuple[bool, bool]:
        """Sides of one tenant share what is remembered: the speculating one comes first then, and finds nothing."""
        if self._target.apart and place % 2:
            return _WITHOUT, _WITH
        return _WITH, _WITHOUT


@asynccontextmanager
async def comparison(target: Target, plan: Plan) -> AsyncIterator[Comparison]:
    """Connects both sides' clients."""
    most = 2 * max(plan.concurrencies)
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
    nats = await connect(target.nats_url, "spec-bench")
    try:
        async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), limits=limits, trust_env=False) as http:
            clients = {
                side: Clients(http, nats, target, target.speculating if side else target.without, speculate=side)
                for side in (_WITHOUT, _WITH)
            }
            yield Comparison(target, plan, clients, http)
    finally:
        await nats.close()


def differences(
    where: str, numbers: Sequence[int], without: Sequence[Answered], speculated: Sequence[Answered]
) -> list[str]:
    """A line for each script whose answers are not the same on both sides, and for drafts where none were wanted."""
    found = []
    for number, plain, ours in zip(numbers, without, speculated, strict=True):
        name = f"{where}, script {number}"
        if plain.drafted:
            found.append(f"{name}: {plain.drafted} tokens were drafted though speculation was off")
        if plain.ids != ours.ids:
            pairs = zip(plain.ids, ours.ids, strict=False)
            place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(plain.ids), len(ours.ids)))
            found.append(f"{name}: ids differ from token {place} on ({len(plain.ids)} and {len(ours.ids)} tokens)")
        elif (plain.text, plain.reason) != (ours.text, ours.reason):
            found.append(f"{name}: the same ids, but other text or another end ({plain.reason}, {ours.reason})")
    return found


def _repeated(scripts: Sequence[Script], answers: Sequence[Answered]) -> list[float]:
    return [repeated_share(s.given, a.text) for s, a in zip(scripts, answers, strict=True) if s.given]


def figures(
    workload: WorkloadName,
    concurrency: int,
    without: Sequence[Timing],
    speculating: Sequence[Timing],
    speculated: Sequence[Answered],
    *,
    repeated: Sequence[float],
    differing: list[str],
    counters: dict[str, float],
    seed: int,
) -> Cell:
    """Of one cell: a timing of each side for each pair, and the answers of all speculating requests.

    A pair that ended at its first token has none, and counts in no rate.
    """
    pairs = zip(without, speculating, strict=True)
    timed = [(plain, ours) for plain, ours in pairs if plain.streams.tokens and ours.streams.tokens]
    plain_rates = [concurrency * plain.streams.tokens_per_s for plain, _ in timed]
    rates = [concurrency * ours.streams.tokens_per_s for _, ours in timed]
    ratios = [ours / plain for plain, ours in zip(plain_rates, rates, strict=True)]
    accepted = sum(answer.accepted for answer in speculated)
    steps = sum(answer.steps for answer in speculated)
    decoded = sum(max(len(answer.ids) - 1, 0) for answer in speculated)
    return Cell(
        workload=workload,
        concurrency=concurrency,
        without_tokens_per_s=median(plain_rates or [0.0]),
        with_tokens_per_s=median(rates or [0.0]),
        speed_up=interval(ratios, seed),
        ratios=ratios,
        by_the_clock=interval([ours.clock.tokens_per_s / plain.clock.tokens_per_s for plain, ours in timed], seed),
        at_once_without=median([plain.at_once for plain, _ in timed] or [0.0]),
        at_once_with=median([ours.at_once for _, ours in timed] or [0.0]),
        output_tokens=sum(len(answer.ids) for answer in speculated),
        drafted_tokens=sum(answer.drafted for answer in speculated),
        accepted_tokens=accepted,
        tokens_per_step=decoded / steps if steps else 0.0,
        accepted_length=accepted_length(counters, accepted),
        ready=ready_share(counters),
        proposers=proposers_of(counters),
        repeated=math.fsum(repeated) / len(repeated) if repeated else None,
        differing=differing,
        counters=counters,
    )
