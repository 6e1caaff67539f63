"""Holding, losing and handing back requests, with two workers on a real NATS server and no engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from typing import Any

import msgspec
import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from shared.bus import ACK_WAIT_S, RENEW_S, Bus, Delivery, PublishFailed, RequestLog, WorkQueue
from shared.protocol.jobs import decode_request
from shared.protocol.records import Claimed, Ended, HandedBack, Record, Tokens, Usage
from shared.protocol.streams import REQUESTS
from shared.protocol.subjects import request_filter
from shared.worker.holding import WorkerUnfit
from shared.worker.holdings import Holding, Unservable
from tests.conftest import NatsServer
from tests.integration.holdings_harness import Worker, begin, idle, state_of, submit, worker


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
        await asyncio.gather(*cleaning)
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


async def test_cancel_hints_prove_nothing_about_what_is_not_here(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        await w.holdings.on_cancel("x" * 500_000)
        await w.holdings.on_cancel("elsewhere")
        assert w.dropped == []


async def test_a_worker_that_is_unfit_hands_back_what_is_no_fault_of_the_request(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model)
        holding = await w.take(await w.pull())
        assert holding is not None

        async def work(_: Holding) -> None:
            raise WorkerUnfit("the engine's thread is not running")

        await w.holdings.serve(holding, work)
        assert (await state_of(w.bus, request)).unproductive == []


async def test_nothing_begins_before_what_was_handed_back_is_cleaned_up(nats_url: str, model: str) -> None:
    """Its request may come back here at once, and its sequence is still in the engine."""
    async with worker(nats_url, "prefill-0", model) as w:
        await submit(w.bus, model)
        cleaned = asyncio.Event()

        async def work(_: Holding) -> None:
            try:
                await asyncio.sleep(600)
            finally:
                await cleaned.wait()

        holding = await w.take(await w.pull())
        assert holding is not None
        w.begin(holding, work)
        await asyncio.sleep(0.05)
        assert not w.holdings.exclusive
        cleaning = await w.holdings.hand_all_back()
        assert w.holdings.exclusive
        cleaned.set()
        await asyncio.wait(cleaning)
        await asyncio.sleep(0)
        assert not w.holdings.exclusive


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
        await asyncio.gather(*await w.holdings.hand_all_back())


async def test_a_deleted_consumer_is_made_again(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        for priority, stream in REQUESTS.items():
            await w.bus.js.delete_consumer(stream.name, f"{WorkQueue.durable_name('prefill', model)}-{priority}")
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


async def test_a_request_that_was_taken_over_unnoticed_is_dropped_and_its_message_left_alone(
    nats_url: str, model: str
) -> None:
    """A holder that appends nothing, since it waits for room or was paused, finds out before it renews."""
    async with (
        worker(nats_url, "prefill-0", model, renews=True) as slow,
        worker(nats_url, "prefill-1", model) as fast,
    ):
        request = await submit(slow.bus, model)
        holding = await slow.hold(idle)
        successor = fast.bus.open_log("t", request.request_id, holding.log.last_seq)
        await successor.append(Claimed(2, "prefill", fast.name, at_unix_s=time.time()))
        assert holding.task is not None
        async with asyncio.timeout(10):
            await holding.task
        assert holding.stop_reason == "lost"
        assert slow.holdings.ids() == []
        assert slow.dropped == []
        again = await fast.pull()  # neither acked nor renewed nor given back: it comes when the ack wait is over
        assert decode_request(again.data).request_id == request.request_id


async def test_a_request_that_ended_is_found_out_without_a_hint(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model, renews=True) as w:
        request = await submit(w.bus, model)
        holding = await w.hold(idle)
        log = w.bus.open_log("t", request.request_id, holding.log.last_seq)
        await log.append(Ended(epoch=1, reason="cancelled", usage=Usage(3, 0)))
        assert holding.task is not None
        async with asyncio.timeout(10):
            await holding.task
        assert w.dropped == [request.request_id]
        assert await w.queue.pull(1, 0.3) == []


async def test_work_that_writes_its_own_end_and_goes_on_is_not_interrupted(nats_url: str, model: str) -> None:
    """Decode stores its last blocks behind the terminal record."""
    async with worker(nats_url, "prefill-0", model, renews=True) as w:
        await submit(w.bus, model)
        finished = False

        async def work(held: Holding) -> None:
            nonlocal finished
            await held.log.append(Ended(epoch=held.epoch, reason="stop", usage=Usage(3, 0)))
            await asyncio.sleep(4 * RENEW_S)
            finished = True

        holding = await w.hold(work)
        assert holding.task is not None
        await holding.task
        assert finished


async def test_work_is_renewed_for_as_long_as_it_takes(nats_url: str, model: str) -> None:
    async with (
        worker(nats_url, "prefill-0", model, renews=True) as w,
        worker(nats_url, "prefill-1", model) as other,
    ):
        await submit(w.bus, model)
        await w.hold(idle)
        assert await other.queue.pull(1, 2 * ACK_WAIT_S) == []


async def test_a_worker_whose_engine_hangs_loses_its_requests(nats_url: str, model: str) -> None:
    async with (
        worker(nats_url, "prefill-0", model, renews=True) as hung,
        worker(nats_url, "prefill-1", model) as other,
    ):
        request = await submit(hung.bus, model)
        await hung.hold(idle)
        hung.stalled = True
        assert hung.holdings.ids() == []
        holding = await other.hold(idle)
        assert holding.request_id == request.request_id


async def test_compute_time_counts_from_the_first_claim_and_ends_the_request(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model, compute_s=3.0)
        holding = await w.hold(idle)
        assert holding.deadline_unix_s == holding.claimed_unix_s + 3.0
        assert holding.task is not None
        async with asyncio.timeout(20):
            await holding.task
        ended = (await state_of(w.bus, request)).ended
        assert ended is not None
        assert ended.error is not None
        assert ended.error.code == "deadline_exceeded"
        assert await w.queue.pull(1, 0.3) == []
        crashed = await submit(w.bus, model, compute_s=30.0, crashed=1)
        holding = await w.hold(idle)
        first = (await state_of(w.bus, crashed)).claims[0]
        assert holding.deadline_unix_s == first.at_unix_s + 30.0


async def test_compute_time_that_is_over_ends_a_request_that_nobody_holds(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model, compute_s=0.5, crashed=1)
        async with asyncio.timeout(20):
            while (ended := (await state_of(w.bus, request)).ended) is None:
                assert await w.take(await w.pull()) is None
        assert ended.error is not None
        assert ended.error.code == "deadline_exceeded"


async def test_work_that_loses_a_cancellation_is_stopped_all_the_same(nats_url: str, model: str) -> None:
    """In Python 3.11 asyncio.wait_for drops one that comes together with its result; nats-py waits with it."""
    async with worker(nats_url, "prefill-0", model) as w:
        await submit(w.bus, model)
        lost = 0

        async def work(_: Holding) -> None:
            nonlocal lost
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                lost += 1
            await asyncio.sleep(600)

        holding = await w.hold(work)
        await asyncio.sleep(0)  # until it sleeps
        assert holding.task is not None
        async with asyncio.timeout(10):
            await asyncio.gather(*await w.holdings.hand_all_back())
        assert lost == 1


async def test_what_settles_a_request_is_not_interrupted(
    nats_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model)
        settling, go_on, dropped = asyncio.Event(), asyncio.Event(), 0

        async def slowly(_: str) -> None:
            nonlocal dropped
            dropped += 1
            settling.set()
            await go_on.wait()

        async def work(_: Holding) -> None:
            raise Unservable("context_length_exceeded", "it does not fit")

        monkeypatch.setattr(w.holdings, "_on_dropped", slowly)
        holding = await w.hold(work)
        async with asyncio.timeout(10):
            await settling.wait()
            holding.stop("ended")
            await asyncio.sleep(0)
            go_on.set()
            assert holding.task is not None
            await holding.task
        assert dropped == 1
        ended = (await state_of(w.bus, request)).ended
        assert ended is not None
        assert ended.error is not None
        assert ended.error.code == "context_length_exceeded"


async def test_what_cannot_be_written_for_too_long_is_handed_back_and_counts_as_no_crash(
    nats_url: str, model: str
) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model)

        async def work(_: Holding) -> None:
            raise PublishFailed("the log was not reachable for 60 s")

        holding = await w.hold(work)
        assert holding.task is not None
        await holding.task
        state = await state_of(w.bus, request)
        assert (len(state.claims), state.unproductive) == (1, [])
        assert decode_request((await w.pull()).data).request_id == request.request_id


async def let_go_without_nats(w: Worker, server: NatsServer) -> Holding:
    """What it held, and could not even hand back: NATS is away, and still is when this returns."""
    away = asyncio.Event()

    async def work(_: Holding) -> None:
        await away.wait()
        raise PublishFailed("the log was not reachable for 60 s")

    holding = await w.hold(work)
    await go_away(server, w)
    away.set()
    assert holding.task is not None
    async with asyncio.timeout(20):
        await holding.task
    return holding


async def go_away(server: NatsServer, w: Worker) -> None:
    server.kill()
    async with asyncio.timeout(20):
        while w.bus.connected:
            await asyncio.sleep(0.01)


async def come_back(server: NatsServer, *workers: Worker) -> None:
    server.start()
    async with asyncio.timeout(20):
        while not all(w.bus.connected for w in workers):
            await asyncio.sleep(0.01)


async def test_a_hand_back_that_nats_did_not_take_is_recorded_before_anybody_claims(
    own_nats: NatsServer, model: str
) -> None:
    async with (
        worker(own_nats.url, "prefill-0", model, renews=True) as w,
        worker(own_nats.url, "prefill-1", model) as other,
    ):
        request = await submit(w.bus, model)
        await let_go_without_nats(w, own_nats)
        assert w.holdings.ids() == [request.request_id], "the others wait for it as long as the word is owed"
        assert len(w.holdings) == 0
        await come_back(own_nats, w, other)
        await other.hold(idle)
        state = await state_of(other.bus, request)
        assert [claim.worker for claim in state.claims] == [w.name, other.name]
        assert state.unproductive == state.claims[1:]
        assert w.holdings.ids() == []


async def test_a_hand_back_that_is_owed_comes_before_this_workers_own_next_claim(
    own_nats: NatsServer, model: str
) -> None:
    async with worker(own_nats.url, "prefill-0", model) as w:  # it renews nothing, so that only the claim records it
        request = await submit(w.bus, model)
        await let_go_without_nats(w, own_nats)
        await come_back(own_nats, w)
        again = await w.hold(idle)
        records = [entry.record for entry in await w.bus.open_log("t", request.request_id).read()]
        assert [type(record) for record in records[1:]] == [Claimed, HandedBack, Claimed]
        assert not again.alone
        await again.log.append(Tokens(epoch=again.epoch, index=0, ids=[1], text="x"))


@pytest.mark.parametrize("since", ["claimed", "ended"])
async def test_a_hand_back_is_owed_no_more_once_the_request_is_anothers_or_has_ended(
    own_nats: NatsServer, model: str, since: str
) -> None:
    async with worker(own_nats.url, "prefill-0", model) as w:
        request = await submit(w.bus, model)
        holding = await let_go_without_nats(w, own_nats)
        await come_back(own_nats, w)
        log = w.bus.open_log("t", request.request_id, holding.log.last_seq)
        if since == "claimed":
            await log.append(Claimed(2, "prefill", "prefill-1.x", at_unix_s=time.time()))
        else:
            await log.append(Ended(epoch=1, reason="cancelled", usage=Usage(3, 0)))
        renewing = asyncio.create_task(w.holdings.renew_forever())
        async with asyncio.timeout(10):
            while w.holdings.ids():
                await asyncio.sleep(0.02)
        renewing.cancel()
        assert not any(isinstance(entry.record, HandedBack) for entry in await log.read())
        if since == "claimed":
            await log.append(Tokens(epoch=2, index=0, ids=[1], text="x"))


async def test_a_claim_that_was_stored_without_its_claimant_knowing_is_handed_back(
    own_nats: NatsServer, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.worker.holdings.CLAIM_PATIENCE_S", 0.0)
    async with (
        worker(own_nats.url, "prefill-0", model, renews=True) as w,
        worker(own_nats.url, "prefill-1", model) as other,
    ):
        request = await submit(w.bus, model)
        delivery = await w.pull()
        await go_away(own_nats, w)
        with pytest.raises(PublishFailed):
            await w.take(delivery)
        assert w.holdings.ids() == [request.request_id]
        await come_back(own_nats, w, other)
        async with asyncio.timeout(10):
            while (await state_of(other.bus, request)).epoch == 0:  # the client sends what it could not send
                await asyncio.sleep(0.02)
        await other.hold(idle)
        state = await state_of(other.bus, request)
        assert [claim.worker for claim in state.claims] == [w.name, other.name]
        assert state.unproductive == state.claims[1:]
        assert w.holdings.ids() == []


async def test_a_worker_whose_claim_is_not_confirmed_yet_is_left_its_request(
    nats_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others see the claim before the claimant hears that it is stored."""
    stored, confirmed, append = asyncio.Event(), asyncio.Event(), RequestLog.append

    async def append_slowly(self: RequestLog, record: Record, **options: Any) -> int:
        seq = await append(self, record, **options)
        if isinstance(record, Claimed) and record.worker.startswith("prefill-0"):
            stored.set()
            await confirmed.wait()
        return seq

    monkeypatch.setattr(RequestLog, "append", append_slowly)
    async with worker(nats_url, "prefill-0", model) as slow, worker(nats_url, "prefill-1", model) as other:
        request = await submit(slow.bus, model)
        delivery = await slow.pull()
        taking = asyncio.create_task(slow.take(delivery))
        async with asyncio.timeout(10):
            await stored.wait()
            await delivery.give_back()
            asked_unix_s = time.time()
            await slow.bus.announce_now()
            while all(s.worker != slow.name or s.sent_unix_s < asked_unix_s for s in other.bus.statuses.live()):
                await asyncio.sleep(0.01)
        assert await other.take(await other.pull()) is None
        assert (await state_of(other.bus, request)).epoch == 1
        confirmed.set()
        assert await taking is not None
        assert slow.holdings.ids() == [request.request_id]


async def test_a_renewal_that_fails_ends_no_other(nats_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker(nats_url, "prefill-0", model, renews=True) as w:
        for _ in range(2):
            await submit(w.bus, model)
        broken, whole = await w.hold(idle), await w.hold(idle)
        renewed: Counter[str] = Counter()
        renew = Delivery.renew

        async def renew_or_fail(self: Delivery) -> None:
            request_id = decode_request(self.data).request_id
            renewed[request_id] += 1
            if request_id == broken.request_id:
                raise RuntimeError("the transport is closed")
            await renew(self)

        monkeypatch.setattr(Delivery, "renew", renew_or_fail)
        async with asyncio.timeout(10):
            while min(renewed[broken.request_id], renewed[whole.request_id]) < 3:
                await asyncio.sleep(0.02)


async def test_a_failed_step_counts_as_a_crash(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model)

        async def work(_: Holding) -> None:
            raise RuntimeError("a step of the engine")

        holding = await w.hold(work)
        assert holding.task is not None
        await holding.task
        assert len((await state_of(w.bus, request)).unproductive) == 1


async def test_consumers_of_another_ack_wait_are_given_ours(nats_url: str, model: str) -> None:
    async with await Bus.connect(nats_url, name="test") as bus:
        for priority, stream in REQUESTS.items():
            await bus.js.add_consumer(
                stream.name,
                ConsumerConfig(
                    durable_name=f"{WorkQueue.durable_name('prefill', model)}-{priority}",
                    filter_subject=request_filter(model, priority),
                    ack_policy=AckPolicy.EXPLICIT,
                    ack_wait=3.0,
                    max_ack_pending=1024,
                    max_waiting=512,
                ),
            )
        async with worker(nats_url, "prefill-0", model):
            for priority, stream in REQUESTS.items():
                info = await bus.js.consumer_info(stream.name, f"{WorkQueue.durable_name('prefill', model)}-{priority}")
                assert info.config.ack_wait == ACK_WAIT_S


async def test_a_queue_is_closed_in_time_without_its_server(own_nats: NatsServer, model: str) -> None:
    """A drain does not fail on a server that is away."""
    async with worker(own_nats.url, "prefill-0", model) as w:
        own_nats.kill()
        async with asyncio.timeout(20):
            await w.queue.close()
