"""Workers' client against real KV stores, over both transports, with everything around them failing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import pytest_asyncio
import redis.asyncio
from prometheus_client import CollectorRegistry

from shared.blocks import BlockIndex, BlockKey, KVClient, block_keys, checksum, exchange
from shared.bus import Bus
from shared.protocol.blocks import BlockRef, Place
from shared.protocol.kv import BlockMeta, Put, Verdicts, decode_reply, encode_kv
from shared.telemetry.metrics import KVTransferMetrics
from shared.transport import PeerRefused, Transport, pick_transport
from tests.integration.kv_harness import BLOCK_BYTES, SECRET, RedisProcess, StoreProcess, eventually

Block = tuple[BlockKey, np.ndarray, int]


@pytest.fixture(scope="module", params=["tcp", "ucx"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def transport(kind: str) -> AsyncIterator[Transport]:
    made = pick_transport("ucx" if kind == "ucx" else "tcp")
    yield made
    await made.close()


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path_factory.mktemp("kv-redis")).start()
    yield process
    process.kill()


class Stand:
    """One test's stores and client. Stores started here end here."""

    def __init__(self, kind: str, transport: Transport, nats_url: str, server: RedisProcess) -> None:
        self.kind = kind
        self.transport = transport
        self.nats_url = nats_url
        self.redis = server
        self.index = BlockIndex(server.url)
        self.stores: list[StoreProcess] = []
        self.metrics = KVTransferMetrics(CollectorRegistry())
        self.client = KVClient(
            lambda: [store.place for store in self.stores],
            transport,
            SECRET,
            self.index,
            stage="test",
            metrics=self.metrics,
        )
        self.blind = KVClient(lambda: [store.place for store in self.stores], transport, SECRET, None)

    def store(self, blocks: int = 64, **extra: str) -> StoreProcess:
        store = StoreProcess(
            f"store-{len(self.stores)}", self.kind, self.nats_url, self.redis.url, blocks=blocks, **extra
        )
        self.stores.append(store.start())
        return store

    async def close(self) -> None:
        self.client.close()
        self.blind.close()
        await self.index.close()
        for store in self.stores:
            store.kill()


@pytest_asyncio.fixture
async def stand(kind: str, transport: Transport, nats_url: str, own_redis: RedisProcess) -> AsyncIterator[Stand]:
    async with redis.asyncio.Redis.from_url(own_redis.url) as client:
        await client.flushall()
    made = Stand(kind, transport, nats_url, own_redis)
    yield made
    await made.close()


def blocks(count: int, salt: str = "", size: int = BLOCK_BYTES) -> list[Block]:
    rng = np.random.default_rng(abs(hash(salt)) % 2**32)
    keys = block_keys("layout", salt, range(count * 32), 32)
    data = [rng.integers(0, 256, size, dtype=np.uint8) for _ in keys]
    return [(key, block, checksum(block)) for key, block in zip(keys, data, strict=True)]


def empty(refs: list[BlockRef]) -> list[np.ndarray]:
    return [np.zeros(ref.n_bytes, np.uint8) for ref in refs]


def equal(sent: list[Block], got: list[np.ndarray]) -> bool:
    return all(np.array_equal(block, other) for (_, block, _), other in zip(sent, got, strict=True))


async def damage(stand: Stand, store: StoreProcess, refs: list[BlockRef]) -> None:
    """Flip a byte of each block in the memory of one store."""
    connection = await stand.transport.connect("127.0.0.1", store.port, SECRET.encode(), 5)
    for ref in refs:
        assert await exchange.corrupt_block(connection, ref.key)
    connection.close()


async def put_all(client: KVClient, sent: list[Block], lease_id: str = "", lease_s: float = 0.0) -> list[BlockRef]:
    refs = await client.put(lease_id, lease_s, sent)
    assert all(ref.places for ref in refs)
    return refs


@pytest.mark.parametrize(
    ("count", "size"), [(1, BLOCK_BYTES), (60, BLOCK_BYTES), (300, 4096), (3, 1000), (2, 1_474_560)]
)
async def test_blocks_come_back_bit_for_bit(stand: Stand, count: int, size: int) -> None:
    stand.store()
    sent = blocks(count, "round trip", size)
    refs = await put_all(stand.client, sent)
    into = empty(refs)
    assert await stand.client.get(refs, into, timeout_s=10) == [True] * count
    assert equal(sent, into)


async def test_blocks_are_found_through_the_index_and_without_it(stand: Stand) -> None:
    stand.store()
    sent = blocks(5, "found")
    await put_all(stand.client, sent)
    keys = [key.key for key, _, _ in sent]

    async def indexed() -> bool:
        return len(await stand.index.lookup(keys)) == len(keys)

    await eventually(indexed)
    for client in (stand.client, stand.blind):
        refs = await client.find([*keys, bytes(16)])
        assert refs[-1] is None
        for ref, (key, _, check) in zip(refs[:-1], sent, strict=True):
            assert ref == BlockRef(key.key, key.n_tokens, BLOCK_BYTES, check, [stand.stores[0].place])


async def test_a_block_that_is_there_is_not_sent_again(stand: Stand) -> None:
    stand.store()
    sent = blocks(4, "twice")
    await put_all(stand.client, sent)
    damaged = [(key, np.zeros_like(block), check) for key, block, check in sent]
    refs = await put_all(stand.client, damaged)
    into = empty(refs)
    assert all(await stand.client.get(refs, into, timeout_s=10))
    assert equal(sent, into)


async def test_a_client_with_another_secret_gets_nothing(stand: Stand) -> None:
    store = stand.store()
    refs = await put_all(stand.client, blocks(1, "secret"))
    stranger = KVClient(lambda: [store.place], stand.transport, "wrong", None)
    assert await stranger.get(refs, empty(refs), timeout_s=5) == [False]
    assert await stranger.find([refs[0].key]) == [None]
    assert (await stranger.put("", 0, blocks(1, "other")))[0].places == []
    assert await stranger.stats(store.place) is None
    stranger.close()


async def test_a_flipped_byte_is_a_miss_and_the_bad_copy_is_dropped(stand: Stand) -> None:
    store = stand.store(HEADRACE_STORE_FAULT_INJECTION="true")
    sent = blocks(3, "flip")
    refs = await put_all(stand.client, sent)
    await damage(stand, store, refs[1:2])
    assert await stand.client.get(refs, empty(refs), timeout_s=10) == [True, False, True]
    assert stand.metrics.blocks_checksum_failed._value.get() == 1
    assert await stand.blind.find([ref.key for ref in refs]) == [refs[0], None, refs[2]]
    await put_all(stand.client, sent)
    into = empty(refs)
    assert all(await stand.client.get(refs, into, timeout_s=10))
    assert equal(sent, into)


async def test_copies_that_were_damaged_are_dropped_at_every_store_and_good_ones_stay(stand: Stand) -> None:
    stores = [stand.store(HEADRACE_STORE_FAULT_INJECTION="true") for _ in range(4)]
    sent = blocks(3, "everywhere")
    for store in stores:
        alone = KVClient(lambda store=store: [store.place], stand.transport, SECRET, None)  # type: ignore[misc]
        await put_all(alone, sent)
        alone.close()
    known = [ref for ref in await stand.blind.find([key.key for key, _, _ in sent]) if ref is not None]
    assert [ref.places for ref in known] == [[store.place for store in stores]] * 3
    for store in stores[:3]:  # more than are tried
        await damage(stand, store, known[:2])
    assert await stand.client.get(known, empty(known), timeout_s=10) == [False, False, True]
    left = [ref.places if ref else [] for ref in await stand.blind.find([ref.key for ref in known])]
    assert left == [[stores[3].place], [stores[3].place], [store.place for store in stores]]
    now_found = [BlockRef(ref.key, 32, BLOCK_BYTES, ref.checksum, [stores[3].place]) for ref in known]
    into = empty(known)
    assert all(await stand.client.get(now_found, into, timeout_s=10))
    assert equal(sent, into)


async def test_bytes_that_change_on_the_way_are_a_miss_and_the_good_copy_stays(stand: Stand) -> None:
    if stand.kind == "ucx":
        pytest.skip("the proxy that changes them is on the TCP connection")
    store = stand.store()
    sent = blocks(3, "on the way")
    refs = await put_all(stand.client, sent)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flip_at: int) -> None:
        passed = 0
        while data := bytearray(await reader.read(4096)):
            if passed <= flip_at < passed + len(data):
                data[flip_at - passed] ^= 1
            passed += len(data)
            writer.write(data)
        writer.close()

    connections = 0

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", store.port)
        flip_at = BLOCK_BYTES + BLOCK_BYTES // 2 if connections == 1 else sys.maxsize  # inside the second block
        await asyncio.gather(pump(reader, up_writer, sys.maxsize), pump(up_reader, writer, flip_at))

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        through = [
            BlockRef(r.key, 32, BLOCK_BYTES, r.checksum, [Place("proxy", "127.0.0.1", port, "tcp")]) for r in refs
        ]
        assert await stand.client.get(through, empty(refs), timeout_s=5) == [True, False, True]
        assert stand.metrics.blocks_checksum_failed._value.get() == 1
        into = empty(refs)
        assert all(await stand.client.get(through, into, timeout_s=5))
        assert equal(sent, into)
        stand.client.close()


async def test_a_block_of_another_size_or_content_than_asked_for_is_a_miss(stand: Stand) -> None:
    store = stand.store()
    (ref,) = await put_all(stand.client, blocks(1, "size"))
    others = [
        BlockRef(ref.key, 32, ref.n_bytes - 1, ref.checksum, ref.places),
        BlockRef(ref.key, 32, ref.n_bytes, ref.checksum ^ 1, ref.places),
    ]
    into = empty(others)
    assert await stand.client.get(others, into, timeout_s=5) == [False, False]
    for size in (ref.n_bytes - 1, ref.n_bytes + 1):
        assert await stand.client.get([ref], [bytearray(size)], timeout_s=5) == [False]
    assert not any(buffer.any() for buffer in into)
    assert (await stand.blind.find([ref.key]))[0] == ref
    stats = await stand.client.stats(store.place)
    assert stats is not None
    assert stats.checksum_failures == 0


async def test_faults_cannot_be_injected_without_the_setting(stand: Stand) -> None:
    store = stand.store()
    refs = await put_all(stand.client, blocks(1, "no flip"))
    connection = await stand.transport.connect("127.0.0.1", store.port, SECRET.encode(), 5)
    with pytest.raises(PeerRefused, match="fault injection"):
        await exchange.corrupt_block(connection, refs[0].key)
    connection.close()
    assert await stand.client.get(refs, empty(refs), timeout_s=10) == [True]


async def test_a_block_that_is_not_what_was_announced_is_not_kept(stand: Stand) -> None:
    stand.store()
    ((key, block, check),) = blocks(1, "liar")
    (ref,) = await stand.client.put("", 0, [(key, block, check ^ 1)])
    assert ref.places == []
    assert await stand.blind.find([key.key]) == [None]


async def test_a_full_store_refuses_spares_leased_blocks_and_takes_again_when_they_are_released(stand: Stand) -> None:
    store = stand.store(blocks=8)
    held = blocks(6, "held")
    refs = await put_all(stand.client, held, "request-1", 60)
    await put_all(stand.client, blocks(2, "free"))
    more = await stand.client.put("request-2", 60, blocks(4, "more"))
    assert [bool(ref.places) for ref in more] == [True, True, False, False]
    into = empty(refs)
    assert all(await stand.client.get(refs, into, timeout_s=10))
    assert equal(held, into)
    await stand.client.release("request-1")
    await put_all(stand.client, blocks(4, "more"), "request-2", 60)
    stats = await stand.client.stats(store.place)
    assert stats is not None
    assert (stats.slots, stats.blocks, stats.leases) == (8, 8, 1)


async def test_a_lease_that_nobody_renews_ends_by_itself(stand: Stand) -> None:
    store = stand.store(blocks=4)
    refs = await put_all(stand.client, blocks(4, "short"), "request-1", 1.0)
    assert not (await stand.client.put("", 0, blocks(1, "next")))[0].places

    async def expired() -> bool:
        stats = await stand.client.stats(store.place)
        return stats is not None and stats.leases == 0

    await eventually(expired)
    assert await stand.client.renew("request-1", 10) == [store.place]
    await put_all(stand.client, blocks(1, "next"))
    assert await stand.client.lease("request-2", [ref.key for ref in refs], 10) == [True, True, True, False]


async def test_a_renewed_lease_outlives_its_first_term(stand: Stand) -> None:
    stand.store(blocks=4)
    await put_all(stand.client, blocks(4, "long"), "request-1", 1.0)
    assert await stand.client.renew("request-1", 60.0) == []
    await asyncio.sleep(1.5)
    assert not (await stand.client.put("", 0, blocks(1, "next")))[0].places


async def test_a_put_that_breaks_off_leaves_nothing_behind(stand: Stand) -> None:
    store = stand.store(blocks=8)
    sent = blocks(8, "broken")
    connection = await stand.transport.connect("127.0.0.1", store.port, SECRET.encode(), 5)
    metas = [BlockMeta(key.key, key.n_tokens, BLOCK_BYTES, check) for key, _, check in sent]
    await connection.send_header(encode_kv(Put(metas, "request-1", 60.0)))
    assert decode_reply(await connection.receive_header()) == Verdicts(["want"] * 8)
    await connection.send_buffers([block for _, block, _ in sent[:5]])
    connection.close()

    async def rolled_back() -> bool:
        stats = await stand.client.stats(store.place)
        return stats is not None and (stats.used_bytes, stats.blocks, stats.leases) == (0, 0, 0)

    await eventually(rolled_back)
    await put_all(stand.client, sent)


async def test_a_store_killed_in_the_middle_gives_misses_and_missing_places(stand: Stand) -> None:
    store = stand.store(blocks=1024)
    sent = blocks(40, "killed", 1_474_560)
    refs = await put_all(stand.client, sent)
    into = empty(refs)

    async def keep_getting() -> list[bool]:
        while True:
            hits = await stand.client.get(refs, into, timeout_s=10)
            if not all(hits):
                return hits

    getting = asyncio.create_task(keep_getting())
    await asyncio.sleep(0.2)
    store.kill()
    async with asyncio.timeout(8):
        hits = await getting
    for hit, (_, block, _), got in zip(hits, sent, into, strict=True):
        assert not hit or np.array_equal(block, got)
    async with asyncio.timeout(8):
        assert await stand.client.get(refs, into, timeout_s=5) == [False] * 40
        assert all(ref.places == [] for ref in await stand.client.put("r", 5, sent))
        assert await stand.client.lease("r", [ref.key for ref in refs], 5) == [False] * 40
        assert await stand.client.renew("r", 5) == [], "a store that is away has not said that it lost the lease"
        await stand.client.release("r")


async def test_a_stopped_store_is_a_miss_in_time_and_never_writes_later(stand: Stand) -> None:
    store = stand.store()
    sent = blocks(20, "stopped")
    refs = await put_all(stand.client, sent)
    into = empty(refs)
    store.signal(signal.SIGSTOP)
    async with asyncio.timeout(6):
        assert await stand.client.get(refs, into, timeout_s=1.0) == [False] * 20
    for buffer in into:
        buffer[:] = 0xEE
    store.signal(signal.SIGCONT)
    await asyncio.sleep(1.0)
    assert all((buffer == 0xEE).all() for buffer in into)

    async def works_again() -> bool:
        return all(await stand.client.get(refs, into, timeout_s=5))

    await eventually(works_again)
    assert equal(sent, into)


async def test_transfers_cut_off_at_any_moment_lose_no_slot_and_leave_nothing_pinned(stand: Stand) -> None:
    store = stand.store(blocks=23 * 40)
    refs = await put_all(stand.client, blocks(20, "lasting", 1_474_560))
    into = empty(refs)
    rng = random.Random(0)
    for n in range(40):
        fresh = blocks(20, f"cut {n}", 1_474_560)
        work = asyncio.gather(
            stand.client.get(refs, into, timeout_s=10), stand.client.put("", 0.0, fresh), return_exceptions=True
        )
        await asyncio.sleep(rng.random() * 0.04)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def at_rest() -> bool:
        stats = await stand.client.stats(store.place)
        return stats is not None and stats.evictable == stats.blocks and stats.used_bytes == stats.blocks * 1_474_560

    await eventually(at_rest)
    last = blocks(35, "last", 1_474_560)
    refs = await put_all(stand.client, last)
    into = empty(refs)
    assert all(await stand.client.get(refs, into, timeout_s=10))
    assert equal(last, into)


async def test_an_emptied_redis_is_filled_again_within_seconds(stand: Stand) -> None:
    stand.store(blocks=512)
    sent = blocks(400, "rebuilt", 4096)
    await put_all(stand.client, sent)
    keys = [key.key for key, _, _ in sent]

    async def indexed() -> bool:
        return len(await stand.index.lookup(keys)) == len(keys)

    await eventually(indexed)
    async with redis.asyncio.Redis.from_url(stand.redis.url) as client:
        await client.flushall()
    await eventually(indexed, within_s=5)


async def test_blocks_that_were_evicted_leave_the_index(stand: Stand) -> None:
    stand.store(blocks=4)
    old = blocks(4, "old")
    await put_all(stand.client, old)
    await put_all(stand.client, blocks(4, "new"))

    async def gone() -> bool:
        return stand.index.available and not await stand.index.lookup([key.key for key, _, _ in old])

    await eventually(gone)


async def test_a_dead_redis_costs_nothing_but_the_index(stand: Stand) -> None:
    stand.store()
    sent = blocks(3, "no redis")
    stand.redis.kill()
    try:
        refs = await put_all(stand.client, sent)
        assert await stand.client.find([ref.key for ref in refs]) == refs
        assert all(await stand.client.get(refs, empty(refs), timeout_s=5))
    finally:
        stand.redis.start()

    async def indexed() -> bool:
        return len(await stand.index.lookup([ref.key for ref in refs])) == 3

    await eventually(indexed)


async def test_several_stores_share_the_blocks_and_losing_one_loses_only_its_own(stand: Stand) -> None:
    first, second = stand.store(), stand.store()
    sent = blocks(40, "shared")
    refs = await put_all(stand.client, sent, "request-1", 60)
    on_first = [ref.places == [first.place] for ref in refs]
    assert 5 < sum(on_first) < 35
    into = empty(refs)
    assert all(await stand.client.get(refs, into, timeout_s=10))
    assert equal(sent, into)
    assert all(await stand.client.lease("request-2", [ref.key for ref in refs], 60))
    first.kill()
    assert await stand.client.get(refs, empty(refs), timeout_s=5) == [not lost for lost in on_first]
    again = await put_all(stand.client, sent)
    assert all(ref.places == [second.place] for ref in again)


async def test_what_the_first_store_refuses_goes_to_the_next(stand: Stand) -> None:
    stand.store(blocks=8)
    stand.store(blocks=64)
    await put_all(stand.client, blocks(40, "overflow"), "request-1", 60)


async def test_the_store_announces_itself_and_leaves_in_order(stand: Stand) -> None:
    store = stand.store(blocks=16)
    async with await Bus.connect(stand.nats_url, name="test") as bus:

        async def announced() -> bool:
            return any(s.place == store.place and s.state == "ready" for s in bus.statuses.live("kvstore"))

        await eventually(announced)
        refs = await put_all(stand.client, blocks(4, "leaving"), "request-1", 60)

        async def counted() -> bool:
            mine = [s for s in bus.statuses.live("kvstore") if s.place == store.place]
            return bool(mine) and (mine[0].blocks_used, mine[0].blocks_total, mine[0].leases) == (4, 16, 1)

        await eventually(counted)

        async def indexed() -> bool:
            return len(await stand.index.lookup([ref.key for ref in refs])) == 4

        await eventually(indexed)
        (status,) = [s for s in bus.statuses.live("kvstore") if s.place == store.place]
        assert status.transport.startswith(stand.kind)
    assert await asyncio.to_thread(store.stop) == 0
    assert await stand.index.lookup([ref.key for ref in refs]) == {}


async def test_transfers_are_counted(stand: Stand) -> None:
    stand.store()
    refs = await put_all(stand.client, blocks(3, "counted"))
    await stand.client.get(
        [*refs, BlockRef(bytes(16), 32, BLOCK_BYTES, 0, refs[0].places)], empty([*refs, refs[0]]), timeout_s=5
    )
    assert stand.metrics.blocks_hit._value.get() == 3
    assert stand.metrics.blocks_miss._value.get() == 1
