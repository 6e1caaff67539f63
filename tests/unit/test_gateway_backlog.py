"""Whom the gateway lets in, on a queue and a clock of the test's own: after an overload, with free slots, and when."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.gateway import backlog as backlog_module
from services.gateway.backlog import Backlog
from services.gateway.errors import ApiError
from services.gateway.settings import GatewaySettings
from shared.bus import Bus, QueueReading
from shared.bus.queues import QueueReadings
from shared.protocol.subjects import PRIORITIES, Priority

SLOTS = 2
SERVICE_S = 4.0
STEP_S = 0.05
TRUTH_PER_S = SLOTS / SERVICE_S


class Decode:
    """A decode stage with a few slots, as the bus would show it; prefill takes everything at once."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waiting = self.pulled = self.left = 0
        self.ends_s: list[float] = []
        self.statuses = SimpleNamespace(live=self.live)

    def live(self, stage: str, model: str) -> list[Any]:
        slots, running = (SLOTS, len(self.ends_s)) if stage == "decode" else (8, 0)
        return [SimpleNamespace(state="ready", slots=slots, running=running)]

    async def read_queues(self, model: str) -> QueueReadings:
        none = dict.fromkeys(PRIORITIES, 0)
        total = self.pulled + self.waiting
        requests: dict[Priority, QueueReading] = {p: QueueReading({p: 0}, total, 0, total, 1024) for p in PRIORITIES}
        jobs = QueueReading({**none, "normal": self.waiting}, self.pulled, self.waiting, self.left, 4096)
        return QueueReadings(requests, jobs)

    def step(self) -> None:
        self.now_s += STEP_S
        running = [end_s for end_s in self.ends_s if end_s > self.now_s]
        self.left += len(self.ends_s) - len(running)
        self.ends_s = running
        while self.waiting and len(self.ends_s) < SLOTS:
            self.waiting -= 1
            self.pulled += 1
            self.ends_s.append(self.now_s + SERVICE_S)


class Client:
    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        settings = GatewaySettings(max_queue_wait_s=10.0, standing_queue_wait_s=2.0)
        self.backlog = Backlog(cast(Bus, decode), "m", settings)

    def asks(self, queue_timeout_s: float = 60.0) -> ApiError | None:
        try:
            self.backlog.check("normal", 1, queue_timeout_s)
        except ApiError as error:
            return error
        with self.backlog.place("normal", 1):
            self.decode.waiting += 1
        return None

    async def lives(self, duration_s: float, each_s: float = math.inf) -> None:
        """Ask each so often, while the backlog looks at the queue as a gateway does."""
        ask_s, look_s, end_s = self.decode.now_s, self.decode.now_s, self.decode.now_s + duration_s
        while self.decode.now_s < end_s:
            self.decode.step()
            if self.decode.now_s >= look_s:
                await self.backlog.sample()
                look_s = self.decode.now_s + (0.25 if self.decode.waiting else 0.5)
            if self.decode.now_s >= ask_s and each_s < math.inf:
                self.asks()
                ask_s += each_s


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    decode = Decode()
    monkeypatch.setattr(backlog_module, "time", SimpleNamespace(monotonic=lambda: decode.now_s))
    return Client(decode)


async def test_the_rate_stays_near_the_truth_while_a_few_wait_and_an_idle_system_takes_a_burst(client: Client) -> None:
    await client.lives(120, each_s=0.2)
    per_s = client.backlog.rates_per_s["decode"]
    assert per_s == pytest.approx(TRUTH_PER_S, rel=0.4)
    await client.lives(30)
    assert [client.asks() for _ in range(5)] == [None] * 5
    await client.lives(60)
    await client.lives(120, each_s=2.5)
    assert client.backlog.rates_per_s["decode"] == pytest.approx(TRUTH_PER_S, rel=0.4)


async def test_nobody_is_refused_a_slot_that_is_free(client: Client) -> None:
    """A small share of the pulls is no matter to those that need not wait for any."""
    await client.lives(120, each_s=0.2)
    await client.lives(30)
    assert client.asks(queue_timeout_s=3.0) is None
    assert client.asks(queue_timeout_s=3.0) is None


async def test_who_would_wait_too_long_is_told_when_that_will_have_passed(client: Client) -> None:
    await client.lives(120, each_s=0.2)
    await client.lives(30)
    refusal = None
    while refusal is None:
        refusal = client.asks(queue_timeout_s=5.0)
    assert refusal.code == "queue_full"
    after_s, until_s = int(refusal.headers["Retry-After"]), 5.0
    assert (
        f"only after {after_s + until_s:.0f} s" in refusal.message
        or f"{after_s + until_s - 1:.0f} s" in refusal.message
    )
