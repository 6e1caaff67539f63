"""Many times what the whole stack can do: what it accepts ends well, everything else is told at once to come later."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median

import httpx
import pytest

from shared.bus import Bus, PublishFailed, RequestKey, list_subjects, request_key
from shared.protocol.records import Ended
from shared.protocol.streams import JOBS, LOG, REQUESTS
from shared.protocol.subjects import PRIORITIES
from tests.e2e.conftest import MODEL, Stack

pytestmark = pytest.mark.slow

RATE_PER_S = 25.0
SECONDS = 30.0
OUTPUT_TOKENS = 24
PATIENCE_S = 180.0


@dataclass(frozen=True)
class Answer:
    """What became of one request, and how long that took."""

    priority: str
    response: httpx.Response
    took_s: float


async def flood(stack: Stack) -> list[Answer]:
    """An open loop: the next request leaves whatever became of those before."""

    async def ask(number: int) -> Answer:
        priority = PRIORITIES[number % 3]
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Say something about the number {number}."}],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "seed": number,
            "priority": priority,
        }
        began_s = time.monotonic()
        response = await http.post(f"{stack.url}/v1/chat/completions", json=body)
        return Answer(priority, response, time.monotonic() - began_s)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as http, asyncio.TaskGroup() as group:
        asked = []
        for number in range(int(RATE_PER_S * SECONDS)):
            asked.append(group.create_task(ask(number)))
            await asyncio.sleep(1 / RATE_PER_S)
    return [task.result() for task in asked]


async def test_at_many_times_its_capacity_the_stack_serves_what_it_accepts_and_refuses_the_rest_at_once(
    stack: Stack,
) -> None:
    answers = await flood(stack)
    served = [answer for answer in answers if answer.response.status_code == 200]
    refused = [answer for answer in answers if answer.response.status_code != 200]
    assert len(refused) > len(served) >= 10
    for answer in served:
        usage = answer.response.json()["usage"]
        assert usage["completion_tokens"] == OUTPUT_TOKENS
    for answer in refused:  # none was accepted and then given up
        assert (answer.response.status_code, answer.response.json()["error"]["code"]) == (503, "queue_full")
        assert 1 <= int(answer.response.headers["retry-after"]) <= 60
        assert "x-headrace-request-id" not in answer.response.headers
    assert median(answer.took_s for answer in refused) < median(answer.took_s for answer in served) / 2
    by_priority = Counter(answer.priority for answer in served)
    assert by_priority["high"] >= by_priority["normal"] >= by_priority["low"] >= 1, by_priority

    stack.wait_until_idle()
    async with await Bus.connect(stack.nats_url, name="test") as bus:
        for name in (*(spec.name for spec in REQUESTS.values()), JOBS.name):
            assert await list_subjects(bus.client, name) == {}
        ends = [await end_of(bus, ("default", answer.response.json()["id"])) for answer in served]
        assert {ended.reason for ended in ends} == {"length"}
        for subject in await list_subjects(bus.client, LOG.name):
            await end_of(bus, request_key(subject))


async def end_of(bus: Bus, key: RequestKey) -> Ended:
    """The last record of a log, on a machine that may still be busy; fails when it is none that ends it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                record = (await bus.open_log(*key).last()).record
            except PublishFailed:
                continue
            assert isinstance(record, Ended), key
            return record


def test_after_an_overload_the_next_request_is_served(stack: Stack) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
