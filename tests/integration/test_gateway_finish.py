"""What a gateway that stops owes: answers to what it took over NATS, and the ends that it has promised."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from services.gateway.endings import Ending, Endings
from services.gateway.responder import Responder
from shared.bus import Bus
from shared.protocol.records import Accepted

ASKED = 6


class Slow:
    """Answers one message at a time, `each_s` after it came to it."""

    def __init__(self, each_s: float) -> None:
        self._each_s = each_s

    async def answer(self, message: Msg) -> dict[str, Any]:
        await asyncio.sleep(self._each_s)
        return {"answered": message.data.decode()}


async def drained_answers(bus: Bus, each_s: float, patience_s: float) -> list[dict[str, Any]]:
    """What those are told who asked a gateway just before it stopped."""
    subject, draining = f"test.{uuid.uuid4().hex}", asyncio.Event()
    responder = Responder(
        bus, subject, "m", Slow(each_s).answer, draining, workers=1, max_pending=64, retry_after_s=lambda: 2
    )
    running = asyncio.create_task(responder.run())
    await asyncio.sleep(0.1)
    asked = [asyncio.create_task(bus.client.request(subject, str(n).encode(), timeout=5)) for n in range(ASKED)]
    await asyncio.sleep(0.1)
    draining.set()
    await responder.finish(patience_s)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    replies = await asyncio.gather(*asked, return_exceptions=True)
    return [msgspec.json.decode(reply.data) for reply in replies if isinstance(reply, Msg)]


async def test_what_came_before_the_stop_is_answered(bus: Bus) -> None:
    assert await drained_answers(bus, 0.05, 5.0) == [{"answered": str(n)} for n in range(ASKED)]


async def test_what_cannot_be_answered_in_time_is_told_to_come_again(bus: Bus) -> None:
    answers = await drained_answers(bus, 1.0, 0.2)
    assert len(answers) == ASKED - 1  # the one at work is cut off
    assert {answer["error"]["code"] for answer in answers} == {"gateway_stopping"}
    assert {answer["error"]["retry_after_s"] for answer in answers} == {1}


@pytest.mark.parametrize("count", [1, 40])
async def test_ends_that_were_asked_for_are_written_before_the_gateway_is_gone(bus: Bus, count: int) -> None:
    endings, now = Endings(bus, "test"), time.time()
    begun = [
        Accepted(f"e-{uuid.uuid4().hex}", "default", "m", "chat", now, now + 60, 3, 1, priority="low")
        for _ in range(count)
    ]
    for accepted in begun:
        await bus.create_log(accepted)
    running = asyncio.create_task(endings.run())
    for accepted in begun:
        endings.request(Ending(accepted, "cancelled"))
    await endings.finish(5.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for accepted in begun:
        assert (await bus.open_log("default", accepted.request_id).state()).ended is not None
