"""The store's upkeep of the index, on a real server and with time in the test's hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio
from prometheus_client import CollectorRegistry

from services.kvstore.slabs import SlabPool
from services.kvstore.store import BlockStore, Ticket
from services.kvstore.upkeep import BATCH, INTERVAL_S, IndexUpkeep
from shared.blocks import BlockIndex
from shared.blocks.index import ENTRY_TTL_S
from shared.protocol.blocks import Place
from shared.protocol.kv import BlockMeta
from shared.telemetry.metrics import KVStoreMetrics
from tests.integration.kv_harness import RedisProcess, eventually

SIZE = 4096
PLACE = Place("store", "127.0.0.1", 1, "tcp")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path).start()
    yield process
    process.kill()


@pytest_asyncio.fixture
async def index(server: RedisProcess) -> AsyncIterator[BlockIndex]:
    made = BlockIndex(server.url)
    yield made
    await made.close()


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def fill(store: BlockStore, count: int, first: int = 0) -> list[bytes]:
    for n in range(first, first + count):
        ticket = store.begin_put(BlockMeta(key(n), 32, SIZE, n), 0.0)
        assert isinstance(ticket, Ticket)
        store.commit(ticket, 0.0)
    return [key(n) for n in range(first, first + count)]


def make(index: BlockIndex, slots: int) -> tuple[BlockStore, IndexUpkeep]:
    store = BlockStore(SlabPool(slots * SIZE))
    return store, IndexUpkeep(store, index, PLACE, "run-1", KVStoreMetrics("store", CollectorRegistry()))


async def test_all_changes_reach_the_index_in_one_step(index: BlockIndex) -> None:
    store, upkeep = make(index, 2 * BATCH)
    keys = fill(store, BATCH + 100)
    await upkeep.step(0.0)
    assert set(await index.lookup(keys)) == set(keys)
    assert not store.changes


async def test_entries_are_written_again_before_they_expire(index: BlockIndex, server: RedisProcess) -> None:
    store, upkeep = make(index, 300)
    keys = fill(store, 300)
    await upkeep.step(0.0)
    async with redis.asyncio.Redis.from_url(server.url) as client:
        await client.delete(*[f"hr:kv:block:{k.hex()}" for k in keys])
        assert await index.lookup(keys) == {}
        now_s = 0.0
        while now_s < ENTRY_TTL_S * 0.9:
            now_s += INTERVAL_S
            await upkeep.step(now_s)
        assert set(await index.lookup(keys)) == set(keys)


async def test_the_rewriting_is_spread_over_time(index: BlockIndex, server: RedisProcess) -> None:
    store, upkeep = make(index, 300)
    fill(store, 300)
    await upkeep.step(0.0)
    now_s = 0.0
    async with redis.asyncio.Redis.from_url(server.url) as client:

        async def writes() -> int:
            return int((await client.info("commandstats"))["cmdstat_hset"]["calls"])

        before = first = await writes()
        while now_s < ENTRY_TTL_S:
            now_s += INTERVAL_S
            await upkeep.step(now_s)
            after = await writes()
            assert after - before < 30
            before = after
        assert before - first >= 300


async def test_what_changes_while_redis_is_away_is_made_good(index: BlockIndex, server: RedisProcess) -> None:
    store, upkeep = make(index, 8)
    old = fill(store, 8)
    await upkeep.step(0.0)
    server.kill()
    new = fill(store, 4, first=100)
    for n in range(5):
        await upkeep.step(1.0 + n)
    assert set(store.changes) >= {*old[:4], *new}
    server.start()
    now_s = 10.0

    async def true_again() -> bool:
        nonlocal now_s
        now_s += 1.0
        await upkeep.step(now_s)
        return set(await index.lookup([*old, *new])) == {*old[4:], *new}

    await eventually(true_again)


async def test_leases_are_shown_in_redis_until_they_end(index: BlockIndex, server: RedisProcess) -> None:
    store, upkeep = make(index, 8)
    keys = fill(store, 8)
    store.lease("request-1", keys[:5], 60.0, 0.0)
    await upkeep.step(0.0)
    async with redis.asyncio.Redis.from_url(server.url) as client:
        assert await client.get("hr:kv:lease:store:request-1") == b"5"
        await upkeep.step(61.0)
        assert await client.get("hr:kv:lease:store:request-1") is None


async def test_a_store_that_leaves_is_no_place_any_more(index: BlockIndex) -> None:
    store, upkeep = make(index, 8)
    keys = fill(store, 8)
    await upkeep.step(0.0)
    assert await index.lookup(keys)
    async with asyncio.timeout(5):
        await upkeep.withdraw()
    assert await index.lookup(keys) == {}
