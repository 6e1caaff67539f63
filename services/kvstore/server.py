"""Serves one store to its peers: one exchange after the other on each connection, bytes straight from and to slots."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
import structlog

from services.kvstore.store import BlockStore, Ticket
from shared.blocks import checksums, receive_hashed
from shared.protocol.kv import (
    KEY_BYTES,
    MAX_BLOCKS,
    MAX_LEASE_ID,
    MAX_TENANT,
    AskStats,
    BlockMeta,
    Corrupt,
    Doubt,
    Find,
    Found,
    Get,
    Held,
    Lease,
    Put,
    Refusal,
    Release,
    Renew,
    Reply,
    Request,
    Sending,
    Verdict,
    Verdicts,
    decode_request,
    encode_kv,
)
from shared.telemetry.metrics import KVStoreMetrics
from shared.transport import Connection, PeerGone, TransportError

PATIENCE_S: Final = 5.0
SLOWEST_BYTES_PER_S: Final = 20e6
"""A transfer may take PATIENCE_S and its size at this rate; then the peer is cut off and its slots are free again."""

log = structlog.get_logger(__name__)


class StoreServer:
    """`serve` is the handler of a Listener. All connections share the store, on one event loop."""

    def __init__(self, store: BlockStore, metrics: KVStoreMetrics, *, fault_injection: bool = False) -> None:
        self._store = store
        self._metrics = metrics
        self._fault_injection = fault_injection
        self.transfers = 0
        """Exchanges with block bytes in work."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def serve(self, connection: Connection) -> None:
        """Until the peer leaves or misbehaves. Raises TransportError when it does so in the middle of an exchange."""
        while True:
            try:
                data = await connection.receive_header()
            except PeerGone:
                return
            try:
                request = decode_request(data)
            except msgspec.DecodeError as error:
                await self._reply(connection, Refusal(f"the request cannot be read: {error}"))
                return
            fault = _fault(request)
            if fault:
                await self._reply(connection, Refusal(fault))
                return
            await self._answer(connection, request)

    async def drain(self, limit_s: float) -> None:
        """Wait until no transfer is in work, at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()

    async def _answer(self, connection: Connection, request: Request) -> None:
        now_s = time.monotonic()
        store = self._store
        match request:
            case Get():
                await self._send_blocks(connection, request)
            case Put():
                await self._receive_blocks(connection, request)
            case Find():
                await self._reply(connection, Found(store.find(request.keys, now_s)))
            case Lease():
                held = store.lease(request.lease_id, request.keys, request.lease_s, now_s, request.tenant)
                await self._reply(connection, Refusal("too many leases") if held is None else Held(held))
            case Renew():
                await self._reply(connection, Held([store.renew(request.lease_id, request.lease_s, now_s)]))
            case Release():
                await self._reply(connection, Held([store.release(request.lease_id, now_s)]))
            case Doubt():
                await self._reply(connection, Held(await self._check_copies(request.keys)))
            case AskStats():
                store.expire(now_s)
                await self._reply(connection, store.stats())
            case Corrupt():
                await self._reply(connection, self._corrupt(request.key))

    async def _send_blocks(self, connection: Connection, request: Get) -> None:
        pinned = self._store.pin(request.blocks, time.monotonic())
        here = [block for block in pinned if block is not None]
        self._metrics.kv.blocks_hit.inc(len(here))
        self._metrics.kv.blocks_miss.inc(len(pinned) - len(here))
        try:
            async with self._transfer("store_to_worker", connection, [block.meta for block in here]):
                await self._reply(connection, Sending([block is not None for block in pinned]))
                await connection.send_buffers([self._store.view(block) for block in here])
        finally:
            for block in reversed(here):
                self._store.unpin(block)

    async def _receive_blocks(self, connection: Connection, request: Put) -> None:
        """Straight into slots. What was not received, or not as announced, leaves no trace."""
        tickets: dict[int, Ticket] = {}
        try:
            verdicts = self._plan(request, tickets)
            async with self._transfer("worker_to_store", connection, [t.meta for t in tickets.values()]):
                await self._reply(connection, Verdicts(verdicts))
                sums = await receive_hashed(connection, [self._store.view(ticket) for ticket in tickets.values()])
            if tickets:
                self._keep_good(request, tickets, sums, verdicts)
                await self._reply(connection, Verdicts(verdicts))
        finally:
            for ticket in tickets.values():
                self._store.roll_back(ticket)

    def _plan(self, request: Put, tickets: dict[int, Ticket]) -> list[Verdict]:
        """Reserve a slot for each block that is not here yet; what is here is leased at once, before it could go."""
        now_s = time.monotonic()
        verdicts: list[Verdict] = []
        for i, meta in enumerate(request.blocks):
            plan = self._store.begin_put(meta, now_s)
            if isinstance(plan, Ticket):
                tickets[i] = plan
                verdicts.append("want")
                continue
            if plan == "stored" and not self._lease_stored(request, meta, now_s):
                plan = "refused"
            if plan != "stored":
                self._metrics.puts_refused.labels(plan).inc()
            verdicts.append(plan)
        return verdicts

    def _keep_good(self, request: Put, tickets: dict[int, Ticket], sums: list[int], verdicts: list[Verdict]) -> None:
        """Commit the blocks whose checksum is right, which takes them out of `tickets`."""
        now_s = time.monotonic()
        good = [i for (i, ticket), found in zip(tickets.items(), sums, strict=True) if found == ticket.meta.checksum]
        for i in tickets.keys() - good:
            verdicts[i] = "corrupt"
            self._note_damage(tickets[i].meta.key, "put")
        for i in reversed(good):  # the head of a sequence counts as used last, so that it is evicted last
            self._store.commit(tickets.pop(i), now_s)
        for i in good:
            verdicts[i] = "stored" if self._lease_stored(request, request.blocks[i], now_s) else "refused"

    def _lease_stored(self, request: Put, meta: BlockMeta, now_s: float) -> bool:
        """Whether the block now has the protection that was asked for."""
        if not request.lease_id:
            return True
        held = self._store.lease(request.lease_id, [meta.key], request.lease_s, now_s, request.tenant)
        return held is not None and held[0]

    async def _check_copies(self, keys: Sequence[bytes]) -> list[bool]:
        """A peer received these damaged. Drop our copy where it is the damaged one."""
        blocks = {key: block for key in keys if (block := self._store.get(key)) is not None}
        pinned = [block for block in self._store.pin([b.meta for b in blocks.values()], time.monotonic()) if block]
        try:
            sums = await checksums([self._store.view(block) for block in pinned])
            for block, found in zip(pinned, sums, strict=True):
                if found != block.meta.checksum:
                    self._note_damage(block.meta.key, "stored")
                    self._store.discard(block)
        finally:
            for block in pinned:
                self._store.unpin(block)
        return [self._store.get(key) is not None for key in keys]

    def _note_damage(self, key: bytes, where: str) -> None:
        self._store.counts.checksum_failures += 1
        self._metrics.kv.blocks_checksum_failed.inc()
        log.error("block_damaged", key=key.hex(), where=where)

    def _corrupt(self, key: bytes) -> Held | Refusal:
        block = self._store.get(key)
        if not self._fault_injection:
            return Refusal("this store was started without fault injection")
        if block is None:
            return Held([False])
        self._store.view(block)[block.meta.n_bytes // 2] ^= 0xFF
        return Held([True])

    @contextlib.asynccontextmanager
    async def _transfer(self, hop: str, connection: Connection, metas: Sequence[BlockMeta]) -> AsyncIterator[None]:
        """Time, count and bound an exchange with block bytes. Raises PeerGone for a peer that is too slow."""
        size = sum(meta.n_bytes for meta in metas)
        limit_s = PATIENCE_S + size / SLOWEST_BYTES_PER_S
        started_s = time.monotonic()
        self.transfers += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            self._metrics.kv.transfer_failures.labels(hop).inc()
            raise PeerGone(f"{connection.peer} was too slow: {size} bytes not moved in {limit_s:.1f} s") from error
        except TransportError:
            self._metrics.kv.transfer_failures.labels(hop).inc()
            raise
        finally:
            self.transfers -= 1
            if self.transfers == 0:
                self._idle.set()
        if size:
            self._metrics.kv.observe_transfer(hop, connection.carrier, size, time.monotonic() - started_s)

    async def _reply(self, connection: Connection, reply: Reply) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await connection.send_header(encode_kv(reply))
        except TimeoutError as error:
            raise PeerGone(f"{connection.peer} does not read its answers") from error


def _fault(request: Request) -> str:
    """Why a request is out of bounds; empty when it is not."""
    keys = _keys(request)
    if len(keys) > MAX_BLOCKS:
        return f"{len(keys)} blocks in one exchange; the limit is {MAX_BLOCKS}"
    if any(len(key) != KEY_BYTES for key in keys):
        return f"a block key has {KEY_BYTES} bytes"
    if isinstance(request, Get | Put) and any(meta.n_bytes <= 0 for meta in request.blocks):
        return "a block has at least one byte"
    if isinstance(request, Put) and len(set(keys)) != len(keys):
        return "a put names each block once"
    return _lease_fault(request) if isinstance(request, Put | Lease | Renew | Release) else ""


def _lease_fault(request: Put | Lease | Renew | Release) -> str:
    shortest = 0 if isinstance(request, Put) else 1
    if not shortest <= len(request.lease_id) <= MAX_LEASE_ID:
        return f"a lease id has {shortest} to {MAX_LEASE_ID} characters"
    if not isinstance(request, Release) and not math.isfinite(request.lease_s):
        return "a lease lasts for a finite time"
    if isinstance(request, Put | Lease) and len(request.tenant) > MAX_TENANT:
        return f"a tenant has at most {MAX_TENANT} characters"
    return ""


def _keys(request: Request) -> list[bytes]:
    match request:
        case Find(keys=keys) | Lease(keys=keys) | Doubt(keys=keys):
            return keys
        case Get(blocks=blocks) | Put(blocks=blocks):
            return [meta.key for meta in blocks]
        case Corrupt(key=key):
            return [key]
        case _:
            return []
