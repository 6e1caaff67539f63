"""The gateway's view of the work queues on a real NATS server: what waits, how fast it goes, and whom that refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from services.gateway.backlog import Backlog
from services.gateway.errors import ApiError
from services.gateway.settings import load_settings
from shared.bus import Bus, WorkQueue
from shared.protocol.blocks import Manifest
from shared.protocol.jobs import DecodeJob
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import Priority, Stage
from tests.conftest import NatsServer
from tests.integration.test_bus import request

MODEL = "m"


@dataclass
class Pipeline:
    """Both queues, with a worker of each stage that takes work when it is told to, and a backlog that looks on."""

    bus: Bus
    backlog: Backlog
    slots: dict[Stage, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})

    def status(self, stage: Stage) -> InstanceStatus:
        now, state = time.time(), "ready" if self.slots[stage] >= 0 else "draining"
        slots = max(self.slots[stage], 0)
        return InstanceStatus(stage, f"{stage}-0", f"{stage}-0.a", 1, "h", now, now, state, MODEL, slots=slots)  # type: ignore[arg-type]

    async def told(self) -> None:
        """Until the board knows both workers as they are now."""
        for stage in self.slots:
            self.bus.announce(lambda stage=stage: self.status(stage))  # type: ignore[misc]
        async with asyncio.timeout(10):
            while {s.stage: s.slots for s in self.bus.statuses.live(model=MODEL)} != {
                stage: max(slots, 0) for stage, slots in self.slots.items()
            }:
                await asyncio.sleep(0.02)

    async def requests(self, count: int, priority: Priority = "normal") -> None:
        for _ in range(count):
            await self.bus.publish_request(request(MODEL, priority))

    async def jobs(self, count: int) -> None:
        for _ in range(count):
            await self.bus.publish_job(DecodeJob(request(MODEL), Manifest("l", 1, []), [1], 1, 1, time.time()))

    async def drain(self, queue: WorkQueue, each_s: float, count: int) -> None:
        """Take and finish `count` pieces of work, one each `each_s`, with a look at the queues after each."""
        await queue.open()
        for _ in range(count):
            await asyncio.sleep(each_s)
            for delivery in await queue.pull(1, 2.0):
                await delivery.ack()
            await self.backlog.sample()
        await queue.close()

    def refuses(self, priority: Priority = "normal", count: int = 1, queue_timeout_s: float = 1e6) -> ApiError | None:
        try:
            self.backlog.check(priority, count, queue_timeout_s)
        except ApiError as error:
            return error
        return None


@asynccontextmanager
async def pipeline(url: str, **settings: float) -> AsyncIterator[Pipeline]:
    async with await Bus.connect(url, name="t") as bus:
        made = Pipeline(bus, Backlog(bus, MODEL, load_settings(**settings)))
        await made.told()
        await made.backlog.sample()
        yield made


async def test_while_nothing_is_known_of_the_rate_only_the_hard_limit_refuses(own_nats: NatsServer) -> None:
    async with pipeline(own_nats.url, max_queue_wait_s=0.001, retry_after_s=17) as p:
        await p.bus.limit_requests({"normal": 5})
        await p.requests(4)
        await p.backlog.sample()
        assert p.refuses() is None
        refusal = p.refuses(count=2)
        assert refusal is not None
        assert (refusal.status, refusal.code, refusal.headers["Retry-After"]) == (503, "queue_full", "17")
        assert p.refuses("high", count=100) is None


async def test_requests_behind_more_than_can_be_served_in_time_are_refused_and_told_when_to_come(
    own_nats: NatsServer,
) -> None:
    async with pipeline(own_nats.url, max_queue_wait_s=0.5) as p:
        await p.requests(60)
        await p.drain(p.bus.request_queue(MODEL), 0.05, 10)
        per_s = p.backlog.rates_per_s["prefill"]
        assert per_s is not None
        assert per_s < 25  # one each 0.05 s at most, and some time for the taking
        refusal = p.refuses()
        assert refusal is not None
        assert int(refusal.headers["Retry-After"]) == pytest.approx(51 / per_s, abs=1)
        assert p.backlog.waiting == 50


async def test_a_high_request_goes_by_the_waiting_ones_and_a_low_one_behind_them(own_nats: NatsServer) -> None:
    async with pipeline(own_nats.url, max_queue_wait_s=1e6) as p:
        await p.requests(40)
        await p.drain(p.bus.request_queue(MODEL), 0.02, 10)
        per_s = p.backlog.rates_per_s["prefill"]
        assert per_s is not None
        behind_all_s = 31 / per_s
        assert p.refuses("high", queue_timeout_s=0.3 * behind_all_s) is None
        assert p.refuses("normal", queue_timeout_s=0.3 * behind_all_s) is not None
        assert p.refuses("low", queue_timeout_s=0.3 * behind_all_s) is not None
        assert p.refuses("low", count=3, queue_timeout_s=0.9 * behind_all_s) is not None
        assert p.refuses("low", count=3, queue_timeout_s=1.5 * behind_all_s) is None


async def test_what_is_being_stored_counts_before_the_next_look(own_nats: NatsServer) -> None:
    async with pipeline(own_nats.url, max_queue_wait_s=1.0) as p:
        await p.requests(14)
        await p.drain(p.bus.request_queue(MODEL), 0.02, 12)
        assert p.refuses() is None
        with suppress(RuntimeError), p.backlog.place("normal", 500):
            assert p.refuses() is not None
            raise RuntimeError  # it could not be stored
        assert p.refuses() is None
        with p.backlog.place("normal", 500):
            pass
        assert p.refuses() is not None
        await p.backlog.sample()  # which does not find them there
        assert p.refuses() is None


async def test_jobs_that_wait_for_decode_hold_up_those_behind_them(own_nats: NatsServer) -> None:
    """Prefill is quick and stops for decode, so its own rate says nothing."""
    async with pipeline(own_nats.url, max_queue_wait_s=0.5) as p:
        await p.requests(12)
        await p.drain(p.bus.request_queue(MODEL), 0.0, 10)
        quick = p.backlog.rates_per_s["prefill"]
        await p.jobs(30)
        assert p.refuses() is None
        await p.drain(p.bus.job_queue(MODEL), 0.1, 10)
        slow = p.backlog.rates_per_s["decode"]
        assert quick is not None
        assert slow is not None
        assert slow < 12
        assert p.backlog.rates_per_s["prefill"] == quick
        assert p.refuses() is not None


async def test_free_slots_take_a_burst_that_the_rate_alone_would_refuse(own_nats: NatsServer) -> None:
    async with pipeline(own_nats.url, max_queue_wait_s=0.5) as p:
        await p.jobs(11)
        await p.drain(p.bus.job_queue(MODEL), 0.1, 11)
        with p.backlog.place("normal", 9):
            assert p.refuses() is not None
            p.slots["decode"] = 16
            await p.bus.client.publish("hr.ctl.ping", b"")
            await p.told()
            await p.backlog.sample()
            assert p.refuses() is None
            await p.jobs(1)
            await p.backlog.sample()
            assert p.refuses() is None
            await p.backlog.sample()  # workers that leave it waiting have no room, whatever their slots
            assert p.refuses() is not None


async def test_under_a_load_that_stays_less_may_wait_than_in_a_burst(own_nats: NatsServer) -> None:
    async with pipeline(own_nats.url, max_queue_wait_s=2.0, standing_queue_wait_s=0.1) as p:
        queue = p.bus.request_queue(MODEL)
        await p.requests(12)
        await p.drain(queue, 0.1, 4)  # less than a second at work
        assert p.refuses() is None
        await p.requests(20)
        await p.drain(queue, 0.1, 20)
        refusal = p.refuses()
        assert refusal is not None
        assert refusal.code == "queue_full"


async def test_a_stage_that_is_down_is_waited_for_as_long_as_the_request_allows(own_nats: NatsServer) -> None:
    async with pipeline(own_nats.url, max_queue_wait_s=0.5) as p:
        await p.requests(40)
        await p.drain(p.bus.request_queue(MODEL), 0.05, 10)
        assert p.refuses() is not None
        p.slots["prefill"] = -1
        await asyncio.sleep(1.2)
        await p.backlog.sample()
        assert p.refuses() is None
        assert p.refuses(queue_timeout_s=0.5) is not None
