"""Keeps the index true to the store: heartbeat, changes as they come, everything again after Redis lost it.

The store never waits for it. While Redis is away, changes collect (at most one entry per block) and are sent later.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import structlog

from services.kvstore.store import BlockStore
from shared.blocks import BlockIndex, Holding
from shared.blocks.index import ENTRY_TTL_S
from shared.protocol.blocks import Place
from shared.telemetry.metrics import KVStoreMetrics

INTERVAL_S: Final = 0.2
"""How late the index may be."""
BEAT_S: Final = 1.0
BATCH: Final = 512
"""Entries written in one go, before the next look at the clock."""

log = structlog.get_logger(__name__)


class IndexUpkeep:
    """One task of the store's main. `epoch` names this run of the store: entries of earlier runs do not count."""

    def __init__(self, store: BlockStore, index: BlockIndex, place: Place, epoch: str, metrics: KVStoreMetrics) -> None:
        self._store = store
        self._index = index
        self._place = place
        self._epoch = epoch
        self._metrics = metrics
        self._next_beat_s = 0.0
        self._refresh: list[bytes] = []
        """Keys whose entries are to be written again in this round, before they expire."""
        self._round_ends_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.step(time.monotonic())
            await asyncio.sleep(INTERVAL_S)

    async def step(self, now_s: float) -> None:
        """Whatever is due."""
        self._store.expire(now_s)
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            known = await self._index.beat(self._place, self._epoch)
            if known is False:
                self._write_everything_again()
        self._take_refresh_share(now_s)
        if await self._send_changes():
            await self._send_leases(now_s)

    async def withdraw(self) -> None:
        """The store leaves; its entries stop counting."""
        await self._index.withdraw(self._place.store)

    def _write_everything_again(self) -> None:
        if len(self._store):
            log.info("index_rebuilding", blocks=len(self._store))
        self._store.changes.update(dict.fromkeys(self._store.keys()))

    def _take_refresh_share(self, now_s: float) -> None:
        """Spread the rewriting of all entries over a third of their time to live."""
        if now_s >= self._round_ends_s:
            self._round_ends_s = now_s + ENTRY_TTL_S / 3
            self._store.changes.update(dict.fromkeys(self._refresh))
            self._refresh = self._store.keys()
        left_s = max(self._round_ends_s - now_s, INTERVAL_S)
        share = -(-len(self._refresh) * INTERVAL_S // left_s)
        for _ in range(min(int(share), len(self._refresh))):
            self._store.changes[self._refresh.pop()] = None

    async def _send_changes(self) -> bool:
        """False when Redis did not take them; they stay due."""
        while self._store.changes:
            batch = [key for key, _ in zip(self._store.changes, range(BATCH), strict=False)]
            for key in batch:
                del self._store.changes[key]
            if not await self._send(batch):
                self._store.changes.update(dict.fromkeys(batch))
                self._metrics.index_failures.inc()
                return False
        return True

    async def _send(self, keys: list[bytes]) -> bool:
        offset_s = time.time() - time.monotonic()
        held: list[tuple[bytes, Holding]] = []
        gone: list[bytes] = []
        for key in keys:
            block = self._store.get(key)
            if block is None:
                gone.append(key)
                continue
            meta, last_use = block.meta, block.last_use_s + offset_s
            held.append((key, Holding(self._epoch, meta.n_tokens, meta.n_bytes, meta.checksum, last_use)))
        name = self._place.store
        return await self._index.record(name, held) and await self._index.forget(name, gone)

    async def _send_leases(self, now_s: float) -> None:
        for lease_id in list(self._store.lease_changes)[:BATCH]:
            del self._store.lease_changes[lease_id]
            blocks, left_s = self._store.lease_left_s(lease_id, now_s)
            if not await self._index.mirror_lease(self._place.store, lease_id, blocks, left_s):
                self._store.lease_changes[lease_id] = None
                return
