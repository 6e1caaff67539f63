"""What a worker lost is taken over by another at once, even if all slots of that one are taken; nothing else is."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from services.decode.worker import _assumed
from shared.bus import Bus, new_worker_id
from shared.protocol.jobs import GenerationRequest, decode_job
from shared.protocol.status import InstanceStatus
from shared.telemetry.metrics import QueueMetrics
from shared.worker.holdings import Holdings
from tests.integration.holdings_harness import Worker, idle
from tests.integration.kv_harness import eventually
from tests.integration.pipeline_harness import CHUNK, OUTPUT, Gate, Pipeline, Running, pipeline_on, text
from tests.unit.engine_harness import tiny_model

LONG = 4 * CHUNK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(f"m{uuid.uuid4().hex[:8]}"))


@pytest_asyncio.fixture
async def pipeline(model: Path, nats_url: str, redis_url: str) -> AsyncIterator[Pipeline]:
    async with pipeline_on(nats_url, redis_url, model) as made:
        yield made


@dataclass
class Peer(Worker):
    """Another worker: it says what it holds, and serves nothing."""

    model: str = ""
    stage: Literal["prefill", "decode"] = "prefill"
    state: Literal["ready", "draining"] = "ready"

    def status(self) -> InstanceStatus:
        now, instance = time.time(), self.name.partition(".")[0]
        told = {"holds": self.holdings.ids(), "let_go": self.holdings.let_go()}
        return InstanceStatus(self.stage, instance, self.name, 1, "h", now, now, self.state, self.model, **told)

    async def leave(self, how: str) -> None:
        if how == "drains":
            self.state = "draining"
            await asyncio.gather(*await self.holdings.hand_all_back())
        else:
            await self.bus.client.close()


@asynccontextmanager
async def peer_on(nats_url: str, model: str) -> AsyncIterator[Peer]:
    async with await Bus.connect(nats_url, name="prefill-9") as bus:
        queue = bus.request_queue(model)
        await queue.open()
        made = Peer(bus, queue, new_worker_id("prefill-9"), model=model)
        bus.announce(made.status)
        renewing = asyncio.create_task(made.holdings.renew_forever())
        yield made
        renewing.cancel()


async def nothing(_: str) -> None:
    """What is to be done about a request that ended elsewhere."""


def holds(running: Running, *requests: GenerationRequest) -> bool:
    return set(running.worker.holdings.ids()) == {request.request_id for request in requests}


@pytest.mark.parametrize("how", ["dies", "drains"])
async def test_a_full_worker_takes_over_what_another_lost_and_nothing_else(
    pipeline: Pipeline, nats_url: str, how: str
) -> None:
    prefill = await pipeline.prefill(slots=1)
    decode = await pipeline.decode()
    gate = Gate(prefill.host)
    own = await pipeline.submit(text(1, LONG))
    await gate.until_begun(1)
    async with peer_on(nats_url, pipeline.model.name) as peer:
        lost = [await pipeline.submit(text(seed, LONG)) for seed in (2, 3)]
        for _ in lost:
            await peer.hold(idle)
        fresh = [await pipeline.submit(text(seed, LONG)) for seed in (4, 5)]
        await peer.leave(how)

        async def one_more() -> bool:
            return any(holds(prefill, own, request) for request in lost)

        await eventually(one_more)  # its only slot is still taken
        for _ in range(20):
            await asyncio.sleep(0.05)
            assert await one_more(), "as many again as slots, and no other request"
        assert not any([(await pipeline.state(request)).holder for request in fresh])
        gate.open()
        for request in (own, *lost, *fresh):
            state = await pipeline.until_ended(request)
            assert state.ended is not None
            assert state.ended.reason == "length"
            assert len(state.output_ids) == OUTPUT
        await prefill.until_idle()
        await decode.until_idle()


async def test_a_full_decode_worker_takes_over_too_and_they_share_its_steps(pipeline: Pipeline, nats_url: str) -> None:
    prefill = await pipeline.prefill()
    decode = await pipeline.decode(decode_slots=1)
    gate = Gate(decode.host)
    own = await pipeline.submit(text(1, CHUNK))
    await gate.until_begun(1)
    async with peer_on(nats_url, pipeline.model.name) as peer:
        peer.holdings = Holdings(
            peer.bus,
            "decode",
            peer.name,
            QueueMetrics("decode", CollectorRegistry()),
            stalled=lambda: False,
            on_dropped=nothing,
        )
        queue = peer.bus.job_queue(pipeline.model.name)
        await queue.open()
        lost = await pipeline.submit(text(2, CHUNK))
        while not (deliveries := await queue.pull(1, 1.0)):
            pass
        job = decode_job(deliveries[0].data)
        holding = await peer.holdings.take(deliveries[0], job.request, _assumed(job))
        assert holding is not None
        peer.stage = "decode"
        await peer.bus.announce_now()
        fresh = await pipeline.submit(text(3, CHUNK))

        async def prefilled() -> bool:
            return len((await pipeline.state(fresh)).output_ids) == 1

        await eventually(prefilled)
        await peer.leave("dies")

        async def both() -> bool:
            return holds(decode, own, lost)

        await eventually(both)
        for _ in range(20):
            await asyncio.sleep(0.05)
            assert await both(), "and not the job that nobody has claimed"
        gate.open()
        for request in (own, lost, fresh):
            assert len((await pipeline.until_ended(request)).output_ids) == OUTPUT
        await decode.until_idle()
        await prefill.until_idle()
