"""Stores a sequence's KV blocks as they fill, in the background, while the engine computes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from shared.blocks import BlockKey, KVClient, checksums
from shared.engine import Sequence as EngineSequence
from shared.protocol.blocks import BlockRef
from shared.telemetry import attributes as attr
from shared.telemetry import record_span
from shared.worker.engine_host import EngineHost

MAX_BLOCKS_PER_PUT = 16
ABANDON_PATIENCE_S = 0.05
"""A put on one machine takes milliseconds; a connection that was closed costs the next one as long."""

log = structlog.get_logger(__name__)


class BlockPush:
    """Pushes one sequence's blocks in order; the sequence must hold them until `abandon` returns, in any case.

    `offer` goes on as tokens are generated. A block that no store took has no places in its ref: whoever needs it
    computes it again. A sequence that is not `pinned` for its whole life is pinned around each put, since a preempted
    one's blocks belong to somebody else; what it lost is not stored. A store may take `timeout_s` for a put.
    """

    def __init__(
        self,
        host: EngineHost,
        kv: KVClient,
        sequence: EngineSequence,
        lease_id: str,
        lease_s: float,
        *,
        tenant: str,
        pinned: bool,
        timeout_s: float,
    ) -> None:
        self._host = host
        self._pinned = pinned
        self._kv = kv
        self._sequence = sequence
        self._lease_id = lease_id
        self._lease_s = lease_s
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._refs: list[BlockRef] = []
        self._wanted: list[BlockKey] = []
        self._more = asyncio.Event()
        self._closing = False
        self._abandoned = False
        self._task = asyncio.create_task(self._run(), name=f"push-{lease_id}")

    @property
    def block_count(self) -> int:
        """Blocks stored or queued so far; the next one to offer has this index."""
        return len(self._refs) + len(self._wanted)

    @property
    def refs(self) -> Sequence[BlockRef]:
        """The blocks whose storing has ended, in order; those that no store took have no places. It grows."""
        return self._refs

    def already_stored(self, refs: list[BlockRef]) -> None:
        """Blocks that came from a store need no push. Call before the first `offer`."""
        self._refs += refs

    def offer(self, keys: list[BlockKey]) -> None:
        """Blocks that are full now (or final), in order behind those offered before."""
        if keys:
            self._wanted += keys
            self._more.set()

    async def finish(self) -> list[BlockRef]:
        """Wait until all that was offered is stored or refused; the refs of all blocks in order."""
        self._close()
        await asyncio.shield(self._task)  # a caller that is cancelled here abandons the push next
        return self._refs

    async def linger(self, most_s: float) -> None:
        """Wait at most so long for blocks that only a later request could want. What is not stored by then is left."""
        self._close()
        await asyncio.wait({self._task}, timeout=most_s)

    async def abandon(self) -> None:
        """Stop: afterwards nothing reads the sequence's blocks any more.

        The exchange in flight may end; one that takes longer than `ABANDON_PATIENCE_S` has its connection closed.
        """
        self._abandoned = True
        self._close()
        _, late = await asyncio.wait({self._task}, timeout=ABANDON_PATIENCE_S)
        if late:
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.warning("push_failed", lease_id=self._lease_id, error=repr(error))

    def _close(self) -> None:
        self._closing = True
        self._more.set()

    async def _run(self) -> None:
        while not self._abandoned:
            if not self._wanted:
                if self._closing:
                    return
                self._more.clear()
                await self._more.wait()
                continue
            keys = self._wanted[:MAX_BLOCKS_PER_PUT]
            self._refs += await self._put(keys)
            del self._wanted[: len(keys)]

    async def _put(self, keys: list[BlockKey]) -> list[BlockRef]:
        began = time.time()
        first = len(self._refs)
        if self._pinned:
            refs = await self._store(keys, self._sequence.block_ids[first : first + len(keys)])
        else:
            async with self._host.pinned(self._sequence) as complete:
                refs = await self._store(keys, complete[first : first + len(keys)])
        record_span(
            "kv.put",
            began,
            time.time(),
            attributes={attr.BLOCKS: len(keys), attr.BLOCK_HITS: sum(1 for ref in refs if ref.places)},
        )
        return refs

    async def _store(self, keys: list[BlockKey], block_ids: list[int]) -> list[BlockRef]:
        """Put the blocks that are there; the others get refs without places."""
        buffers = [self._host.block_buffer(block_id) for block_id in block_ids]
        sums = await checksums(buffers)
        # After a failed step the engine takes blocks back by itself: what was summed since may be somebody else's.
        lost = self._sequence.state == "released"
        present = [] if lost else list(zip(keys, buffers, sums, strict=False))
        n_bytes = self._host.layout.block_bytes
        refs: list[BlockRef] = []
        if present:
            refs = await self._kv.put(
                self._lease_id, self._lease_s, present, tenant=self._tenant, timeout_s=self._timeout_s
            )
        return [*refs, *(BlockRef(key.key, key.n_tokens, n_bytes, 0, []) for key in keys[len(present) :])]
