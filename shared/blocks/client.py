"""The workers' side of the KV plane: finds, fetches, stores and leases blocks on whatever stores are alive.

A store that is gone, slow, full or wrong is a miss or a missing place, never an exception: KV blocks save work, and
what is missing is computed again.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import structlog

from shared.blocks import exchange
from shared.blocks.index import BlockIndex
from shared.blocks.keys import BlockKey
from shared.blocks.rendezvous import ranked
from shared.blocks.spread import spread
from shared.protocol.blocks import BlockRef, Place
from shared.protocol.kv import MAX_BLOCKS, BlockMeta, Stats, Verdict
from shared.telemetry.metrics import KVTransferMetrics
from shared.transport import Buffer, Connection, ConnectionPool, Transport, TransportError, n_bytes

ASK_TIMEOUT_S: Final = 2.0
"""For exchanges without block bytes."""
PUT_PATIENCE_S: Final = 5.0
SLOWEST_BYTES_PER_S: Final = 20e6
"""A put may take PUT_PATIENCE_S and its size at this rate, as long as a store grants it. A store that takes longer is
taken to hang, and a prompt that waits to be handed over goes on without it."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


class KVClient:
    """Owns a pool of connections. `stores` says which KV stores are alive now; `stage` names this end of a hop.

    Safe for concurrent use on one event loop. When a method has returned, or was cancelled, nobody touches its buffers.
    """

    def __init__(
        self,
        stores: Callable[[], Sequence[Place]],
        transport: Transport,
        secret: str,
        index: BlockIndex | None,
        *,
        stage: str = "worker",
        metrics: KVTransferMetrics | None = None,
    ) -> None:
        self._stores = stores
        self._pool = ConnectionPool(transport, secret.encode())
        self._index = index
        self._put_hop = f"{stage}_to_store"
        self._get_hop = f"store_to_{stage}"
        self._metrics = metrics

    def close(self) -> None:
        """Close the connections. The transport and the index are closed by those who made them."""
        self._pool.close()

    async def find(self, keys: Sequence[bytes]) -> list[BlockRef | None]:
        """Where the blocks are, in the order of the keys. Asks the index, or all stores when the index is not there."""
        if self._index is not None:
            known = await self._index.lookup(keys)
            if self._index.available:
                entries = [(key, known.get(key)) for key in keys]
                return [BlockRef(k, e.n_tokens, e.n_bytes, e.checksum, e.places) if e else None for k, e in entries]
        return await self._ask_stores(keys)

    async def put(
        self,
        lease_id: str,
        lease_s: float,
        blocks: Sequence[tuple[BlockKey, Buffer, int]],
        *,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> list[BlockRef]:
        """Store blocks (key, buffer, checksum), leased under `lease_id` for `lease_s`; without a lease if it is empty.

        The lease is named by a request; with its `tenant` the stores find its log, and end the lease when it has ended.
        One ref per block, in order; `places` is empty where no store took it. Raises UnusableBuffer only.
        """
        metas = [BlockMeta(key.key, key.n_tokens, n_bytes(buffer), check) for key, buffer, check in blocks]
        if timeout_s is None:
            timeout_s = PUT_PATIENCE_S + sum(meta.n_bytes for meta in metas) / SLOWEST_BYTES_PER_S
        give_up_s = time.monotonic() + timeout_s

        async def move(place: Place, items: list[int]) -> list[bool]:
            wanted, buffers = [metas[i] for i in items], [blocks[i][1] for i in items]

            async def operation(connection: Connection) -> list[Verdict]:
                started_s = time.monotonic()
                verdicts = await exchange.put_blocks(connection, wanted, buffers, lease_id, lease_s, tenant)
                self._count(self._put_hop, connection, sum(meta.n_bytes for meta in wanted), started_s)
                return verdicts

            verdicts = await self._exchange(place, give_up_s, self._put_hop, operation)
            if verdicts is None:
                return [False] * len(items)
            stored = [verdict == "stored" for verdict in verdicts]
            if not all(stored):
                log.info("put_refused", store=place.store, verdicts=sorted(set(verdicts)), blocks=stored.count(False))
            return stored

        def candidates(item: int) -> Sequence[Place]:
            return ranked(metas[item].key, self._up(self._stores()))

        placed = await spread(range(len(metas)), candidates, move)
        return [
            BlockRef(m.key, m.n_tokens, m.n_bytes, m.checksum, [placed[i]] if i in placed else [])
            for i, m in enumerate(metas)
        ]

    async def get(self, refs: Sequence[BlockRef], into: Sequence[Buffer], *, timeout_s: float) -> list[bool]:
        """Fetch blocks into buffers of their size and verify them. False is a miss, whose buffer may hold anything.

        Returns within `timeout_s`, and at once where no store that could have a block is up.
        """
        metas = [BlockMeta(ref.key, ref.n_tokens, ref.n_bytes, ref.checksum) for ref in refs]
        give_up_s = time.monotonic() + timeout_s

        async def move(place: Place, items: list[int]) -> list[bool]:
            wanted, buffers = [metas[i] for i in items], [into[i] for i in items]

            async def operation(connection: Connection) -> list[int | None]:
                started_s = time.monotonic()
                arrived = await exchange.get_blocks(connection, wanted, buffers)
                moved = sum(meta.n_bytes for meta, found in zip(wanted, arrived, strict=True) if found is not None)
                self._count(self._get_hop, connection, moved, started_s)
                if _damaged(wanted, arrived):
                    connection.close()  # the bytes may have been those of another exchange: the two may be out of step
                return arrived

            arrived = await self._exchange(place, give_up_s, self._get_hop, operation)
            if arrived is None:
                return [False] * len(items)
            damaged = _damaged(wanted, arrived)
            if damaged:
                await self._report_damage(place, [refs[items[i]] for i in damaged], give_up_s)
            return [found == meta.checksum for meta, found in zip(wanted, arrived, strict=True)]

        fitting = [i for i, ref in enumerate(refs) if _fits(ref, into[i])]
        hits = await spread(fitting, lambda i: self._up(refs[i].places), move)
        if self._metrics is not None:
            self._metrics.blocks_hit.inc(len(hits))
            self._metrics.blocks_miss.inc(len(refs) - len(hits))
        return [i in hits for i in range(len(refs))]

    async def lease(self, lease_id: str, keys: Sequence[bytes], ttl_s: float, *, tenant: str = "") -> list[bool]:
        """Spare blocks from eviction, wherever they are. One entry per key: whether a store holds it for the lease."""
        held: list[bool] = []
        for start in range(0, len(keys), MAX_BLOCKS):
            batch = keys[start : start + MAX_BLOCKS]
            answers = await self._ask_all(_leasing(lease_id, batch, ttl_s, tenant))
            held += [any(answer[i] for _, answer in answers) for i in range(len(batch))]
        return held

    async def renew(self, lease_id: str, ttl_s: float) -> list[Place]:
        """Have the lease end `ttl_s` from now, sooner or later than before. The stores that say they have none (any
        more): it ended there, or never was. One that does not answer is not among them."""
        answers = await self._ask_all(lambda c: exchange.renew_lease(c, lease_id, ttl_s))
        return [place for place, known in answers if not known]

    async def release(self, lease_id: str) -> None:
        """End the lease at every store. One that does not answer lets it expire."""
        await self._ask_all(lambda c: exchange.release_lease(c, lease_id))

    async def stats(self, place: Place) -> Stats | None:
        """None when the store does not answer."""
        return await self._exchange(place, time.monotonic() + ASK_TIMEOUT_S, "ask", exchange.ask_stats)

    async def _ask_stores(self, keys: Sequence[bytes]) -> list[BlockRef | None]:
        refs: list[BlockRef | None] = []
        for start in range(0, len(keys), MAX_BLOCKS):
            batch = keys[start : start + MAX_BLOCKS]
            answers = await self._ask_all(_finding(batch))
            refs += [_merge([(place, metas[i]) for place, metas in answers]) for i in range(len(batch))]
        return refs

    async def _ask_all(self, ask: Callable[[Connection], Awaitable[T]]) -> list[tuple[Place, T]]:
        """The answers of all stores that are up, asked at once."""
        places = self._up(self._stores())
        give_up_s = time.monotonic() + ASK_TIMEOUT_S
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._exchange(place, give_up_s, "ask", ask)) for place in places]
        answers = zip(places, (task.result() for task in asked), strict=True)
        return [(place, answer) for place, answer in answers if answer is not None]

    async def _exchange(
        self, place: Place, give_up_s: float, hop: str, operation: Callable[[Connection], Awaitable[T]]
    ) -> T | None:
        """The operation's answer; None when the store failed or was too late."""
        try:
            async with (
                asyncio.timeout(max(0.0, give_up_s - time.monotonic())),
                self._pool.borrow(place.host, place.port) as connection,
            ):
                return await operation(connection)
        except TimeoutError:
            self._pool.mark_down(place.host, place.port, "it did not answer in time")
            log.warning("exchange_too_late", hop=hop, store=place.store)
        except TransportError as error:
            log.warning("exchange_failed", hop=hop, store=place.store, error=f"{type(error).__name__}: {error}")
        except Exception:
            log.exception("exchange_broke", hop=hop, store=place.store)
        if self._metrics is not None:
            self._metrics.transfer_failures.labels(hop).inc()
        return None

    async def _report_damage(self, place: Place, refs: list[BlockRef], give_up_s: float) -> None:
        """All stores that have blocks of which one copy arrived damaged check theirs, and drop the damaged ones."""
        log.error("block_damaged", store=place.store, keys=[ref.key.hex() for ref in refs])
        if self._metrics is not None:
            self._metrics.blocks_checksum_failed.inc(len(refs))
        doubted: dict[Place, list[bytes]] = defaultdict(list)
        for ref in refs:
            for holder in self._up(ref.places):
                doubted[holder].append(ref.key)
        async with asyncio.TaskGroup() as tasks:
            for holder, keys in doubted.items():
                tasks.create_task(self._exchange(holder, give_up_s, "ask", _doubting(keys)))

    def _up(self, places: Sequence[Place]) -> list[Place]:
        return [place for place in places if not self._pool.is_down(place.host, place.port)]

    def _count(self, hop: str, connection: Connection, moved_bytes: int, started_s: float) -> None:
        if self._metrics is not None and moved_bytes:
            self._metrics.observe_transfer(hop, connection.carrier, moved_bytes, time.monotonic() - started_s)


def _leasing(
    lease_id: str, keys: Sequence[bytes], ttl_s: float, tenant: str
) -> Callable[[Connection], Awaitable[list[bool]]]:
    return lambda connection: exchange.lease_blocks(connection, lease_id, keys, ttl_s, tenant)


def _finding(keys: Sequence[bytes]) -> Callable[[Connection], Awaitable[list[BlockMeta | None]]]:
    return lambda connection: exchange.find_blocks(connection, keys)


def _doubting(keys: Sequence[bytes]) -> Callable[[Connection], Awaitable[list[bool]]]:
    return lambda connection: exchange.doubt_blocks(connection, keys)


def _damaged(wanted: Sequence[BlockMeta], arrived: Sequence[int | None]) -> list[int]:
    """Numbers of the blocks that came with other bytes than were asked for."""
    return [i for i, found in enumerate(arrived) if found is not None and found != wanted[i].checksum]


def _merge(answers: list[tuple[Place, BlockMeta | None]]) -> BlockRef | None:
    """The places that hold the same copy as the first that holds one."""
    first = next((meta for _, meta in answers if meta is not None), None)
    if first is None:
        return None
    places = [place for place, meta in answers if meta == first]
    return BlockRef(first.key, first.n_tokens, first.n_bytes, first.checksum, places)


def _fits(ref: BlockRef, buffer: Buffer) -> bool:
    try:
        size = n_bytes(buffer)
    except TransportError as error:
        log.error("buffer_unusable", error=str(error))
        return False
    if size != ref.n_bytes:
        log.error("buffer_size_differs", buffer_bytes=size, block_bytes=ref.n_bytes)
    return size == ref.n_bytes
