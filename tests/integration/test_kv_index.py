"""The index on a real server: what is recorded is found, what is dead is not, and a server that fails is a miss."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio
import structlog

from shared.blocks import BlockIndex, Holding
from shared.blocks.index import HEARTBEAT_TTL_S, KEYS_PER_CALL, RETRY_AFTER_S
from shared.protocol.blocks import Place
from tests.conftest import free_port
from tests.integration.kv_harness import RedisProcess, eventually


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def place(store: str) -> Place:
    return Place(store, "127.0.0.1", 1234, "tcp")


def holding(epoch: str = "e1", checksum: int = 7, last_use: float = 1.0) -> Holding:
    return Holding(epoch, 32, 4096, checksum, last_use)


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


async def test_blocks_of_live_stores_are_found_with_all_their_places(index: BlockIndex) -> None:
    for store in ("a", "b"):
        assert await index.beat(place(store), "e1") is False
        assert await index.record(store, [(key(n), holding(checksum=2**64 - 1)) for n in range(3 * KEYS_PER_CALL)])
    found = await index.lookup([key(n) for n in range(3 * KEYS_PER_CALL + 5)])
    assert set(found) == {key(n) for n in range(3 * KEYS_PER_CALL)}
    entry = found[key(5)]
    assert (entry.n_tokens, entry.n_bytes, entry.checksum) == (32, 4096, 2**64 - 1)
    assert entry.places == [place("a"), place("b")]


async def test_a_store_without_heartbeat_is_not_a_place(index: BlockIndex) -> None:
    await index.record("a", [(key(1), holding())])
    assert await index.lookup([key(1)]) == {}


async def test_a_silent_store_vanishes_within_seconds(index: BlockIndex, server: RedisProcess) -> None:
    await index.beat(place("a"), "e1")
    await index.record("a", [(key(1), holding())])
    assert await index.lookup([key(1)])

    async def gone() -> bool:
        return not await index.lookup([key(1)])

    await eventually(gone, HEARTBEAT_TTL_S + 5)


async def test_a_restarted_store_has_nothing_until_it_says_so(index: BlockIndex) -> None:
    await index.beat(place("a"), "e1")
    await index.record("a", [(key(1), holding("e1"))])
    assert await index.beat(place("a"), "e1") is True
    assert await index.beat(place("a"), "e2") is False
    assert await index.lookup([key(1)]) == {}
    await index.record("a", [(key(1), holding("e2"))])
    assert (await index.lookup([key(1)]))[key(1)].places == [place("a")]


async def test_forgetting_takes_one_store_out_and_leaves_the_others(index: BlockIndex) -> None:
    for store in ("a", "b"):
        await index.beat(place(store), "e1")
        await index.record(store, [(key(1), holding())])
    assert await index.forget("a", [key(1)])
    assert (await index.lookup([key(1)]))[key(1)].places == [place("b")]
    await index.withdraw("b")
    assert await index.lookup([key(1)]) == {}


async def test_copies_of_other_content_are_not_mixed(index: BlockIndex) -> None:
    for store, checksum, last_use in (("a", 1, 10.0), ("b", 2, 20.0), ("c", 2, 5.0)):
        await index.beat(place(store), "e1")
        await index.record(store, [(key(1), holding(checksum=checksum, last_use=last_use))])
    entry = (await index.lookup([key(1)]))[key(1)]
    assert entry.checksum == 2
    assert entry.places == [place("b"), place("c")]


async def test_leases_are_mirrored_and_expire(index: BlockIndex, server: RedisProcess) -> None:
    await index.mirror_lease("a", "request-1", 5, 100.0)
    async with redis.asyncio.Redis.from_url(server.url) as client:
        assert await client.get("hr:kv:lease:a:request-1") == b"5"
        assert 90_000 < await client.pttl("hr:kv:lease:a:request-1") <= 100_000
        await index.mirror_lease("a", "request-1", 0, 0.0)
        assert await client.get("hr:kv:lease:a:request-1") is None


async def test_scripts_survive_a_server_that_forgot_them(index: BlockIndex, server: RedisProcess) -> None:
    await index.beat(place("a"), "e1")
    async with redis.asyncio.Redis.from_url(server.url) as client:
        await client.script_flush()
    assert await index.record("a", [(key(1), holding())])
    assert await index.lookup([key(1)])


async def test_damaged_entries_are_misses(index: BlockIndex, server: RedisProcess) -> None:
    await index.beat(place("a"), "e1")
    await index.record("a", [(key(1), holding()), (key(2), holding())])
    async with redis.asyncio.Redis.from_url(server.url) as client:
        await client.hset("hr:kv:block:" + key(1).hex(), "a", b"\xff\x00garbage")
    assert set(await index.lookup([key(1), key(2)])) == {key(2)}
    assert index.available


async def test_a_dead_server_is_a_miss_logged_once_and_its_return_is_noticed(
    index: BlockIndex, server: RedisProcess
) -> None:
    await index.beat(place("a"), "e1")
    await index.record("a", [(key(1), holding())])
    server.kill()
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            async with asyncio.timeout(5):
                assert await index.lookup([key(1)]) == {}
                assert await index.record("a", [(key(1), holding())]) is False
                assert await index.beat(place("a"), "e1") is None
            assert not index.available
            await asyncio.sleep(RETRY_AFTER_S / 2)
        server.start()

        async def back() -> bool:
            return await index.beat(place("a"), "e1") is not None

        await eventually(back)
    assert [entry["event"] for entry in logs] == ["index_lost", "index_back"]
    assert index.available


async def test_a_server_that_hangs_is_a_miss_within_seconds(index: BlockIndex, server: RedisProcess) -> None:
    await index.beat(place("a"), "e1")
    server.signal(signal.SIGSTOP)
    async with asyncio.timeout(5):
        assert await index.lookup([key(1)]) == {}
        assert not index.available
        for _ in range(1000):
            await index.lookup([key(1)])  # at once: none of these waits for its own time-out
    server.signal(signal.SIGCONT)

    async def back() -> bool:
        await index.lookup([key(1)])
        return index.available

    await eventually(back)


async def test_no_server_at_all_is_a_miss(unused_port: int) -> None:
    index = BlockIndex(f"redis://127.0.0.1:{unused_port}/0")
    assert await index.lookup([key(1)]) == {}
    assert not index.available
    await index.close()


@pytest.fixture
def unused_port() -> int:
    return free_port()
