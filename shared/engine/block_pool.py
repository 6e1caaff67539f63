"""Which KV blocks are free, who holds the others, and which are worth keeping. Pure: it never touches their memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from shared.engine.errors import OutOfBlocks


class BlockPool:
    """Hands out block ids `0 .. num_blocks-1`, counts their holders, and is a cache of those with known content.

    Invariants:
    - Each id is in exactly one of three places: empty (no holder, no key), idle (no holder, a key) or held (one holder
      or more, with or without a key). So `num_free + num_used == num_blocks`, where idle ones count as free.
    - A key names one block and a block has one key at most.
    - A block with a key, or with several holders, is read only. Only `withdraw` makes it writable again.
    - Idle blocks are evicted only when no empty ones are left, the one given back longest ago first. Of the blocks that
      one holder gives back together the last goes first: a chain loses its tail before its head.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._empty: deque[int] = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be had now, cached ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and whose contents are kept until their room is needed."""
        return len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that have a key, held or not."""
        return len(self._block_of)

    # Holding

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for writing, all or none: empty ones before idle ones. Raises OutOfBlocks."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > self.num_free:
            raise OutOfBlocks(f"{count} KV blocks wanted, {self.num_free} of {self.num_blocks} free")
        taken = [self._empty.popleft() if self._empty else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Become one more holder of blocks that have a key. Raises ValueError, and changes nothing, if one has none."""
        if not all(block_id in self._key_of for block_id in block_ids):
            raise ValueError(f"blocks {block_ids} are not all cached and cannot be shared")
        for block_id in block_ids:
            self._idle.pop(block_id, None)
            self._holders[block_id] = self._holders.get(block_id, 0) + 1

    def free(self, block_ids: list[int]) -> None:
        """One holder gives its blocks back. Raises ValueError, and changes nothing, when one of them is not held."""
        if len(set(block_ids)) != len(block_ids) or not self._holders.keys() >= set(block_ids):
            raise ValueError(f"blocks {block_ids} are not all held: freed twice?")
        for block_id in reversed(block_ids):
            self._holders[block_id] -= 1
            if self._holders[block_id] == 0:
                del self._holders[block_id]
                if block_id in self._key_of:
                    self._idle[block_id] = None
                else:
                    self._empty.append(block_id)

    # Caching

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """The cached blocks of the first keys, up to the first that is not cached."""
        found: list[int] = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_idle(self, block_ids: Sequence[int]) -> int:
        """How many of these would leave the free ones if they were shared."""
        return sum(1 for block_id in block_ids if block_id in self._idle)

    def register(self, block_id: int, key: bytes) -> int:
        """Name the final content of a held block; returns the block that the cache has for the key.

        That is another one if the same content was registered before. Raises ValueError for a block that is not held or
        has another key.
        """
        if block_id not in self._holders or self._key_of.get(block_id, key) != key:
            raise ValueError(f"block {block_id} is not held, or has another key: its content was final before")
        first = self._block_of.setdefault(key, block_id)
        if first == block_id:
            self._key_of[block_id] = key
        return first

    def withdraw(self, block_id: int) -> bool:
        """Make a held block writable again: its key is forgotten. False, and no change, when others hold it too."""
        if self._holders[block_id] > 1:
            return False
        self._drop_key(block_id)
        return True

    def forget(self, block_ids: Sequence[int]) -> None:
        """Let nobody find these held blocks any more: what they hold is wrong. Raises ValueError if one is not held."""
        if not self._holders.keys() >= set(block_ids):
            raise ValueError(f"blocks {block_ids} are not all held")
        for block_id in block_ids:
            self._drop_key(block_id)

    def _evict(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        self._drop_key(block_id)
        return block_id

    def _drop_key(self, block_id: int) -> None:
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._block_of[key]
