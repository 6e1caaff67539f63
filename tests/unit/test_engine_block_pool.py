"""The block pool never loses a block, never hands one out twice, and refuses what it cannot do without changing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.engine.block_pool import BlockPool
from shared.engine.errors import OutOfBlocks

NUM_BLOCKS = 12


class PoolAgainstModel(RuleBasedStateMachine):
    """The model is a list of holders, each with the blocks that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []

    @property
    def held(self) -> list[int]:
        return [b for blocks in self.holders for b in blocks]

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> None:
        free = NUM_BLOCKS - len(self.held)
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
        else:
            blocks = self.pool.allocate(count)
            assert len(blocks) == count
            assert not set(blocks) & set(self.held)
            self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @precondition(lambda self: len(self.held) < NUM_BLOCKS)
    @rule()
    def freeing_what_is_not_held_is_refused_as_a_whole(self) -> None:
        stranger = next(b for b in range(NUM_BLOCKS) if b not in self.held)
        for blocks in ([stranger], [*self.held[:1], stranger], [*self.held[:1], *self.held[:1]][: 2 * len(self.held)]):
            if len(blocks) > 1 or blocks == [stranger]:
                with pytest.raises(ValueError, match="not all held"):
                    self.pool.free(blocks)

    @invariant()
    def every_block_is_free_or_held_by_one(self) -> None:
        assert len(self.held) == len(set(self.held))
        assert set(self.held) <= set(range(NUM_BLOCKS))
        assert self.pool.num_used == len(self.held)
        assert self.pool.num_free == NUM_BLOCKS - len(self.held)


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
    for blocks in held:
        pool.free(blocks)
    assert sorted(pool.allocate(7)) == list(range(7))


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
