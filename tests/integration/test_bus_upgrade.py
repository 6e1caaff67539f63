"""A queue that an earlier version left behind: its work moves to the streams of today, whoever starts first."""

from __future__ import annotations

import asyncio

from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StreamConfig

from shared.bus import Bus, list_subjects
from shared.bus.streams import stream_config
from shared.bus.upgrade import retire_single_stream
from shared.protocol.jobs import decode_request, encode_work
from shared.protocol.streams import REQUESTS, SINGLE_REQUESTS
from shared.protocol.subjects import PRIORITIES, Priority, request_subject
from tests.conftest import NatsServer
from tests.integration.test_bus import request


async def earlier_queue(bus: Bus) -> None:
    """As the earlier version made it, with its workers' consumers."""
    for spec in REQUESTS.values():
        await bus.js.delete_stream(spec.name)
    await bus.js.add_stream(
        StreamConfig(
            name=SINGLE_REQUESTS, subjects=["hr.req.>"], retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW, max_msgs=4096, max_msgs_per_subject=1, discard_new_per_subject=True,
        )
    )  # fmt: skip
    for priority in PRIORITIES:
        await bus.js.add_consumer(
            SINGLE_REQUESTS,
            ConsumerConfig(
                durable_name=f"prefill-m-{priority}", filter_subject=f"hr.req.m.{priority}.*.*",
                ack_policy=AckPolicy.EXPLICIT,
            ),
        )  # fmt: skip


async def queue_there(bus: Bus, count: int) -> list[str]:
    ids = []
    for n in range(count):
        priority: Priority = PRIORITIES[n % 3]
        work = request("m", priority)
        subject = request_subject(work.model, work.priority, work.tenant, work.request_id)
        await bus.js.publish(subject, encode_work(work), headers={"traceparent": "00-x"})
        ids.append(work.request_id)
    return ids


async def test_work_queued_by_an_earlier_version_is_served_by_whoever_starts(own_nats: NatsServer) -> None:
    async with await Bus.connect(own_nats.url, name="old") as bus:
        await earlier_queue(bus)
        ids = await queue_there(bus, 30)
    starting = [Bus.connect(own_nats.url, name=f"new-{n}") for n in range(4)]
    buses = await asyncio.gather(*starting)
    try:
        queue = buses[0].request_queue("m")
        await queue.open()
        served = []
        while len(served) < len(ids):
            for delivery in await queue.pull(8, 1.0):
                assert delivery.headers["traceparent"] == "00-x"
                served.append(decode_request(delivery.data).request_id)
                await delivery.ack()
        assert sorted(served) == sorted(ids)
        assert await queue.pull(8, 0.3) == []
        names = [info.config.name for info in await buses[0].js.streams_info()]
        assert SINGLE_REQUESTS not in names
    finally:
        for connected in buses:
            await connected.close()


async def test_what_finds_no_place_stays_for_the_next_start_and_keeps_nobody_from_starting(
    own_nats: NatsServer,
) -> None:
    async with await Bus.connect(own_nats.url, name="old") as bus:
        await earlier_queue(bus)
        await queue_there(bus, 12)
        await bus.js.publish("hr.req.m.urgent.t.unknown", b"of no priority that there is")
        await retire_single_stream(bus.js)
        for spec in REQUESTS.values():
            await bus.js.add_stream(stream_config(spec).evolve(max_msgs=2))
    for limit, left in ((2, 7), (3, 4), (4, 1)):
        async with await Bus.connect(own_nats.url, name="next") as bus:
            queued = [await list_subjects(bus.client, spec.name) for spec in REQUESTS.values()]
            assert [len(subjects) for subjects in queued] == [limit] * 3
            assert (await bus.js.stream_info(SINGLE_REQUESTS)).state.messages == left
            await bus.limit_requests(dict.fromkeys(PRIORITIES, limit + 1))
