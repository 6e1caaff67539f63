"""One chaos run: rounds of an undisturbed reference, the same requests under faults, and a look at what is left."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import httpx

from loadgen.chaos.aiming import Aimer
from loadgen.chaos.errors import FaultUnavailable, StackUnusable
from loadgen.chaos.faults import Strike, strike
from loadgen.chaos.http_client import HttpClients
from loadgen.chaos.leaks import Leaks, caches_full, compare, resident, settle
from loadgen.chaos.nats_client import NatsClients
from loadgen.chaos.observer import Observer, connect
from loadgen.chaos.reference import Expected, reference
from loadgen.chaos.report import Broken, Report
from loadgen.chaos.schedule import FAULTS, NO_FAULT, Episode, Fault, schedule
from loadgen.chaos.stack import Stack
from loadgen.chaos.tally import Landed, count, struck
from loadgen.chaos.verify import Verdict, check_log, check_reader
from loadgen.chaos.wave import Flight, Wave
from loadgen.chaos.workload import WAVE, Request, wave_of_requests
from loadgen.machine import machine_facts
from shared.protocol.records import choice_request_id

REFERENCE: Final = "reference"
CHAOS: Final = "chaos"
"""Tenants: caches are kept apart by them, so that the reference does not do the work of the run under faults."""
OPEN_TENANT: Final = "default"
ATTEMPTS: Final = 3
"""A fault that found no work in flight gets this many waves in all."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """`waves` of each round; rounds go on until `minutes` have passed. `only`: names of faults, all when empty."""

    seed: int
    waves: int
    alone: int = 20
    minutes: float = 0.0
    only: tuple[str, ...] = ()


class ChaosRun:
    """Drives a stack that is up. The report grows as it goes, so that an interrupted run still has one."""

    def __init__(
        self, stack: Stack, observer: Observer, http: httpx.AsyncClient, over_nats: NatsClients, plan: Plan, say: Say
    ) -> None:
        self._stack = stack
        self._observer = observer
        self._plan = plan
        self._say = say
        self._label = secrets.token_hex(4)
        self._tenants = (REFERENCE, CHAOS) if stack.keys else (OPEN_TENANT, OPEN_TENANT)
        self._reference_clients, self._clients = (
            HttpClients(http, stack.gateways, stack.model, stack.keys.get(tenant, "")) for tenant in self._tenants
        )
        self._over_nats = over_nats
        self.report = Report(
            plan.seed, datetime.now(UTC).isoformat(timespec="seconds"), machine_facts(), dict(stack.scale)
        )
        self.report.unavailable = [fault.name for fault in FAULTS if fault.needs not in stack.available]

    async def run(self) -> None:
        """All rounds, or until the stack does not come back from a fault. Raises ChaosError without a reference."""
        began, wave, before, full = time.monotonic(), 0, None, False
        while wave == 0 or time.monotonic() - began < self._plan.minutes * 60:
            episodes = schedule(self._plan.seed, wave, self._plan.waves, self._stack.available, self._plan.only)
            waves = [wave_of_requests(self._plan.seed, episode.wave) for episode in episodes]
            expected = await self._reference([request for requests in waves for request in requests])
            await settle(self._observer)
            if before is None:
                before = await resident(self._stack, self._observer)
                full = caches_full(self._observer, _tokens_of(expected))
            try:
                landed = await self._under_faults(episodes, waves, expected)
                await self._look_back(landed)
                settle_s, left = await settle(self._observer)
                after = await resident(self._stack, self._observer)
                dead = await self._observer.dead_letters()
            except StackUnusable as error:  # it did not survive a fault, which is a finding
                self.report.aborted = str(error)
                return
            finally:
                self.report.wall_s = time.monotonic() - began
            memory = compare(before, after, self._stack.draft_cache_bytes)
            self.report.leaks.append(Leaks(settle_s, left, memory, dead, full))
            self._observer.forget()
            wave += self._plan.waves

    async def _under_faults(
        self, episodes: list[Episode], waves: list[list[Request]], expected: Expected
    ) -> list[Landed]:
        landed: list[Landed] = []
        for number, (episode, requests) in enumerate(zip(episodes, waves, strict=True), start=1):
            landed += await self._episode(episode, requests, expected, f"{number}/{len(episodes)}")
        return landed

    async def _reference(self, requests: list[Request]) -> Expected:
        began = time.monotonic()
        alone = min(self._plan.alone, len(requests))
        self._say(f"undisturbed run of {len(requests)} requests, {alone} of them alone")
        expected = await reference(
            self._reference_clients,
            self._observer,
            self._tenants[0],
            requests,
            seed=self._plan.seed,
            alone=alone,
            label=f"{self._label}-reference",
            progress=lambda done: self._say(f"  {done} of {len(requests)}") if done % 40 == 0 else None,
        )
        self._say(f"undisturbed run took {time.monotonic() - began:.0f} s")
        return expected

    async def _episode(self, episode: Episode, requests: list[Request], expected: Expected, place: str) -> list[Landed]:
        """Waves of the same requests until every fault of the episode has hit one, or attempts are used up."""
        landed: list[Landed] = []
        pending = list(episode.faults)
        for attempt in range(ATTEMPTS):
            wave = Wave(requests, f"{self._label}-{attempt}", self._clients, self._over_nats, self._observer)
            wave.start()
            try:
                strikes = await self._strike(pending, wave, episode.prefer)
            finally:
                await wave.land()
            pending = pending[len(strikes) :]
            arrived = [await self._land(flight, expected, _other_runs(wave, flight)) for flight in wave.flights]
            self._record(episode, arrived, strikes, place)
            landed += arrived
            await self._stack.await_whole(self._observer)
            if not pending:
                break
        self.report.missed += [f"{fault.name} (wave {episode.wave})" for fault in pending]
        return landed

    async def _strike(self, faults: list[Fault], wave: Wave, prefer: int) -> list[Strike]:
        """One after the other, each when it finds its work; those that were made."""
        aimer = Aimer(self._observer, wave, self._stack.gateways)
        made: list[Strike] = []
        for fault in faults:
            chase = made[-1].hits if made and made[-1].fault == fault else []
            while (sight := await aimer.wait(fault, prefer, chase)) is not None:
                with suppress(FaultUnavailable):
                    made.append(await strike(self._stack, fault, sight))
                    break
            if sight is None:
                break
        return made

    async def _land(self, flight: Flight, expected: Expected, other_runs: list[str]) -> Landed:
        answers, verdict = expected[flight.request.number], Verdict(problems=[])
        verdict.problems += [f"it also ran as {request_id}" for request_id in other_runs]
        if not flight.request_id:
            verdict.problems.append(flight.readings[0].error or "it was never accepted")
            return Landed(flight, [], verdict)
        logs = [
            await self._observer.read_log(self._tenants[1], choice_request_id(flight.request_id, choice))
            for choice in range(flight.request.choices)
        ]
        for log, answer in zip(logs, answers, strict=True):
            verdict += check_log(log, answer, speculates=flight.request.speculates)
        for reading in flight.readings:
            verdict += check_reader(reading, flight.request, logs, answers)
        return Landed(flight, logs, verdict)

    async def _look_back(self, landed: list[Landed]) -> None:
        """A log never changes after its terminal record, whoever wakes up later."""
        for found in landed:
            for choice, log in enumerate(found.logs):
                request_id = choice_request_id(found.flight.request_id, choice)
                late = await self._observer.read_log(self._tenants[1], request_id, log[-1].seq) if log else []
                if late:
                    problem = f"choice {choice}: {len(late)} records came after its end"
                    self._broken(found.flight, found.flight.request.number // WAVE, [], [problem])

    def _record(self, episode: Episode, landed: list[Landed], strikes: list[Strike], place: str) -> None:
        if not episode.faults:
            strikes = [Strike(NO_FAULT, "-", [found.flight for found in landed])]
        for made in strikes:
            row = struck(made, episode.wave, landed)
            self.report.struck.append(row)
            worst = f"{max(gap.gap_ms for gap in row.gaps):,.0f} ms" if row.gaps else "-"
            self._say(f"{place} {row.fault} ({row.target}): hit {len(row.requests)} requests, longest gap {worst}")
        if not strikes:
            self._say(f"{place} {' + '.join(fault.name for fault in episode.faults)}: hit nothing")
        names = [made.fault.name for made in strikes]
        for found in landed:
            count(self.report, found)
            if not found.verdict.ok:
                self._say(f"  BROKEN {found.flight.request_id}: {'; '.join(found.verdict.problems)}")
                self._broken(found.flight, episode.wave, names, found.verdict.problems)

    def _broken(self, flight: Flight, wave: int, faults: list[str], problems: list[str]) -> None:
        logs = str(self._stack.home / "logs")
        self.report.broken.append(Broken(flight.request_id, flight.request.number, wave, faults, problems, logs))


def _other_runs(wave: Wave, flight: Flight) -> list[str]:
    """Runs that a worker has begun beside the one whose answer was read: with one key there must be none."""
    runs = wave.runs_of(flight)
    return [request_id for request_id, seen in runs.items() if seen.claims and request_id != flight.request_id]


def _tokens_of(expected: Expected) -> int:
    """Prompts and outputs of all answers."""
    return sum(answer.prompt_tokens + len(answer.ids) for answers in expected.values() for answer in answers)


@asynccontextmanager
async def chaos_run(stack: Stack, plan: Plan, say: Say) -> AsyncIterator[ChaosRun]:
    """A run with its observer, clients and proxies."""
    async with (
        Observer(stack.nats_url) as observer,
        httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None), trust_env=False
        ) as http,
    ):
        client = await connect(stack.nats_url, "chaos-clients")
        tenant = CHAOS if stack.keys else OPEN_TENANT
        over_nats = NatsClients(client, stack.model, tenant, stack.keys.get(CHAOS, ""))
        proxies = asyncio.create_task(stack.open_kv_proxies(observer))
        try:
            await stack.await_whole(observer)
            yield ChaosRun(stack, observer, http, over_nats, plan, say)
        finally:
            proxies.cancel()
            await asyncio.gather(proxies, return_exceptions=True)
            await client.close()
