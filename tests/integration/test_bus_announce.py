"""How instances announce themselves, on a real NATS server."""

from __future__ import annotations

import asyncio
import time

import pytest
from nats.aio.msg import Msg

from loadgen.chaos.observer import Observer, connect
from shared.bus import Bus, BusError
from shared.bus.board import ANSWER_SPACING_S
from shared.protocol.status import InstanceStatus, encode_status
from shared.protocol.subjects import STATUS_PING


def a_status() -> InstanceStatus:
    return InstanceStatus("draft", "draft-0", "draft-0.a", 1, "here", time.time(), time.time())


async def test_however_many_ask_for_a_status_it_is_sent_seldom(nats_url: str) -> None:
    """Everybody hears each answer: questions that led to as many answers would occupy all."""
    heard: list[float] = []

    async def on_status(_: Msg) -> None:
        heard.append(time.monotonic())

    asker = await connect(nats_url, "asker")
    try:
        await asker.subscribe("hr.status.draft.>", cb=on_status)
        await asker.flush()
        began_s = time.monotonic()
        async with await Bus.connect(nats_url, name="asked") as bus:
            bus.announce(a_status)
            for _ in range(200):
                await asker.publish(STATUS_PING, b"")
                await asker.flush()
                await asyncio.sleep(0.001)
            known = len(heard)
            async with asyncio.timeout(10):
                while len(heard) == known:  # the last question is answered too
                    await asyncio.sleep(0.01)
        assert 2 <= len(heard) <= (heard[-1] - began_s) / ANSWER_SPACING_S + 2
    finally:
        await asker.close()


async def test_a_chaos_run_that_waits_asks_at_its_own_pace(nats_url: str) -> None:
    """Each answer wakes it. Were that a reason to ask again it would load the stack that it looks at."""
    asked = answered = looked = 0
    other = await connect(nats_url, "answering")
    answers: set[asyncio.Task[None]] = set()

    async def on_ping(_: Msg) -> None:
        nonlocal asked
        asked += 1
        answers.add(asyncio.create_task(answer()))

    async def answer() -> None:
        nonlocal answered
        for _ in range(5):  # instances, each a little later than the one before
            await other.publish("hr.status.draft.draft-0", encode_status(a_status()))
            await other.flush()
            await asyncio.sleep(0.01)
            answered += 1

    def reached() -> bool:
        nonlocal looked
        looked += 1
        return answered >= 15

    try:
        await other.subscribe(STATUS_PING, cb=on_ping)
        await other.flush()
        async with Observer(nats_url) as observer:
            assert await observer.until(reached, 30.0)
        assert asked <= looked / 2
    finally:
        await asyncio.gather(*answers)
        await other.close()


async def test_an_instance_that_cannot_announce_itself_any_more_ends(nats_url: str) -> None:
    """It would serve, and look dead to all others."""

    def report() -> InstanceStatus:
        raise KeyError("no status")

    async with await Bus.connect(nats_url, name="silent") as bus:
        bus.announce(report)
        async with asyncio.timeout(10):
            with pytest.raises(BusError, match="no status"):
                await bus.watch()
