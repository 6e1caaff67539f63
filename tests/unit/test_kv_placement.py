"""Placement of blocks on stores, and the order in which places are tried."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import ranked
from shared.blocks.spread import MAX_TRIES, spread
from shared.protocol.blocks import Place
from shared.protocol.kv import MAX_BLOCKS


def places(count: int) -> list[Place]:
    return [Place(f"store-{n}", "127.0.0.1", 1000 + n, "tcp") for n in range(count)]


def keys(count: int) -> list[bytes]:
    rng = random.Random(0)
    return [rng.randbytes(16) for _ in range(count)]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_blocks_are_spread_evenly(count: int) -> None:
    shares = Counter(ranked(key, places(count))[0] for key in keys(4000))
    assert len(shares) == count
    assert all(0.85 < share * count / 4000 < 1.15 for share in shares.values())


def test_a_new_store_takes_only_its_own_share() -> None:
    before, after = places(4), places(5)
    moved = 0
    for key in keys(4000):
        old, new = ranked(key, before)[0], ranked(key, after)[0]
        if old != new:
            assert new == after[-1]
            moved += 1
    assert 0.15 < moved / 4000 < 0.25


@given(st.binary(min_size=16, max_size=16), st.permutations(places(6)))
def test_the_order_of_the_list_does_not_matter(key: bytes, shuffled: list[Place]) -> None:
    assert ranked(key, shuffled) == ranked(key, places(6))


def test_a_store_that_moved_to_another_port_keeps_its_blocks() -> None:
    moved = [Place(p.store, p.host, p.port + 1, "ucx") for p in places(4)]
    for key in keys(100):
        assert ranked(key, places(4))[0].store == ranked(key, moved)[0].store


async def test_each_item_goes_to_its_first_place_and_failed_ones_to_the_next() -> None:
    first, second, third = places(3)
    calls: list[tuple[Place, list[int]]] = []

    async def move(place: Place, items: list[int]) -> list[bool]:
        calls.append((place, items))
        return [place != first or item % 2 == 0 for item in items]

    done = await spread(range(4), lambda _: [first, second, third], move)
    assert done == {0: first, 2: first, 1: second, 3: second}
    assert calls == [(first, [0, 1, 2, 3]), (second, [1, 3])]


async def test_an_item_is_tried_at_few_places_and_never_twice_at_one() -> None:
    tried: list[Place] = []

    async def move(place: Place, items: list[int]) -> list[bool]:
        tried.append(place)
        return [False] * len(items)

    assert await spread([0], lambda _: places(9), move) == {}
    assert tried == places(9)[:MAX_TRIES]


async def test_no_exchange_has_more_blocks_than_the_protocol_allows() -> None:
    sizes: list[int] = []

    async def move(_: Place, items: list[int]) -> list[bool]:
        sizes.append(len(items))
        return [True] * len(items)

    done = await spread(range(2 * MAX_BLOCKS + 1), lambda _: places(1), move)
    assert len(done) == sum(sizes) == 2 * MAX_BLOCKS + 1
    assert max(sizes) <= MAX_BLOCKS


async def test_places_are_served_at_the_same_time() -> None:
    both = asyncio.Barrier(2)

    async def move(_: Place, items: list[int]) -> list[bool]:
        async with asyncio.timeout(5):
            await both.wait()
        return [True] * len(items)

    assert len(await spread([0, 1], lambda item: [places(2)[item]], move)) == 2
