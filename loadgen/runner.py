"""Drives load: a closed loop keeps N requests in flight, an open loop sends at given times whatever the server does."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from loadgen.outcome import Outcome
from loadgen.plan import Planner, RequestSpec

MAX_REQUESTS: Final = 1_000_000
"""A run ends here at the latest."""

MAX_RETRY_AFTER_S: Final = 10.0


class Sender(Protocol):
    async def send(self, spec: RequestSpec, origin_s: float, intended_s: float) -> Outcome: ...


class Watcher(Protocol):
    """Told about each request as it begins and ends; drives the progress bar."""

    def began(self) -> None: ...
    def ended(self, outcome: Outcome) -> None: ...


async def run_closed(
    sender: Sender,
    planner: Planner,
    watcher: Watcher,
    *,
    concurrency: int,
    limit: int | None = None,
    duration_s: float | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """`concurrency` clients, each sending its next request when the last one ended; one that was refused waits as
    long as it was told to, MAX_RETRY_AFTER_S at most.

    No request begins after `limit` requests, after `duration_s`, or once `stop()` is true; those in flight are awaited.
    """
    origin_s = time.perf_counter()
    numbers = iter(range(min(limit or MAX_REQUESTS, MAX_REQUESTS)))
    outcomes: list[Outcome] = []

    async def client() -> None:
        for number in numbers:
            now_s = time.perf_counter() - origin_s
            if stop() or (duration_s is not None and now_s >= duration_s):
                return
            watcher.began()
            outcome = await sender.send(planner.request(number), origin_s, now_s)
            watcher.ended(outcome)
            outcomes.append(outcome)
            await asyncio.sleep(min(outcome.come_again_s, MAX_RETRY_AFTER_S))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return outcomes


async def run_open(
    sender: Sender, planner: Planner, watcher: Watcher, offsets_s: Iterable[float], *, max_in_flight: int
) -> list[Outcome]:
    """Send one request at each offset (ascending, seconds from now) and wait until all have ended.

    With `max_in_flight` requests out, the next one leaves late; its latencies still count from its offset.
    """
    origin_s = time.perf_counter()
    slots = asyncio.Semaphore(max_in_flight)
    outcomes: list[Outcome] = []

    async def one(spec: RequestSpec, intended_s: float) -> None:
        try:
            outcome = await sender.send(spec, origin_s, intended_s)
            watcher.ended(outcome)
            outcomes.append(outcome)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        for number, intended_s in enumerate(itertools.islice(offsets_s, MAX_REQUESTS)):
            spec = planner.request(number)
            await asyncio.sleep(max(0.0, origin_s + intended_s - time.perf_counter()))
            await slots.acquire()
            watcher.began()
            group.create_task(one(spec, intended_s))
    return outcomes
