"""Prefill takes no more work while decode has enough: what has shown its first token shall not age in a queue."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from shared.bus import Bus
from shared.protocol.status import InstanceStatus
from tests.integration.kv_harness import eventually
from tests.integration.pipeline_harness import Pipeline, pipeline_on, text
from tests.unit.engine_harness import tiny_model

SLOTS = 2
REQUESTS = 24


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queues of its own for each test."""
    return tiny_model(tmp_path_factory.mktemp(f"m{uuid.uuid4().hex[:8]}"))


@pytest_asyncio.fixture
async def pipeline(model: Path, nats_url: str, redis_url: str) -> AsyncIterator[Pipeline]:
    async with pipeline_on(nats_url, redis_url, model) as made:
        yield made


async def waiting_when_it_stops(pipeline: Pipeline) -> int:
    """Jobs that wait for decode once prefill has left the queue alone for two looks at it."""
    seen: list[int] = [-1]

    async def stopped() -> bool:
        seen.append(await pipeline.bus.queue_depth("decode", pipeline.model.name))
        await asyncio.sleep(0.1)
        return seen[-1] > 0 and seen[-12:] == [seen[-1]] * 12

    await eventually(stopped, within_s=40)
    return seen[-1]


@pytest.mark.parametrize(("setting", "decode_slots", "most"), [(0, 0, 4), (0, 40, 10), (9, 400, 9)])
async def test_prefill_stops_when_as_many_jobs_wait_as_may(
    pipeline: Pipeline, nats_url: str, setting: int, decode_slots: int, most: int
) -> None:
    async with await Bus.connect(nats_url, name="decode-9") as other:
        now = time.time()
        other.announce(
            lambda: InstanceStatus(
                "decode",
                "decode-9",
                "decode-9.a",
                1,
                "h",
                now,
                now,
                state="ready",
                model=pipeline.model.name,
                slots=decode_slots,
            )
        )
        prefill = await pipeline.prefill(slots=SLOTS, max_jobs_waiting=setting)

        async def known() -> bool:
            return any(status.instance == "decode-9" for status in prefill.bus.statuses.live("decode"))

        await eventually(known)
        requests = [await pipeline.submit(text(seed, 20)) for seed in range(REQUESTS)]
        assert most <= await waiting_when_it_stops(pipeline) < most + SLOTS
    await pipeline.decode()
    for request in requests:
        await pipeline.until_ended(request)
