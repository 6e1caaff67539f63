"""What waits in the work queues, as this gateway knows it, and whether a request would be served in time."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from services.gateway.drain import DrainRate, Sample, most_pulls_until, pulls_until
from services.gateway.errors import ApiError, overloaded
from services.gateway.patience import Patience
from services.gateway.settings import GatewaySettings
from shared.bus import Bus, QueueReading
from shared.protocol.subjects import PRIORITIES, Priority, Stage

MAX_RETRY_AFTER_S: Final = 60


@dataclass
class _Stage:
    """One stage's queue at the last sample, and its rate, which is known once the stage was the one that held work up.

    `ready`: there are workers to take it. `free`: their slots into which work goes without waiting.
    """

    rate: DrainRate = field(default_factory=DrainRate)
    waiting: Mapping[Priority, int] = field(default_factory=dict)
    ready: bool = False
    free: int = 0


class Backlog:
    """The queues at the last sample, and what this gateway has put there since.

    A request waits for prefill behind those that wait there, and for decode behind all that wait anywhere.
    """

    def __init__(self, bus: Bus, model: str, settings: GatewaySettings) -> None:
        self._bus = bus
        self._model = model
        self._settings = settings
        self._prefill = _Stage()
        self._decode = _Stage()
        self._patience = Patience(settings.max_queue_wait_s, settings.standing_queue_wait_s)
        self._requests: Mapping[Priority, QueueReading] = {}
        self._storing: Counter[Priority] = Counter()
        """Requests that were let in and are not in the queue yet."""
        self._stored: Counter[Priority] = Counter()
        """Requests that came into the queue since the last sample."""

    async def sample(self) -> None:
        """Look at the queues. Raises PublishFailed without NATS; the last sample stands then."""
        before = Counter(self._stored)
        readings = await self._bus.read_queues(self._model)
        self._stored.subtract(before)
        self._requests = readings.requests
        waited = any(self._decode.waiting.values())
        waits = self._update(self._decode, "decode", [readings.jobs], held_up=False)
        # Prefill stops for decode when jobs wait there, and that says nothing about its own speed.
        waits |= self._update(self._prefill, "prefill", list(readings.requests.values()), held_up=waited or waits)
        self._patience.look(time.monotonic(), waiting=waits)

    def _update(self, stage: _Stage, name: Stage, readings: list[QueueReading], *, held_up: bool) -> bool:
        """Take note of a stage's queue. Whether work is waiting in it."""
        ready = [worker for worker in self._bus.statuses.live(name, self._model) if worker.state == "ready"]
        stage.ready = bool(ready)
        waiting = sum(sum(reading.waiting.values()) for reading in readings)
        # Workers that leave work waiting have no room for it, whatever their slots.
        stands = waiting > 0 and any(stage.waiting.values())
        stage.free = 0 if stands else sum(max(worker.slots - worker.running, 0) for worker in ready)
        stage.waiting = {p: n for reading in readings for p, n in reading.waiting.items()}
        sample = Sample(
            time.monotonic(),
            waiting,
            sum(reading.pulled for reading in readings),
            sum(reading.left for reading in readings),
        )
        stage.rate.add(sample, served=stage.ready and not held_up)
        return waiting > 0

    @property
    def waiting(self) -> int:
        """Requests that wait for prefill."""
        return sum(self._waiting().values())

    @property
    def rates_per_s(self) -> dict[Stage, float | None]:
        """How fast the stages take work, where that is known."""
        return {"prefill": self._prefill.rate.per_s(), "decode": self._decode.rate.per_s()}

    @contextmanager
    def place(self, priority: Priority, count: int) -> Iterator[None]:
        """Hold places in the queue while `count` requests are being stored; leaving it well says that they are."""
        self._storing[priority] += count
        try:
            yield
            self._stored[priority] += count
        finally:
            self._storing[priority] -= count

    def check(self, priority: Priority, count: int, queue_timeout_s: float) -> None:
        """Raises ApiError 503 when the queue is full, or when `count` more requests would wait longer in it than this
        server or their own time-out allows.
        """
        if (reading := self._requests.get(priority)) is not None and reading.limit >= 0:
            held = reading.held + self._stored[priority] + self._storing[priority]
            if held + count > reading.limit:
                raise self.full(priority, f"The queue holds {held} requests of priority {priority}; try again.")
        # A stage that is down as a whole is waited for.
        wait_s = self._expected_wait_s(priority, count, ready_only=True)
        if wait_s > self._patience.allowed_s(time.monotonic()):
            raise self.full(priority, f"The system is busy: requests would wait about {wait_s:.0f} s; try again.")
        # Were it let in now and overtaken by higher ones later, it would wait in vain.
        longest_s = max(self._expected_wait_s(priority, count), self._longest_wait_s(priority))
        if longest_s > queue_timeout_s:
            raise self.full(
                priority,
                f"The system is busy: a worker may take the request only after {longest_s:.0f} s, and its queue "
                f"time-out is {queue_timeout_s:g} s; try again, or allow it more.",
                longest_s - queue_timeout_s,
            )

    def full(self, priority: Priority, message: str, after_s: float | None = None) -> ApiError:
        """The refusal of work that the queue does not take, or not now: until `after_s` from now, if that is known."""
        self._patience.refused(time.monotonic())
        retry_after_s = self.retry_after_s(priority) if after_s is None else bounded_s(after_s)
        return overloaded(503, "queue_full", message, retry_after_s)

    def retry_after_s(self, priority: Priority = "normal") -> int:
        """When a refused client may come again: once what waits now has been drained. A setting while no rate is known.

        Whole seconds, 1 to 60.
        """
        if all(per_s is None for per_s in self.rates_per_s.values()):
            return self._settings.retry_after_s
        return bounded_s(self._expected_wait_s(priority, 1))

    def _expected_wait_s(self, priority: Priority, count: int, *, ready_only: bool = False) -> float:
        """Until the slower of both stages takes the last of `count` more requests; 0 as far as no rate is known."""
        longest_s = 0.0
        for stage, waiting in self._queues():
            per_s = stage.rate.per_s()
            if per_s is not None and any(waiting.values()) and (stage.ready or not ready_only):
                longest_s = max(longest_s, (pulls_until(waiting, priority, count) - stage.free) / per_s)
        return longest_s

    def _longest_wait_s(self, priority: Priority) -> float:
        """The same for the first of them, if work of all other priorities kept coming."""
        longest_s = 0.0
        for stage, waiting in self._queues():
            if (per_s := stage.rate.per_s()) is not None:
                ahead = max(waiting[priority] - stage.free, 0)  # no turn is needed for a slot that is free
                longest_s = max(longest_s, most_pulls_until(ahead, priority) / per_s)
        return longest_s

    def _queues(self) -> list[tuple[_Stage, dict[Priority, int]]]:
        """Each stage, and what it takes before a new request."""
        requests = self._waiting()
        both = {p: n + self._decode.waiting.get(p, 0) for p, n in requests.items()}
        return [(self._prefill, requests), (self._decode, both)]

    def _waiting(self) -> dict[Priority, int]:
        return {p: self._prefill.waiting.get(p, 0) + self._stored[p] + self._storing[p] for p in PRIORITIES}


def bounded_s(wait_s: float) -> int:
    """As a `Retry-After`."""
    return min(max(math.ceil(wait_s), 1), MAX_RETRY_AFTER_S)
