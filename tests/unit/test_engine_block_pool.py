"""The block pool never loses a block, never hands one out twice, and refuses what it cannot do without changing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.engine.block_pool import BlockPool
from shared.engine.errors import OutOfBlocks
from shared.engine.prefix_keys import extend_keys

NUM_BLOCKS = 12
KEYS = [bytes([i]) for i in range(9)]


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: each holder's blocks, who has which key, and the idle blocks in the order of their eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []
        self.named: dict[bytes, int] = {}
        self.idle: list[int] = []

    @property
    def counts(self) -> Counter[int]:
        return Counter(b for blocks in self.holders for b in blocks)

    def one_held(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.counts)))

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> None:
        held = self.counts
        free = NUM_BLOCKS - len(held)
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & set(held)
        evicted = max(count - (free - len(self.idle)), 0)
        assert {b for b in blocks if b in self.idle} == set(self.idle[:evicted])
        del self.idle[:evicted]
        self.named = {key: b for key, b in self.named.items() if b not in blocks}
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(blocks)
        left = self.counts
        self.idle += [b for b in reversed(blocks) if b not in left and b in self.named.values()]

    @precondition(lambda self: self.counts)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def register(self, data: st.DataObject, key: bytes) -> None:
        block = self.one_held(data)
        if any(b == block and k != key for k, b in self.named.items()):
            with pytest.raises(ValueError, match="another key"):
                self.pool.register(block, key)
            return
        assert self.pool.register(block, key) == self.named.setdefault(key, block)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5, unique=True))
    def look_up_and_share(self, keys: list[bytes]) -> None:
        found = self.pool.lookup(keys)
        assert found == [self.named[k] for k in keys[: len(found)]]
        assert len(found) == len(keys) or keys[len(found)] not in self.named
        assert self.pool.count_idle(found) == len(set(found) & set(self.idle))
        self.pool.share(found)
        self.idle = [b for b in self.idle if b not in found]
        self.holders.append(found)

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        block = self.one_held(data)
        alone = self.counts[block] == 1
        assert self.pool.withdraw(block) == alone
        if alone:
            self.named = {key: b for key, b in self.named.items() if b != block}

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks = self.holders[data.draw(st.integers(0, len(self.holders) - 1))]
        self.pool.forget(blocks)
        self.named = {key: b for key, b in self.named.items() if b not in blocks}

    @precondition(lambda self: len(self.counts) < NUM_BLOCKS)
    @rule()
    def what_is_not_held_or_has_no_key_is_refused_as_a_whole(self) -> None:
        held, named = sorted(self.counts), set(self.named.values())
        stranger = next(b for b in range(NUM_BLOCKS) if b not in held)
        for blocks in ([stranger], [*held[:1], stranger], held[:1] * 2):
            if blocks:
                with pytest.raises(ValueError, match="not all held"):
                    self.pool.free(blocks)
        with pytest.raises(ValueError, match="not all held"):
            self.pool.forget([*held[:1], stranger])
        with pytest.raises(ValueError, match="not held"):
            self.pool.register(stranger, b"x")
        nameless = [b for b in range(NUM_BLOCKS) if b not in named]
        if nameless:
            with pytest.raises(ValueError, match="not all cached"):
                self.pool.share([*named, nameless[0]])

    @invariant()
    def every_block_is_in_one_place_and_its_holders_are_counted(self) -> None:
        held = self.counts
        assert self.pool._holders == held
        assert list(self.pool._idle) == self.idle
        assert sorted([*self.pool._empty, *self.idle, *held]) == list(range(NUM_BLOCKS))
        assert self.pool._block_of == self.named
        assert (self.pool.num_used, self.pool.num_free) == (len(held), NUM_BLOCKS - len(held))
        assert self.pool.num_cached == len(self.named)


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


def test_ten_thousand_operations_lose_no_block() -> None:
    pool = BlockPool(7)
    held: list[list[int]] = []
    for i in range(10_000):
        if held and (i * 7919) % 5 < 2:
            pool.free(held.pop((i * 104729) % len(held)))
        elif pool.num_free:
            held.append(pool.allocate(1 + (i * 31) % pool.num_free))
            pool.register(held[-1][0], bytes([i % 11]))
    for blocks in held:
        pool.free(blocks)
    assert sorted(pool.allocate(7)) == list(range(7))


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def keys_of(salt: str, token_ids: list[int], block_tokens: int = 4) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, salt, token_ids, block_tokens, len(token_ids) // block_tokens)
    return keys


def test_a_key_says_all_tokens_up_to_the_end_of_its_block_and_the_salt() -> None:
    text = list(range(16))
    keys = keys_of("a", text)
    assert len(set(keys)) == 4
    for position in range(16):
        other = [*text[:position], 99, *text[position + 1 :]]
        same = [a == b for a, b in zip(keys, keys_of("a", other), strict=True)]
        assert same == [block < position // 4 for block in range(4)]
    assert not set(keys) & set(keys_of("b", text))
    assert not set(keys) & set(keys_of("a", text, 8))
    assert not set(keys[1:]) & set(keys_of("a", text[4:]))


def test_keys_made_bit_by_bit_are_those_made_at_once() -> None:
    text, keys = list(range(40)), []
    for count in (0, 1, 1, 5, 10):
        extend_keys(keys, "a", text[: 4 * count], 4, count)
    assert keys == keys_of("a", text)
