"""The store's bookkeeping: which block lies in which slot, who leases it, what goes when room is needed.

Plain synchronous code, without I/O and without a clock: every call that depends on time is given it (`now_s`,
monotonic). Used by the server from the event loop only.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.kvstore.slabs import SlabPool, Slot
from shared.protocol.kv import BlockMeta, Stats, Verdict

MAX_CHANGES: Final = 65_536
"""Blocks that are gone and that the index has not been told of yet."""


@dataclass(slots=True, eq=False)
class Block:
    """A stored block. It may be evicted while `pins` (transfers that touch its bytes) and `leases` are both 0."""

    meta: BlockMeta
    slot: Slot
    last_use_s: float
    pins: int = 0
    leases: int = 0
    discarded: bool = False


@dataclass(slots=True, eq=False)
class Ticket:
    """A slot that is being written. Ends with exactly one `commit` or `roll_back`."""

    meta: BlockMeta
    slot: Slot


@dataclass(slots=True)
class _Lease:
    expires_s: float
    tenant: str
    rests_since_s: float
    """When somebody last put, leased or renewed under it, or `resting_leases` last named it."""
    keys: dict[bytes, None] = field(default_factory=dict)
    """In the order of the sequence."""


@dataclass(slots=True)
class Counts:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    refused_full: int = 0
    checksum_failures: int = 0


class BlockStore:
    """Blocks in slots, in order of use. `changes` and `lease_changes` say what the index has not been told yet.

    Of blocks that are used together, those of one sequence, the tail counts as used before the head: it is of no use
    without the head, so it is evicted first.
    """

    def __init__(self, pool: SlabPool, *, max_leases: int = 8192, max_lease_s: float = 3600.0) -> None:
        self._pool = pool
        self._max_leases = max_leases
        self._max_lease_s = max_lease_s
        self._blocks: dict[bytes, Block] = {}
        self._evictable: OrderedDict[bytes, Block] = OrderedDict()
        """The least recently used comes first."""
        self._evictable_of_slab: dict[int, int] = {}
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        """The one that rests longest comes first."""
        self._expiries: list[tuple[float, str]] = []
        self._used_bytes = 0
        self.counts = Counts()
        self.changes: dict[bytes, None] = {}
        self.lease_changes: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> list[bytes]:
        return list(self._blocks)

    def get(self, key: bytes) -> Block | None:
        """The block, without using it."""
        return self._blocks.get(key)

    def view(self, held: Block | Ticket) -> memoryview:
        """The bytes of a pinned block or of a slot that is being written."""
        return self._pool.view(held.slot, held.meta.n_bytes)

    def find(self, keys: Sequence[bytes], now_s: float) -> list[BlockMeta | None]:
        """What is here of a sequence's blocks. Counts as a use."""
        self._touch(keys, now_s)
        return [block.meta if (block := self._blocks.get(key)) else None for key in keys]

    # Reading

    def pin(self, wanted: Sequence[BlockMeta], now_s: float) -> list[Block | None]:
        """Hold the blocks in place while their bytes are read; each one that is not None ends with one `unpin`."""
        self._touch([meta.key for meta in wanted], now_s)
        pinned: list[Block | None] = []
        for meta in wanted:
            block = self._blocks.get(meta.key)
            if block is None or _content(block.meta) != _content(meta):
                self.counts.misses += 1
                pinned.append(None)
                continue
            self.counts.hits += 1
            block.pins += 1
            self._classify(block)
            pinned.append(block)
        return pinned

    def unpin(self, block: Block) -> None:
        block.pins -= 1
        if block.discarded and block.pins == 0:
            self._pool.give_back(block.slot)
        elif not block.discarded:
            self._classify(block)

    # Writing

    def begin_put(self, meta: BlockMeta, now_s: float) -> Ticket | Verdict:
        """A slot to write into, evicting for it; or `stored` (it is here), `full`, `refused` (larger than any slab)."""
        self.expire(now_s)
        block = self._blocks.get(meta.key)
        if block is not None and _content(block.meta) == _content(meta):
            self._touch([meta.key], now_s)
            return "stored"
        if not self._pool.fits(meta.n_bytes):
            return "refused"
        slot = self._pool.take(meta.n_bytes)
        if slot is None and self._make_room(meta.n_bytes):
            slot = self._pool.take(meta.n_bytes)
        if slot is None:
            self.counts.refused_full += 1
            return "full"
        self._used_bytes += slot.size
        return Ticket(meta, slot)

    def commit(self, ticket: Ticket, now_s: float) -> None:
        """The slot's bytes are complete and verified. Of two puts of one block the later one's slot is given back."""
        present = self._blocks.get(ticket.meta.key)
        if present is not None:
            if _content(present.meta) == _content(ticket.meta):
                self.roll_back(ticket)
                return
            self.discard(present)
        block = Block(ticket.meta, ticket.slot, now_s)
        self._blocks[ticket.meta.key] = block
        self._classify(block)
        self._note_change(ticket.meta.key)

    def roll_back(self, ticket: Ticket) -> None:
        self._used_bytes -= ticket.slot.size
        self._pool.give_back(ticket.slot)

    def discard(self, block: Block) -> None:
        """Forget a block at once, leased or not. A slot that is being read is given back after its last reader."""
        key = block.meta.key
        if self._blocks.get(key) is not block:
            return
        del self._blocks[key]
        block.discarded = True
        self._set_evictable(block, False)
        for lease in self._leases.values() if block.leases else ():
            lease.keys.pop(key, None)
        self._used_bytes -= block.slot.size
        if block.pins == 0:
            self._pool.give_back(block.slot)
        self._note_change(key)

    # Leases

    def lease(
        self, lease_id: str, keys: Sequence[bytes], lease_s: float, now_s: float, tenant: str = ""
    ) -> list[bool] | None:
        """Spare the blocks that are here until `lease_s` from now, beside those that the lease holds already.

        A lease that ends later stays as long as it is. One entry per key: whether it is held; no lease comes to be for
        none. None when there are too many leases. `tenant` is whose request it is, where it has a log.
        """
        self.expire(now_s)
        lease = self._leases.get(lease_id)
        if lease is None:
            if not any(key in self._blocks for key in keys):
                return [False] * len(keys)
            if len(self._leases) >= self._max_leases:
                return None
            lease = self._leases[lease_id] = _Lease(0.0, tenant, now_s)
        lease.tenant = lease.tenant or tenant
        expires_s = self._end_of(lease_s, now_s)
        if expires_s > lease.expires_s:
            self._set_end(lease_id, lease, expires_s)
        self._note_use(lease_id, lease, now_s)
        held = []
        for key in keys:
            block = self._blocks.get(key)
            held.append(block is not None)
            if block is not None and key not in lease.keys:
                lease.keys[key] = None
                block.leases += 1
                self._classify(block)
        return held

    def renew(self, lease_id: str, lease_s: float, now_s: float) -> bool:
        """Have the lease end `lease_s` from now, sooner or later than before. False when there is none (any more)."""
        self.expire(now_s)
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        self._set_end(lease_id, lease, self._end_of(lease_s, now_s))
        self._note_use(lease_id, lease, now_s)
        return True

    def release(self, lease_id: str, now_s: float) -> bool:
        """The blocks stay until their room is needed. False when there is no such lease (any more)."""
        self.expire(now_s)
        return self._drop_lease(lease_id)

    def tenant_of(self, lease_id: str) -> str:
        """Whose request a lease belongs to; empty when there is no such lease, or it has no log."""
        lease = self._leases.get(lease_id)
        return lease.tenant if lease else ""

    def resting_leases(self, rest_s: float, most: int, now_s: float) -> list[tuple[str, str]]:
        """Leases (id, tenant) that nobody used for `rest_s`, longest first. They begin to rest anew when named here."""
        resting = []
        for _ in range(min(most, len(self._leases))):
            lease_id, lease = next(iter(self._leases.items()))
            if now_s - lease.rests_since_s < rest_s:
                break
            self._note_use(lease_id, lease, now_s)
            if lease.tenant:
                resting.append((lease_id, lease.tenant))
        return resting

    def lease_left_s(self, lease_id: str, now_s: float) -> tuple[int, float]:
        """Blocks and seconds left of a lease; zeros when it is over."""
        lease = self._leases.get(lease_id)
        return (len(lease.keys), max(0.0, lease.expires_s - now_s)) if lease else (0, 0.0)

    def expire(self, now_s: float) -> None:
        """End the leases whose time is over. Done by every call that could depend on it, and cheap."""
        while self._expiries and self._expiries[0][0] <= now_s:
            expires_s, lease_id = heapq.heappop(self._expiries)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_s <= expires_s:
                self._drop_lease(lease_id)

    def stats(self) -> Stats:
        return Stats(
            slots=self._pool.slots(),
            blocks=len(self._blocks),
            evictable=len(self._evictable),
            leases=len(self._leases),
            capacity_bytes=self._pool.capacity_bytes,
            used_bytes=self._used_bytes,
            hits=self.counts.hits,
            misses=self.counts.misses,
            evictions=self.counts.evictions,
            refused_full=self.counts.refused_full,
            checksum_failures=self.counts.checksum_failures,
        )

    def _touch(self, keys: Sequence[bytes], now_s: float) -> None:
        for key in reversed(keys):
            block = self._blocks.get(key)
            if block is not None:
                block.last_use_s = now_s
                if key in self._evictable:
                    self._evictable.move_to_end(key)

    def _classify(self, block: Block) -> None:
        self._set_evictable(block, block.pins == 0 and block.leases == 0)

    def _set_evictable(self, block: Block, evictable: bool) -> None:
        key, slab = block.meta.key, block.slot.slab
        if evictable == (self._evictable.get(key) is block):
            return
        if evictable:
            self._evictable[key] = block
        else:
            del self._evictable[key]
        self._evictable_of_slab[slab] = self._evictable_of_slab.get(slab, 0) + (1 if evictable else -1)

    def _make_room(self, n_bytes: int) -> bool:
        """Evict the least recently used block of this size; or a slab of another size that is older, all of it."""
        size = self._pool.size_for(n_bytes)
        skipped: set[int] = set()
        for block in self._evictable.values():
            if block.slot.size == size:
                self._evict(block)
                return True
            slab = block.slot.slab
            if slab in skipped:
                continue
            if self._evictable_of_slab[slab] == self._pool.used(slab):
                for other in [b for b in self._evictable.values() if b.slot.slab == slab]:
                    self._evict(other)
                return True
            skipped.add(slab)
        return False

    def _evict(self, block: Block) -> None:
        self.counts.evictions += 1
        self.discard(block)

    def _end_of(self, lease_s: float, now_s: float) -> float:
        return now_s + min(max(lease_s, 0.0), self._max_lease_s)

    def _set_end(self, lease_id: str, lease: _Lease, expires_s: float) -> None:
        lease.expires_s = expires_s
        heapq.heappush(self._expiries, (expires_s, lease_id))
        self._note_lease_change(lease_id)
        if len(self._expiries) > 4 * len(self._leases) + 64:
            self._expiries = [(known.expires_s, name) for name, known in self._leases.items()]
            heapq.heapify(self._expiries)

    def _note_use(self, lease_id: str, lease: _Lease, now_s: float) -> None:
        lease.rests_since_s = now_s
        self._leases.move_to_end(lease_id)

    def _drop_lease(self, lease_id: str) -> bool:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        for key in reversed(lease.keys):
            block = self._blocks[key]
            block.leases -= 1
            self._classify(block)
        self._note_lease_change(lease_id)
        return True

    def _note_change(self, key: bytes) -> None:
        """Bounded: after long without an index, blocks that are gone need not be told of; their entries expire."""
        self.changes[key] = None
        if len(self.changes) > MAX_CHANGES + len(self._blocks):
            self.changes = dict.fromkeys(self._blocks)

    def _note_lease_change(self, lease_id: str) -> None:
        self.lease_changes[lease_id] = None
        if len(self.lease_changes) > 2 * self._max_leases:
            self.lease_changes = dict.fromkeys(self._leases)


def _content(meta: BlockMeta) -> tuple[int, int]:
    return meta.n_bytes, meta.checksum
