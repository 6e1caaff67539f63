"""The bus on a real NATS server: appends, reading, following, pulling, and what a restart of the server does."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import pytest

from shared.bus import (
    AppendRefused,
    Bus,
    DuplicateWork,
    LogExists,
    LogState,
    RequestLog,
    RequestUnknown,
    ServerMissing,
    request_keys,
)
from shared.protocol.jobs import GenerationRequest, SamplingParams, decode_request
from shared.protocol.records import Accepted, Claimed, Ended, Tokens, Usage
from shared.protocol.subjects import Priority
from tests.conftest import NatsServer, free_port


def accepted(request_id: str | None = None) -> Accepted:
    now = time.time()
    return Accepted(
        request_id=request_id or f"t-{uuid.uuid4().hex}",
        tenant="acme.corp",
        model="m",
        api="chat",
        created_unix_s=now,
        deadline_unix_s=now + 60,
        prompt_tokens=3,
        seed=1,
    )


def request(model: str, priority: Priority = "normal", request_id: str | None = None) -> GenerationRequest:
    now = time.time()
    return GenerationRequest(
        request_id=request_id or f"t-{uuid.uuid4().hex}",
        tenant="acme.corp",
        model=model,
        api="chat",
        priority=priority,
        prompt_ids=[1, 2, 3],
        params=SamplingParams(max_tokens=4, seed=1),
        created_unix_s=now,
        queue_deadline_unix_s=now + 60,
        deadline_unix_s=now + 60,
        log_seq=0,
    )


def tokens(index: int, *ids: int, epoch: int = 1) -> Tokens:
    return Tokens(epoch=epoch, index=index, ids=list(ids), text="".join(f"<{i}>" for i in ids))


def ended(completion_tokens: int = 0) -> Ended:
    return Ended(epoch=1, reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=completion_tokens))


async def test_a_log_is_created_once(nats_url: str) -> None:
    async with await Bus.connect(nats_url, name="t") as bus:
        first = accepted()
        await bus.create_log(first)
        with pytest.raises(LogExists):
            await bus.create_log(first)


async def test_the_second_of_two_writers_is_refused_and_never_read(nats_url: str) -> None:
    async with await Bus.connect(nats_url, name="t") as bus:
        begun = accepted()
        winner = await bus.create_log(begun)
        loser = bus.open_log(begun.tenant, begun.request_id, winner.last_seq)
        async with bus.follow(begun.tenant, begun.request_id) as reader:
            await winner.append(Claimed(epoch=1, stage="decode", worker="a", at_unix_s=1.0))
            with pytest.raises(AppendRefused):
                await loser.append(Claimed(epoch=1, stage="decode", worker="b", at_unix_s=1.0))
            await winner.append(ended())
            read = [entry.record async for entry in reader]
        assert [r.worker for r in read if isinstance(r, Claimed)] == ["a"]
        assert (await bus.open_log(begun.tenant, begun.request_id).state()).claims[0].worker == "a"


async def test_readers_from_any_point_see_each_record_once_in_order(nats_url: str) -> None:
    async with await Bus.connect(nats_url, name="w") as writer, await Bus.connect(nats_url, name="r") as other:
        begun = accepted()
        log = await writer.create_log(begun)

        async def read(after: int, delay_s: float) -> list[int]:
            await asyncio.sleep(delay_s)
            async with other.follow(begun.tenant, begun.request_id, after) as reader:
                return [entry.seq async for entry in reader]

        seqs = [log.last_seq]
        async with asyncio.TaskGroup() as group:
            early = [group.create_task(read(0, 0.0)) for _ in range(3)]
            late = [group.create_task(read(log.last_seq, 0.05 * n)) for n in range(1, 5)]
            for index in range(700):  # more than one batch of a direct get
                seqs.append(await log.append(tokens(index, index)))
            seqs.append(await log.append(ended(700)))
            after_the_end = group.create_task(read(seqs[-3], 0.3))
        assert all(task.result() == seqs for task in early)
        assert all(task.result() == seqs[1:] for task in late)
        assert after_the_end.result() == seqs[-2:]
        state = await other.open_log(begun.tenant, begun.request_id).state()
        assert state.output_ids == list(range(700))
        assert state.ended is not None


async def test_subjects_of_strangers_do_not_hide_a_tenants_requests(own_nats: NatsServer) -> None:
    strange = "hr.req.m.normal.acme=2e=corp.=ffffff="
    async with await Bus.connect(own_nats.url, name="t") as bus:
        await bus.publish_request(request("m", request_id="mine"))
        await bus.js.publish(strange, b"")
        assert await bus.unfinished_of("acme.corp") == {"mine"}
    assert request_keys([strange, "hr.tok.a.b"]) == {"hr.tok.a.b": ("a", "b")}


async def test_unknown_requests_are_named(nats_url: str) -> None:
    async with await Bus.connect(nats_url, name="t") as bus:
        with pytest.raises(RequestUnknown, match="nobody"):
            await bus.open_log("default", "nobody").state()
        with pytest.raises(RequestUnknown):
            await bus.end_request("default", "nobody", ended())


async def test_a_request_that_is_ended_for_want_of_a_worker_is_left_to_one_that_claims_it_meanwhile(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Bus.connect(nats_url, name="t") as bus:
        begun = accepted()
        log = await bus.create_log(begun)
        append = RequestLog.append

        async def be_late(self: RequestLog, record: Any, **more: Any) -> int:
            monkeypatch.undo()
            await log.append(Claimed(1, "prefill", "p", time.time()))
            return await append(self, record, **more)

        monkeypatch.setattr(RequestLog, "append", be_late)
        assert not await bus.end_request(begun.tenant, begun.request_id, ended(), unclaimed_only=True)
        assert (await bus.open_log(begun.tenant, begun.request_id).state()).ended is None
        assert await bus.end_request(begun.tenant, begun.request_id, ended())


async def test_only_the_first_canceller_ends_a_request(nats_url: str) -> None:
    async with await Bus.connect(nats_url, name="t") as bus:
        begun = accepted()
        log = await bus.create_log(begun)
        await log.append(tokens(0, 5, 6))
        heard: list[str] = []
        arrived = asyncio.Event()

        async def on_cancel(request_id: str) -> None:
            heard.append(request_id)
            arrived.set()

        await bus.on_cancel(on_cancel)
        results = await asyncio.gather(*(bus.end_request(begun.tenant, begun.request_id, ended()) for _ in range(4)))
        assert sorted(results) == [False, False, False, True]
        async with asyncio.timeout(5):
            await arrived.wait()
        assert heard == [begun.request_id]
        state = await bus.open_log(begun.tenant, begun.request_id).state()
        assert state.ended is not None
        assert state.ended.usage.completion_tokens == 2
        with pytest.raises(AppendRefused):
            await log.append(tokens(2, 7))


async def test_work_is_pulled_once_into_free_slots_only(nats_url: str) -> None:
    model = f"m.{uuid.uuid4().hex}"
    async with await Bus.connect(nats_url, name="a") as a, await Bus.connect(nats_url, name="b") as b:
        sent = [request(model) for _ in range(5)]
        for work in sent:
            await a.publish_request(work)
        assert await a.queue_depth("prefill", model) == 5
        with pytest.raises(DuplicateWork):
            await a.publish_request(sent[0])
        queues = [a.request_queue(model), b.request_queue(model)]
        for queue in queues:
            await queue.open()
        taken = await queues[0].pull(2, 0.2)
        assert len(taken) == 2
        taken += await queues[1].pull(8, 0.2)
        assert sorted(decode_request(d.data).request_id for d in taken) == sorted(w.request_id for w in sent)
        for delivery in taken:
            await delivery.ack()
        assert await queues[0].pull(4, 0.1) == []
        assert await a.queue_depth("prefill", model) == 0
        for queue in queues:
            await queue.close()


async def test_work_given_back_reaches_another_worker_at_once(nats_url: str) -> None:
    model = uuid.uuid4().hex
    async with await Bus.connect(nats_url, name="a") as a, await Bus.connect(nats_url, name="b") as b:
        queue_a, queue_b = a.request_queue(model), b.request_queue(model)
        await queue_a.open()
        await queue_b.open()
        await a.publish_request(request(model))
        (delivery,) = await queue_a.pull(1, 1.0)
        waiting = asyncio.create_task(queue_b.pull(1, 10.0))
        await asyncio.sleep(0.1)
        await delivery.give_back()
        (again,) = await waiting
        assert again.num_delivered == 2
        await again.ack()


async def test_renewed_work_stays_and_abandoned_work_moves(nats_url: str) -> None:
    model = uuid.uuid4().hex
    async with await Bus.connect(nats_url, name="a") as a, await Bus.connect(nats_url, name="b") as b:
        queue_a, queue_b = a.request_queue(model), b.request_queue(model)
        await queue_a.open()
        await queue_b.open()
        await a.publish_request(request(model, request_id="kept"))
        await a.publish_request(request(model, request_id="dropped"))
        mine = {decode_request(d.data).request_id: d for d in await queue_a.pull(2, 1.0)}

        async def renew() -> None:
            while True:
                await mine["kept"].renew()
                await asyncio.sleep(0.5)

        renewing = asyncio.create_task(renew())
        moved = []
        while not moved:
            moved = await queue_b.pull(2, 5.0)
        assert [decode_request(d.data).request_id for d in moved] == ["dropped"]
        renewing.cancel()
        await moved[0].ack()
        await mine["kept"].ack()


async def test_no_priority_starves_and_high_goes_first(nats_url: str) -> None:
    model = uuid.uuid4().hex
    async with await Bus.connect(nats_url, name="a") as bus:
        for priority in ("low", "normal", "high"):
            for _ in range(13):
                await bus.publish_request(request(model, priority))  # type: ignore[arg-type]
        queue = bus.request_queue(model)
        await queue.open()
        order: list[str] = []
        for _ in range(13):
            (delivery,) = await queue.pull(1, 1.0)
            order.append(delivery.priority)
            await delivery.ack()
        assert order.count("high") > order.count("normal") > order.count("low") >= 1


async def test_a_killed_nats_server_loses_no_acknowledged_record(own_nats: NatsServer) -> None:
    async with await Bus.connect(own_nats.url, name="t") as bus:
        begun = accepted()
        log = await bus.create_log(begun)

        under_way = asyncio.Event()

        async def write() -> None:
            for index in range(300):
                await log.append(tokens(index, index))
                if index == 100:
                    under_way.set()
            await log.append(ended(300))

        async def read() -> list[int]:
            async with bus.follow(begun.tenant, begun.request_id) as reader:
                return [i async for e in reader if isinstance(e.record, Tokens) for i in e.record.ids]

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read())
            writing = group.create_task(write())
            await under_way.wait()
            own_nats.kill()
            await asyncio.sleep(0.5)
            assert not writing.done()
            await asyncio.to_thread(own_nats.start)
        assert reading.result() == list(range(300))
        assert LogState.replay(await log.read()).output_ids == list(range(300))


async def test_a_missing_server_is_one_clear_line() -> None:
    with pytest.raises(ServerMissing, match=r"headrace up.*HEADRACE_NATS_URL"):
        await Bus.connect(f"nats://user:secret@127.0.0.1:{free_port()}", name="t", wait_s=0.6)
