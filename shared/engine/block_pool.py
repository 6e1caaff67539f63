"""Which KV blocks are free and who holds the others. Pure bookkeeping: it never touches the blocks' memory."""

from __future__ import annotations

from collections import deque

from shared.engine.errors import OutOfBlocks


class BlockPool:
    """Hands out block ids `0 .. num_blocks-1`. Invariant: each id is either free or held by exactly one holder."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._held)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, all or none. The block freed longest ago goes first. Raises OutOfBlocks."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > len(self._free):
            raise OutOfBlocks(f"{count} KV blocks wanted, {len(self._free)} of {self.num_blocks} free")
        taken = [self._free.popleft() for _ in range(count)]
        self._held.update(taken)
        return taken

    def free(self, block_ids: list[int]) -> None:
        """Give blocks back. Raises ValueError, and changes nothing, when one of them is not held."""
        if len(set(block_ids)) != len(block_ids) or not self._held.issuperset(block_ids):
            raise ValueError(f"blocks {block_ids} are not all held: freed twice?")
        self._held.difference_update(block_ids)
        self._free.extend(block_ids)
