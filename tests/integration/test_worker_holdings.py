"""Holding, losing and handing back requests, with two workers on a real NATS server and no engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from shared.bus import Bus, Delivery, LogState, PublishFailed, RequestLog, WorkQueue, new_worker_id
from shared.protocol.jobs import GenerationRequest, SamplingParams, decode_request
from shared.protocol.records import Accepted, Claimed, Ended, HandedBack, Tokens, Usage
from shared.protocol.status import InstanceStatus
from shared.telemetry.metrics import QueueMetrics
from shared.worker.holdings import Holding, Holdings


@dataclass
class Worker:
    """One worker's bus, queue and holdings; its engine never stalls and serves nothing."""

    bus: Bus
    queue: WorkQueue
    name: str
    holdings: Holdings = field(init=False)
    dropped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        async def on_dropped(request_id: str) -> None:
            self.dropped.append(request_id)

        self.holdings = Holdings(
            self.bus,
            "prefill",
            self.name,
            QueueMetrics("prefill", CollectorRegistry()),
            stalled=lambda: False,
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


@asynccontextmanager
async def worker(nats_url: str, instance: str, model: str) -> AsyncIterator[Worker]:
    async with await Bus.connect(nats_url, name=instance) as bus:
        queue = bus.request_queue(model)
        await queue.open()
        made = Worker(bus, queue, new_worker_id(instance))
        bus.announce(made.status)
        yield made
        await queue.close()


async def submit(bus: Bus, model: str, *, queue_s: float = 60.0) -> GenerationRequest:
    now = time.time()
    request_id = uuid.uuid4().hex
    log = await bus.create_log(Accepted(request_id, "t", model, "chat", now, now + 60, 3, 1))
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
        deadline_unix_s=now + 60,
        log_seq=log.last_seq,
    )
    await bus.publish_request(request)
    return request


async def state_of(bus: Bus, request: GenerationRequest) -> LogState:
    return await bus.open_log(request.tenant, request.request_id).state()


async def begin(bus: Bus, request: GenerationRequest, by: str) -> RequestLog:
    """Another worker's claim, as the log would hold it."""
    log = bus.open_log(request.tenant, request.request_id, request.log_seq)
    await log.append(Claimed(epoch=1, stage="prefill", worker=by, at_unix_s=time.time()))
    return log


@pytest.fixture
def model() -> str:
    return uuid.uuid4().hex


async def test_a_first_delivery_of_claimed_work_never_ends_it_by_its_queue_deadline(nats_url: str, model: str) -> None:
    """After a restart NATS counts deliveries from one again, so a delivery count of one proves nothing."""
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model, queue_s=-1)
        await begin(w.bus, request, by="prefill-9.dead")
        await asyncio.sleep(1.6)  # until a holder that is alive would have been heard of
        holding = await w.take(await w.pull())
        assert holding is not None
        assert holding.epoch == 2
        assert (await state_of(w.bus, request)).ended is None


async def test_unclaimed_work_past_its_queue_deadline_ends_with_the_reason(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model, queue_s=-1)
        assert await w.take(await w.pull()) is None
        ended = (await state_of(w.bus, request)).ended
        assert ended is not None
        assert ended.error is not None
        assert ended.error.code == "queue_timeout"
        assert w.dropped == [request.request_id]
        assert await w.bus.queue_depth("prefill", model) == 0


async def test_a_living_holder_keeps_its_request_right_after_the_other_connects(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as holder:
        request = await submit(holder.bus, model)
        delivery = await holder.pull()
        assert await holder.take(delivery) is not None
        await delivery.give_back()  # a server that lost its books would deliver again
        async with worker(nats_url, "prefill-1", model) as other:
            assert await other.take(await other.pull()) is None
            assert (await state_of(other.bus, request)).epoch == 1


async def test_drained_work_goes_on_elsewhere_at_once_and_counts_as_no_crash(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as leaving, worker(nats_url, "prefill-1", model) as staying:
        request = await submit(leaving.bus, model)
        holding = await leaving.take(await leaving.pull())
        assert holding is not None

        async def work(_: Holding) -> None:
            await asyncio.sleep(60)

        holding.task = asyncio.create_task(leaving.holdings.serve(holding, work))
        await leaving.bus.announce_now()
        await asyncio.sleep(0.2)
        cleaning = await leaving.holdings.hand_all_back()
        taken = await staying.take(await staying.pull())
        assert taken is not None, "the new holder waited for the leaving one"
        await asyncio.wait(cleaning)
        state = await state_of(staying.bus, request)
        assert [claim.worker for claim in state.claims] == [leaving.name, staying.name]
        assert [claim.worker for claim in state.unproductive] == [staying.name]
        records = [entry.record for entry in await staying.bus.open_log("t", request.request_id).read()]
        assert isinstance(records[2], HandedBack)
        assert len(leaving.holdings) == 0


async def test_a_refused_append_leaves_the_message_to_its_new_holder(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as slow, worker(nats_url, "prefill-1", model) as fast:
        request = await submit(slow.bus, model)
        holding = await slow.take(await slow.pull())
        assert holding is not None
        successor = fast.bus.open_log(request.tenant, request.request_id, holding.log.last_seq)
        await successor.append(Claimed(epoch=2, stage="prefill", worker=fast.name, at_unix_s=time.time()))

        async def work(held: Holding) -> None:
            await held.log.append(Tokens(epoch=held.epoch, index=0, ids=[1], text="x"))

        await slow.holdings.serve(holding, work)
        assert len(slow.holdings) == 0
        again = await fast.pull()  # not acked, so it comes again when the ack wait is over
        assert decode_request(again.data).request_id == request.request_id
        assert (await state_of(fast.bus, request)).output_ids == []


async def test_a_request_that_was_ended_elsewhere_is_dropped_and_its_leftovers_freed(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model)
        holding = await w.take(await w.pull())
        assert holding is not None

        async def work(held: Holding) -> None:
            await asyncio.sleep(60)

        await w.bus.on_cancel(w.holdings.on_cancel)
        holding.task = asyncio.create_task(w.holdings.serve(holding, work))
        cancelled = Ended(epoch=0, reason="cancelled", usage=Usage(3, 0))
        assert await w.bus.end_request(request.tenant, request.request_id, cancelled)
        async with asyncio.timeout(5):
            await holding.task
        assert w.dropped == [request.request_id]
        assert await w.queue.pull(1, 0.2) == []


async def test_cancel_hints_free_what_strangers_left_but_no_nonsense_goes_further(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        await w.holdings.on_cancel("x" * 500_000)
        assert w.dropped == []
        await w.holdings.on_cancel("elsewhere")
        assert w.dropped == ["elsewhere"]


async def test_a_false_cancel_hint_stops_no_work(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model)
        holding = await w.take(await w.pull())
        assert holding is not None

        async def work(_: Holding) -> None:
            await asyncio.sleep(60)

        holding.task = asyncio.create_task(w.holdings.serve(holding, work))
        await w.holdings.on_cancel(request.request_id)
        assert holding.stop_reason is None
        assert w.dropped == []
        await asyncio.wait(await w.holdings.hand_all_back())


async def test_a_deleted_consumer_is_made_again(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        for priority in ("high", "normal", "low"):
            await w.bus.js.delete_consumer("HR_REQ", f"{WorkQueue.durable_name('prefill', model)}-{priority}")
        request = await submit(w.bus, model)
        with pytest.raises(PublishFailed, match="made again"):
            await w.pull()
        async with asyncio.timeout(20):
            delivery = await w.pull()
        assert decode_request(delivery.data).request_id == request.request_id


async def test_discarded_work_is_buried_and_never_delivered_again(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        subject = f"hr.req.{model}.normal.t.{uuid.uuid4().hex}"
        await w.bus.js.publish(subject, b"\x93not a request")
        delivery = await w.pull()
        with pytest.raises(msgspec.DecodeError):
            decode_request(delivery.data)
        await w.bus.bury_raw("hr.dead.prefill.unreadable", delivery.data, "unreadable")
        await delivery.discard()
        assert await w.queue.pull(1, 3.5) == []
        buried = await w.bus.js.get_last_msg("HR_DEAD", "hr.dead.prefill.unreadable")
        assert buried.data == b"\x93not a request"
        assert (buried.headers or {})["Headrace-Cause"] == "unreadable"
