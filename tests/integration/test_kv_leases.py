"""Who gives leases back when their holders cannot: the store, by what the request's log says and by nothing else."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest_asyncio
from prometheus_client import CollectorRegistry

from services.kvstore.lease_audit import LOOKS_PER_ROUND, MAX_HINTS, LeaseAudit
from services.kvstore.slabs import SlabPool
from services.kvstore.store import BlockStore, Ticket
from shared.blocks import KVClient
from shared.bus import Bus
from shared.protocol.kv import BlockMeta
from shared.protocol.records import Accepted, Claimed, Ended, Usage
from shared.protocol.subjects import log_subject
from shared.telemetry.metrics import KVStoreMetrics
from shared.transport.tcp import TcpTransport
from tests.conftest import NatsServer
from tests.integration.kv_harness import SECRET, StoreProcess, eventually
from tests.integration.test_kv_store_process import blocks

REST_S = 5.0
LEASE_S = 600.0
TENANT = "tenant one"


@pytest_asyncio.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with await Bus.connect(nats_url, name="test") as connected:
        yield connected


def fresh_id() -> str:
    return f"request-{time.time_ns()}"


async def accept(bus: Bus, request_id: str) -> None:
    """A request that a worker has claimed."""
    now = time.time()
    log = await bus.create_log(Accepted(request_id, TENANT, "m", "chat", now, now + LEASE_S, 3, 1))
    await log.append(Claimed(epoch=1, stage="prefill", worker="prefill-0.1", at_unix_s=now))


async def end(bus: Bus, request_id: str) -> None:
    """The terminal record alone, without the hint: as by a holder that was killed right behind it."""
    log = bus.open_log(TENANT, request_id)
    log.last_seq = (await log.last()).seq
    await log.append(Ended(epoch=1, reason="stop", usage=Usage(3, 5)))


class Desk:
    """A store and its audit on a real NATS server, with time in the test's hands."""

    def __init__(self, bus: Bus, *, max_leases: int = 8192) -> None:
        self.store = BlockStore(SlabPool(8 * 4096), max_leases=max_leases)
        self.metrics = KVStoreMetrics("store", CollectorRegistry())
        self.audit = LeaseAudit(self.store, bus, self.metrics, rest_s=REST_S)
        ticket = self.store.begin_put(BlockMeta(bytes(16), 32, 4096, 0), 0.0)
        assert isinstance(ticket, Ticket)
        self.store.commit(ticket, 0.0)

    def lease(self, request_id: str, now_s: float = 0.0, tenant: str = TENANT) -> None:
        assert self.store.lease(request_id, [bytes(16)], LEASE_S, now_s, tenant) == [True]

    @property
    def leases(self) -> int:
        return self.store.stats().leases

    @property
    def given_back(self) -> float:
        return float(self.metrics.leases_given_back._value.get())


async def test_the_lease_of_an_ended_request_that_nobody_released_is_given_back_after_a_rest(bus: Bus) -> None:
    desk, ended, running = Desk(bus), fresh_id(), fresh_id()
    for request_id in (ended, running):
        await accept(bus, request_id)
        desk.lease(request_id)
    await end(bus, ended)
    await desk.audit.step(REST_S - 0.1)
    assert desk.leases == 2
    await desk.audit.step(REST_S)
    assert (desk.store.tenant_of(ended), desk.store.tenant_of(running)) == ("", TENANT)
    assert desk.given_back == 1
    await end(bus, running)
    await desk.audit.step(2 * REST_S)
    assert desk.leases == 0
    assert desk.store.stats().evictable == 1


async def test_a_lease_without_any_log_is_given_back(bus: Bus) -> None:
    desk = Desk(bus)
    desk.lease(fresh_id())
    await desk.audit.step(REST_S)
    assert desk.leases == 0


async def test_a_lease_that_names_no_tenant_is_left_to_its_time(bus: Bus) -> None:
    desk, request_id = Desk(bus), fresh_id()
    desk.lease(request_id, tenant="")
    await desk.audit.on_cancel(request_id)
    await desk.audit.step(REST_S)
    assert desk.leases == 1
    desk.store.expire(LEASE_S)
    assert desk.leases == 0


async def test_a_put_that_comes_after_the_release_makes_no_lease_that_stays(bus: Bus) -> None:
    desk, request_id = Desk(bus), fresh_id()
    await accept(bus, request_id)
    desk.lease(request_id)
    await end(bus, request_id)
    assert desk.store.release(request_id, 1.0)
    desk.lease(request_id, 2.0)  # prefill was in the middle of it, or was stopped and woke up
    await desk.audit.step(2.0 + REST_S)
    assert desk.leases == 0


async def test_a_hint_gives_the_lease_back_at_once_and_only_if_the_log_agrees(bus: Bus) -> None:
    desk, ended, running = Desk(bus), fresh_id(), fresh_id()
    for request_id in (ended, running):
        await accept(bus, request_id)
        desk.lease(request_id)
    await end(bus, ended)
    for request_id in (ended, running, "of nobody"):
        await desk.audit.on_cancel(request_id)
    await desk.audit.step(0.1)
    assert (desk.store.tenant_of(ended), desk.store.tenant_of(running)) == ("", TENANT)


async def test_a_log_that_cannot_be_read_proves_nothing(bus: Bus) -> None:
    desk, broken, ended = Desk(bus), fresh_id(), fresh_id()
    await bus.js.publish(log_subject(TENANT, broken), b"\xff not a record")
    await accept(bus, ended)
    await end(bus, ended)
    desk.lease(broken)
    desk.lease(ended)
    await desk.audit.step(REST_S)
    assert (desk.store.tenant_of(broken), desk.store.tenant_of(ended)) == (TENANT, "")


async def test_a_round_looks_at_a_bounded_number_of_logs_and_the_rounds_reach_all(bus: Bus) -> None:
    desk = Desk(bus)
    many = 3 * LOOKS_PER_ROUND
    for n in range(many):
        desk.lease(f"unknown-{n}")
    await desk.audit.on_cancel(f"unknown-{many - 1}")
    left = []
    for _ in range(3):
        await desk.audit.step(REST_S)
        left.append(desk.leases)
    assert left == [2 * LOOKS_PER_ROUND, LOOKS_PER_ROUND, 0]


async def test_hints_beyond_the_bound_are_found_as_leases_that_rest(bus: Bus) -> None:
    desk = Desk(bus)
    many = MAX_HINTS + 5
    for n in range(many):
        desk.lease(f"unknown-{n}")
        await desk.audit.on_cancel(f"unknown-{n}")
    for _ in range(many // LOOKS_PER_ROUND + 1):
        await desk.audit.step(0.0)
    assert desk.leases == 5
    await desk.audit.step(REST_S)
    assert desk.leases == 0


async def test_while_nats_is_away_no_lease_is_given_back_and_afterwards_all_are(own_nats: NatsServer) -> None:
    async with await Bus.connect(own_nats.url, name="test") as bus:
        desk, ended = Desk(bus), [fresh_id() for _ in range(3)]
        for request_id in ended:
            await accept(bus, request_id)
            await end(bus, request_id)
            desk.lease(request_id)
        own_nats.kill()
        await desk.audit.on_cancel(ended[0])
        await desk.audit.step(0.1)
        await desk.audit.step(REST_S)
        assert desk.leases == 3
        own_nats.start()

        async def hinted_is_back() -> bool:
            await desk.audit.step(REST_S + 0.1)
            return desk.leases == 2

        await eventually(hinted_is_back)
        assert desk.store.tenant_of(ended[0]) == ""
        now_s = REST_S

        async def all_back() -> bool:
            nonlocal now_s
            now_s += REST_S
            await desk.audit.step(now_s)
            return desk.leases == 0

        await eventually(all_back)
        assert desk.given_back == 3


# The service itself


class Pair:
    """Two stores in processes of their own, and a worker's client that spreads blocks over both."""

    def __init__(self, nats_url: str, redis_url: str, rest_s: float) -> None:
        name = f"lease-{time.time_ns()}"
        self.stores = [
            StoreProcess(f"{name}-{n}", "tcp", nats_url, redis_url, HEADRACE_STORE_LEASE_REST_S=str(rest_s)).start()
            for n in range(2)
        ]
        self.client = KVClient(lambda: [store.place for store in self.stores], TcpTransport(), SECRET, None)

    async def leases(self) -> list[int]:
        stats = [await self.client.stats(store.place) for store in self.stores]
        return [told.leases for told in stats if told is not None]

    async def put(self, request_id: str) -> None:
        refs = await self.client.put(request_id, LEASE_S, blocks(20, request_id), tenant=TENANT)
        assert {place for ref in refs for place in ref.places} == {store.place for store in self.stores}
        assert await self.leases() == [1, 1]

    async def none_left(self) -> bool:
        return await self.leases() == [0, 0]

    def close(self) -> None:
        self.client.close()
        for store in self.stores:
            store.kill()


async def test_both_stores_of_a_cancelled_request_give_its_leases_back_at_once(
    bus: Bus, nats_url: str, redis_url: str
) -> None:
    pair, request_id = Pair(nats_url, redis_url, rest_s=3600), fresh_id()
    try:
        await accept(bus, request_id)
        await pair.put(request_id)
        assert await bus.end_request(TENANT, request_id, Ended(epoch=0, reason="cancelled", usage=Usage(3, 0)))
        await eventually(pair.none_left, within_s=60)
    finally:
        pair.close()


async def test_both_stores_find_out_by_themselves_that_a_request_has_ended(
    bus: Bus, nats_url: str, redis_url: str
) -> None:
    pair, request_id = Pair(nats_url, redis_url, rest_s=0.2), fresh_id()
    try:
        await accept(bus, request_id)
        await pair.put(request_id)
        await end(bus, request_id)
        await eventually(pair.none_left, within_s=60)
    finally:
        pair.close()


async def test_the_first_renewal_cuts_a_lease_that_reaches_to_the_deadline(
    bus: Bus, nats_url: str, redis_url: str
) -> None:
    pair, request_id = Pair(nats_url, redis_url, rest_s=3600), fresh_id()
    try:
        await accept(bus, request_id)
        await pair.put(request_id)
        assert await pair.client.renew(request_id, 1.0) == []
        await eventually(pair.none_left, within_s=60)
    finally:
        pair.close()


async def test_a_renewal_names_the_store_that_has_lost_the_lease(nats_url: str, redis_url: str) -> None:
    pair, request_id = Pair(nats_url, redis_url, rest_s=3600), fresh_id()
    forgetful = KVClient(lambda: [pair.stores[0].place], TcpTransport(), SECRET, None)
    try:
        await pair.put(request_id)
        await forgetful.release(request_id)
        assert await pair.client.renew(request_id, LEASE_S) == [pair.stores[0].place]
        pair.stores[0].kill()
        assert await pair.client.renew(request_id, LEASE_S) == [], "one that is away has said nothing"
    finally:
        forgetful.close()
        pair.close()
