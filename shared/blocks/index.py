"""The block index in Redis: key -> stores that hold the block, with size, checksum, last use. A hint, never the truth.

Runs on Redis 7.0 and on Valkey. A Redis that is down or slow is a miss for readers and a False for writers, logged once
per outage; no method raises. Entries name a store and its run (`epoch`); they count only while that store's heartbeat
key lives and names the same run, so a dead or restarted store's entries vanish within seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
import redis.asyncio
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from shared.blocks import scripts
from shared.protocol.blocks import Place

OP_TIMEOUT_S: Final = 0.5
RETRY_AFTER_S: Final = 1.0
KEYS_PER_CALL: Final = 128
"""Blocks in one script call; a script holds up every other client of the server while it runs."""
MAX_CONNECTIONS: Final = 8
HEARTBEAT_TTL_S: Final = 5.0
ENTRY_TTL_S: Final = 120.0

log = structlog.get_logger(__name__)


class IndexEntry(msgspec.Struct, frozen=True):
    """One block as the index knows it. Places whose copy has another size or checksum are left out."""

    n_tokens: int
    n_bytes: int
    checksum: int
    places: list[Place]


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """What one store holds under a key, as it stands in Redis."""

    epoch: str
    n_tokens: int
    n_bytes: int
    checksum: int
    last_use_unix_s: float


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    epoch: str
    place: Place


class BlockIndex:
    """One connection pool to Redis. Shared by everything in a process that looks blocks up or records them."""

    def __init__(self, url: str) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            socket_timeout=OP_TIMEOUT_S,
            socket_connect_timeout=OP_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._failed_at_s: float | None = None

    @property
    def available(self) -> bool:
        """Whether the last call reached Redis."""
        return self._failed_at_s is None

    async def lookup(self, keys: Sequence[bytes]) -> dict[bytes, IndexEntry]:
        """The blocks that live stores are known to hold; none when Redis is not there (see `available`)."""
        found: dict[bytes, IndexEntry] = {}
        for batch in _batches(keys):
            answer = await self._call(scripts.LOOKUP, [_block(key) for key in batch], [])
            if answer is None:
                return {}
            holdings, heartbeats = answer
            live = _live(heartbeats)
            for key, flat in zip(batch, holdings, strict=True):
                entry = _entry(flat, live)
                if entry is not None:
                    found[key] = entry
        return found

    async def record(self, store: str, holdings: Sequence[tuple[bytes, Holding]]) -> bool:
        """A store says what it holds. Overwrites what it said before and restarts the entries' time to live."""
        for batch in _batches(holdings):
            values: list[bytes | str] = [
                store,
                str(round(ENTRY_TTL_S * 1000)),
                *(msgspec.msgpack.encode(h) for _, h in batch),
            ]
            if await self._call(scripts.RECORD, [_block(key) for key, _ in batch], values) is None:
                return False
        return True

    async def forget(self, store: str, keys: Sequence[bytes]) -> bool:
        """A store no longer holds these blocks. Other stores' entries stay."""
        for batch in _batches(keys):
            if await self._call(scripts.FORGET, [_block(key) for key in batch], [store]) is None:
                return False
        return True

    async def beat(self, place: Place, epoch: str) -> bool | None:
        """A store is alive. True when Redis still knew this run; None when Redis did not answer.

        False when it did not know it, so that everything must be recorded again.
        """
        value = msgspec.msgpack.encode(Heartbeat(epoch, place))
        ttl = str(round(HEARTBEAT_TTL_S * 1000))
        answer = await self._call(scripts.BEAT, [_store(place.store)], [value, ttl])
        return None if answer is None else answer == 1

    async def withdraw(self, store: str) -> None:
        """A store leaves: all of its entries stop counting at once."""
        await self._attempt(lambda: self._redis.delete(_store(store)))

    async def mirror_lease(self, store: str, lease_id: str, blocks: int, lease_s: float) -> bool:
        """Show a lease to people and tools. Nothing decides by it; the store does."""
        name = _lease(store, lease_id)
        if lease_s <= 0:
            return await self._attempt(lambda: self._redis.delete(name)) is not None
        return await self._attempt(lambda: self._redis.set(name, blocks, px=max(1, round(lease_s * 1000)))) is not None

    async def close(self) -> None:
        await self._attempt(self._redis.aclose)

    async def _call(self, script: scripts.Script, keys: list[bytes], values: Sequence[bytes | str]) -> Any | None:
        """Run a script. None when Redis is not there."""

        async def run() -> Any:
            try:
                return await self._redis.evalsha(script.sha, len(keys), *keys, *values)
            except NoScriptError:
                return await self._redis.eval(script.source, len(keys), *keys, *values)

        return await self._attempt(run)

    async def _attempt(self, operation: Callable[[], Awaitable[Any]]) -> Any | None:
        """The operation's answer, or None; while Redis is known to be down, None at once."""
        if self._failed_at_s is not None and time.monotonic() - self._failed_at_s < RETRY_AFTER_S:
            return None
        try:
            async with asyncio.timeout(2 * OP_TIMEOUT_S):
                answer = await operation()
        except (RedisError, OSError, TimeoutError) as error:
            if self._failed_at_s is None:
                log.warning("index_lost", error=f"{type(error).__name__}: {error}")
            self._failed_at_s = time.monotonic()
            return None
        if self._failed_at_s is not None:
            log.info("index_back")
            self._failed_at_s = None
        return answer


def _batches(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[start : start + KEYS_PER_CALL] for start in range(0, len(items), KEYS_PER_CALL)]


def _block(key: bytes) -> bytes:
    return b"hr:kv:block:" + key.hex().encode()


def _store(store: str) -> bytes:
    return scripts.STORE_PREFIX.encode() + store.encode()


def _lease(store: str, lease_id: str) -> bytes:
    return f"hr:kv:lease:{store}:{lease_id}".encode()


def _live(flat: list[bytes]) -> dict[str, Heartbeat]:
    live = {}
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        try:
            live[name.decode()] = msgspec.msgpack.decode(value, type=Heartbeat)
        except (msgspec.DecodeError, UnicodeDecodeError):
            log.warning("index_entry_unreadable", kind="heartbeat")
    return live


def _entry(flat: list[bytes], live: dict[str, Heartbeat]) -> IndexEntry | None:
    """The copies that agree with the most recently used one; None when no live store holds the block."""
    copies: list[tuple[Holding, Place]] = []
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        heartbeat = live.get(name.decode(errors="replace"))
        try:
            holding = msgspec.msgpack.decode(value, type=Holding)
        except msgspec.DecodeError:
            log.warning("index_entry_unreadable", kind="block")
            continue
        if heartbeat is not None and heartbeat.epoch == holding.epoch:
            copies.append((holding, heartbeat.place))
    if not copies:
        return None
    best = max(copies, key=lambda copy: copy[0].last_use_unix_s)[0]
    content = (best.n_tokens, best.n_bytes, best.checksum)
    places = [place for held, place in copies if (held.n_tokens, held.n_bytes, held.checksum) == content]
    return IndexEntry(*content, places=sorted(places))
