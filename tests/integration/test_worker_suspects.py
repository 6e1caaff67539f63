"""Requests that may crash their workers: set apart, given their turn, cleared or convicted. On a real NATS server."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

import pytest

from shared.bus import Bus, Delivery, WorkQueue
from shared.protocol.jobs import decode_request
from shared.protocol.records import Claimed, Ended, HandedBack, Tokens, Usage
from shared.protocol.streams import REQUESTS
from shared.protocol.subjects import dead_subject
from shared.worker.holdings import Holding
from shared.worker.stage_worker import PULL_WAIT_S
from shared.worker.takeover import CONVICTED_AFTER, SUSPECT_AFTER
from tests.integration.holdings_harness import idle, state_of, submit, worker
from tests.integration.pipeline_harness import pipeline_on, text
from tests.unit.engine_harness import tiny_model


@pytest.fixture
def model() -> str:
    return uuid.uuid4().hex


async def test_a_suspect_waits_until_its_worker_is_empty_and_its_claim_says_so(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model, renews=True) as w:
        await submit(w.bus, model)
        done = asyncio.Event()

        async def work(_: Holding) -> None:
            await done.wait()

        neighbour = await w.hold(work)
        suspect = await submit(w.bus, model, crashed=SUSPECT_AFTER)
        await w.meet_suspect()
        assert await w.holdings.suspects_turn() is None
        assert (await state_of(w.bus, suspect)).epoch == SUSPECT_AFTER
        done.set()
        holding = await w.suspect_taken()
        assert holding.request_id == suspect.request_id
        last = (await state_of(w.bus, suspect)).claims[-1]
        assert (last.worker, last.alone) == (w.name, True)
        assert neighbour.stop_reason is None


async def test_a_suspect_that_waits_is_kept_from_others(nats_url: str, model: str) -> None:
    """Else it would go round among workers that are all busy, and each of them would stop pulling for it."""
    async with worker(nats_url, "prefill-0", model, renews=True) as w, worker(nats_url, "prefill-1", model) as other:
        await submit(w.bus, model)
        await w.hold(idle)
        await submit(w.bus, model, crashed=SUSPECT_AFTER)
        await w.meet_suspect()
        assert await other.queue.pull(1, 3.0) == []
        durable = f"{WorkQueue.durable_name('prefill', model)}-normal"
        info = await w.bus.js.consumer_info(REQUESTS["normal"].name, durable)
        info.config.ack_wait = 600.0  # from here on only what is given back comes again
        await w.bus.js.add_consumer(REQUESTS["normal"].name, info.config)
        await asyncio.gather(*await w.holdings.hand_all_back())
        given_back: list[Delivery] = []
        async with asyncio.timeout(20):
            while len(given_back) < 2:
                given_back += await other.queue.pull(2 - len(given_back), 1.0)


async def test_running_work_is_handed_back_for_a_suspect_that_would_wait_too_long(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model, renews=True) as w:
        running = await submit(w.bus, model)
        interrupted = asyncio.Event()

        async def work(_: Holding) -> None:
            try:
                await asyncio.sleep(600)
            finally:
                interrupted.set()

        await w.hold(work)
        suspect = await submit(w.bus, model, crashed=SUSPECT_AFTER)
        await w.meet_suspect()
        holding = await w.suspect_taken()
        assert holding.request_id == suspect.request_id
        assert interrupted.is_set()
        state = await state_of(w.bus, running)
        assert state.unproductive == [], "handed back in good order"
        assert w.holdings.ids() == [suspect.request_id]
        again = await w.pull()
        assert decode_request(again.data).request_id == running.request_id


async def test_nothing_begins_beside_a_suspect_before_its_first_token(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        await submit(w.bus, model, crashed=SUSPECT_AFTER)
        write = asyncio.Event()

        async def work(held: Holding) -> None:
            await write.wait()
            await held.log.append(Tokens(epoch=held.epoch, index=0, ids=[1], text="x"))
            await asyncio.sleep(600)

        await w.hold(work)
        assert w.holdings.exclusive
        write.set()
        async with asyncio.timeout(10):
            while w.holdings.exclusive:
                await asyncio.sleep(0.02)
        assert len(w.holdings) == 1
        await asyncio.gather(*await w.holdings.hand_all_back())


@pytest.mark.parametrize("end", ["lost", "failed"])
async def test_a_suspect_that_is_gone_holds_nothing_up(nats_url: str, model: str, end: str) -> None:
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model, crashed=SUSPECT_AFTER)

        async def work(held: Holding) -> None:
            if end == "failed":
                raise RuntimeError("a step of the engine")
            thief = w.bus.open_log("t", request.request_id, held.log.last_seq)
            await thief.append(Claimed(9, "prefill", "prefill-1.x", at_unix_s=time.time()))
            await held.log.append(Tokens(epoch=held.epoch, index=0, ids=[1], text="x"))

        holding = await w.hold(work)
        assert holding.task is not None
        await asyncio.wait({holding.task}, timeout=10)
        assert not w.holdings.exclusive


async def test_a_suspect_that_is_cancelled_while_it_waits_holds_nothing_up(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model, renews=True) as w:
        await w.bus.on_cancel(w.holdings.on_cancel)
        await submit(w.bus, model)
        await w.hold(idle)
        suspect = await submit(w.bus, model, crashed=SUSPECT_AFTER)
        await w.meet_suspect()
        await w.holdings.on_cancel(suspect.request_id)
        assert w.holdings.exclusive, "a hint that the log does not bear out"
        await w.bus.end_request("t", suspect.request_id, Ended(epoch=0, reason="cancelled", usage=Usage(3, 0)))
        async with asyncio.timeout(10):
            while w.holdings.exclusive:
                await asyncio.sleep(0.02)
        assert w.dropped == [suspect.request_id]
        assert await w.queue.pull(1, 3.0) == []


async def test_a_drain_gives_a_waiting_suspect_back_and_counts_no_crash(nats_url: str, model: str) -> None:
    async with worker(nats_url, "prefill-0", model) as leaving, worker(nats_url, "prefill-1", model) as staying:
        suspect = await submit(leaving.bus, model, crashed=SUSPECT_AFTER, crashed_alone=CONVICTED_AFTER - 1)
        alone = await leaving.hold(idle)
        assert alone.alone
        await asyncio.gather(*await leaving.holdings.hand_all_back())
        holding = await staying.hold(idle)
        assert holding.alone, "a drained claim is no crash, so it is not convicted"
        assert len((await state_of(staying.bus, suspect)).claims) == SUSPECT_AFTER + CONVICTED_AFTER + 1


@pytest.mark.parametrize("buried_before", [False, True])
async def test_a_convicted_request_ends_with_an_error_and_is_buried_once_with_its_cause(
    nats_url: str, model: str, buried_before: bool
) -> None:
    """A worker may have died between the dead letter and the terminal record."""
    async with worker(nats_url, "prefill-0", model) as w:
        request = await submit(w.bus, model, crashed=SUSPECT_AFTER, crashed_alone=CONVICTED_AFTER)
        crashed = [f"prefill-9.dead{n}" for n in range(SUSPECT_AFTER + CONVICTED_AFTER)]
        if buried_before:
            await w.bus.bury("prefill", request, "worker_crashed", crashed)
        async with asyncio.timeout(20):
            while (ended := (await state_of(w.bus, request)).ended) is None:
                assert await w.take(await w.pull()) is None
        assert ended.error is not None
        assert (ended.reason, ended.error.code) == ("error", "worker_crashed")
        assert w.dropped == [request.request_id]
        subject = dead_subject("prefill", "t", request.request_id)
        info = await w.bus.js.stream_info("HR_DEAD", subjects_filter=subject)
        assert info.state.subjects == {subject: 1}
        dead = await w.bus.js.get_last_msg("HR_DEAD", subject)
        assert decode_request(dead.data or b"") == request
        headers = dead.headers or {}
        assert headers["Headrace-Cause"] == "worker_crashed"
        assert headers["Headrace-Stage"] == "prefill"
        assert headers["Headrace-Claims"] == ",".join(crashed)
        assert await w.queue.pull(1, 0.5) == []


async def test_the_names_in_a_dead_letter_are_bounded(nats_url: str, model: str) -> None:
    async with await Bus.connect(nats_url, name="test") as bus:
        request = await submit(bus, model)
        await bus.bury("prefill", request, "worker_crashed", [f"w{n}" for n in range(1000)])
        dead = await bus.js.get_last_msg("HR_DEAD", dead_subject("prefill", "t", request.request_id))
        assert (dead.headers or {})["Headrace-Claims"].split(",") == [f"w{n}" for n in range(984, 1000)]


async def test_a_hand_back_record_is_written_by_the_holder_only(nats_url: str, model: str) -> None:
    """A worker that was overtaken and then drains would otherwise cut its successor's log off."""
    async with worker(nats_url, "prefill-0", model) as leaving, worker(nats_url, "prefill-1", model) as staying:
        request = await submit(leaving.bus, model)
        holding = await leaving.hold(idle)
        successor = staying.bus.open_log("t", request.request_id, holding.log.last_seq)
        await successor.append(Claimed(2, "prefill", staying.name, at_unix_s=time.time()))
        await asyncio.gather(*await leaving.holdings.hand_all_back())
        records = [e.record for e in await staying.bus.open_log("t", request.request_id).read()]
        assert not any(isinstance(r, HandedBack) for r in records)
        await successor.append(Tokens(epoch=2, index=0, ids=[1], text="x"))
        assert await staying.queue.pull(1, 0.3) == [], "its message is the successor's"


async def test_of_many_requests_in_one_pull_none_begins_beside_a_suspect(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Two suspects among eight; the order of all records of all logs is their sequence in the stream.

    The worker holds back while a job waits for decode, so that it finds all of them at once.
    """
    tiny = tiny_model(tmp_path / uuid.uuid4().hex)
    async with pipeline_on(nats_url, redis_url, tiny) as pipeline:
        prefill = await pipeline.prefill(slots=8, max_jobs_waiting=1)
        await pipeline.submit(text(99, 40))
        async with asyncio.timeout(20):
            while await pipeline.bus.queue_depth("decode", tiny.name) == 0 or len(prefill.worker.holdings):
                await asyncio.sleep(0.02)
            while prefill.bus.statuses.holder_alive_s("prefill-9.dead0", "any", 1.0):
                await asyncio.sleep(0.05)
        await asyncio.sleep(3 * PULL_WAIT_S)  # the pull that was under way when the job came is over
        requests = []
        for n in range(8):
            requests.append(await pipeline.submit(text(n, 40), seed=n))
            if n in (0, 5):
                log = pipeline.bus.open_log("t", requests[n].request_id, requests[n].log_seq)
                for crash in range(SUSPECT_AFTER):
                    await log.append(Claimed(crash + 1, "prefill", f"prefill-9.dead{crash}", at_unix_s=time.time()))
        await pipeline.decode()
        for request in requests:
            state = await pipeline.until_ended(request)
            assert state.ended is not None
            assert state.ended.reason == "length"
        entries = [
            (entry.seq, request.request_id, entry.record)
            for request in requests
            for entry in await pipeline.bus.open_log("t", request.request_id).read()
        ]
    begun: set[str] = set()
    alone: list[str] = []
    for _, request_id, record in sorted(entries, key=lambda e: e[0]):
        if isinstance(record, Claimed) and record.stage == "prefill" and not record.worker.startswith("prefill-9"):
            assert not (begun and record.alone), "a suspect began beside others"
            assert not set(alone) & begun, "another began beside a suspect"
            begun.add(request_id)
            if record.alone:
                alone.append(request_id)
        elif isinstance(record, Tokens | HandedBack):
            begun.discard(request_id)
    assert sorted(alone) == sorted([requests[0].request_id, requests[5].request_id])
