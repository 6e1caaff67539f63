"""Workers without an engine on a real NATS server: what they hold, and requests as a gateway would submit them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from shared.bus import Bus, Delivery, LogState, RequestLog, WorkQueue, new_worker_id
from shared.protocol.jobs import GenerationRequest, SamplingParams, decode_request
from shared.protocol.records import Accepted, Claimed
from shared.protocol.status import InstanceStatus
from shared.telemetry.metrics import QueueMetrics
from shared.worker.holdings import Holding, Holdings


@dataclass
class Worker:
    """One worker's bus, queue and holdings; its engine stalls when it is told to, and serves nothing."""

    bus: Bus
    queue: WorkQueue
    name: str
    holdings: Holdings = field(init=False)
    dropped: list[str] = field(default_factory=list)
    stalled: bool = False

    def __post_init__(self) -> None:
        async def on_dropped(request_id: str) -> None:
            self.dropped.append(request_id)

        self.holdings = Holdings(
            self.bus,
            "prefill",
            self.name,
            QueueMetrics("prefill", CollectorRegistry()),
            stalled=lambda: self.stalled,
            on_dropped=on_dropped,
        )

    def status(self) -> InstanceStatus:
        now = time.time()
        return InstanceStatus(
            "prefill", self.name.partition(".")[0], self.name, 1, "h", now, now, holds=self.holdings.ids()
        )

    async def pull(self) -> Delivery:
        while not (deliveries := await self.queue.pull(1, 1.0)):
            pass
        return deliveries[0]

    async def take(self, delivery: Delivery) -> Holding | None:
        request = decode_request(delivery.data)
        return await self.holdings.take(delivery, request, LogState(last_seq=request.log_seq))

    async def hold(self, work: Callable[[Holding], Awaitable[None]]) -> Holding:
        """Pull and claim one request, and work on it in a task; a dead holder counts as alive for a moment."""
        async with asyncio.timeout(20):
            while (holding := await self.take(await self.pull())) is None:
                pass
        self.begin(holding, work)
        return holding

    async def meet_suspect(self) -> None:
        """Pull a suspect while other requests are held: it is kept."""
        async with asyncio.timeout(20):
            while not self.holdings.exclusive:
                assert await self.take(await self.pull()) is None

    def begin(self, holding: Holding, work: Callable[[Holding], Awaitable[None]]) -> None:
        holding.task = asyncio.create_task(self.holdings.serve(holding, work))

    async def suspect_taken(self) -> Holding:
        """Once it is the waiting suspect's turn: its claim."""
        async with asyncio.timeout(20):
            while (delivery := await self.holdings.suspects_turn()) is None:
                await self.holdings.wait_freed(0.1)
        holding = await self.take(delivery)
        assert holding is not None
        return holding


async def idle(_: Holding) -> None:
    """Work that never ends by itself."""
    await asyncio.sleep(600)


@asynccontextmanager
async def worker(nats_url: str, instance: str, model: str, *, renews: bool = False) -> AsyncIterator[Worker]:
    async with await Bus.connect(nats_url, name=instance) as bus:
        queue = bus.request_queue(model)
        await queue.open()
        made = Worker(bus, queue, new_worker_id(instance))
        bus.announce(made.status)
        renewing = asyncio.create_task(made.holdings.renew_forever()) if renews else None
        yield made
        await asyncio.gather(*await made.holdings.hand_all_back())
        if renewing is not None:
            renewing.cancel()
        await queue.close()


async def submit(
    bus: Bus, model: str, *, queue_s: float = 600.0, compute_s: float = 0.0, crashed: int = 0, crashed_alone: int = 0
) -> GenerationRequest:
    """Accepted and queued; `crashed` workers have claimed it before and died, `crashed_alone` more while alone."""
    now = time.time()
    request_id = uuid.uuid4().hex
    log = await bus.create_log(Accepted(request_id, "t", model, "chat", now, now + 600, 3, 1))
    request = GenerationRequest(
        request_id=request_id,
        tenant="t",
        model=model,
        api="chat",
        priority="normal",
        prompt_ids=[1, 2, 3],
        params=SamplingParams(max_tokens=4, seed=1),
        created_unix_s=now,
        queue_deadline_unix_s=now + queue_s,
        deadline_unix_s=now + 600,
        log_seq=log.last_seq,
        compute_timeout_s=compute_s,
    )
    for n in range(crashed + crashed_alone):
        await log.append(Claimed(n + 1, "prefill", f"prefill-9.dead{n}", at_unix_s=now, alone=n >= crashed))
    await bus.publish_request(request)
    return request


async def state_of(bus: Bus, request: GenerationRequest) -> LogState:
    return await bus.open_log(request.tenant, request.request_id).state()


async def begin(bus: Bus, request: GenerationRequest, by: str) -> RequestLog:
    """Another worker's claim, as the log would hold it."""
    log = bus.open_log(request.tenant, request.request_id, request.log_seq)
    await log.append(Claimed(epoch=1, stage="prefill", worker=by, at_unix_s=time.time()))
    return log
