"""Connections to peers, kept for reuse: bounded per peer, checked before use, quick to fail while a peer is down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from shared.transport.base import Connection, Transport
from shared.transport.errors import PeerUnreachable, TransportError

MAX_PEERS: Final = 256


class _Peer:
    def __init__(self, limit: int) -> None:
        self.idle: list[Connection] = []
        self.slots = asyncio.Semaphore(limit)
        self.users = 0
        self.down_until_s = 0.0
        self.last_error = ""


class ConnectionPool:
    """Owns every connection that it makes. One `borrow` is one exchange or several in a row."""

    def __init__(
        self,
        transport: Transport,
        secret: bytes,
        *,
        per_peer: int = 4,
        connect_timeout_s: float = 3.0,
        retry_after_s: float = 1.0,
    ) -> None:
        self._transport = transport
        self._secret = secret
        self._per_peer = per_peer
        self._connect_timeout_s = connect_timeout_s
        self._retry_after_s = retry_after_s
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._closed = False

    @asynccontextmanager
    async def borrow(self, host: str, port: int) -> AsyncIterator[Connection]:
        """A connection of one's own, until the block ends; an error in the block closes it.

        Waits for a free one without limit (use `asyncio.timeout`). Raises PeerUnreachable at once for `retry_after_s`
        after a connect has failed, and the other TransportErrors of `Transport.connect`.
        """
        peer = self._peer(host, port)
        peer.users += 1
        try:
            async with peer.slots:
                connection = self._reuse(peer) or await self._connect(peer, host, port)
                try:
                    yield connection
                except BaseException:
                    connection.close()
                    raise
                if self._closed:
                    connection.close()
                elif not connection.closed:
                    peer.idle.append(connection)
        finally:
            peer.users -= 1

    def is_down(self, host: str, port: int) -> bool:
        """Whether the peer failed so recently that it is not tried again yet."""
        peer = self._peers.get((host, port))
        return peer is not None and peer.down_until_s > time.monotonic()

    def mark_down(self, host: str, port: int, reason: str) -> None:
        """Fail fast for `retry_after_s`, after an exchange that timed out: others would wait as long for nothing."""
        peer = self._peers.get((host, port))
        if peer is not None:
            peer.down_until_s = time.monotonic() + self._retry_after_s
            peer.last_error = reason

    def close(self) -> None:
        """Close idle connections now and borrowed ones when they come back."""
        self._closed = True
        for peer in self._peers.values():
            while peer.idle:
                peer.idle.pop().close()

    def _peer(self, host: str, port: int) -> _Peer:
        if self._closed:
            raise PeerUnreachable("this process is closing its connections")
        if (host, port) not in self._peers and len(self._peers) >= MAX_PEERS:
            self._forget_unused()
        return self._peers.setdefault((host, port), _Peer(self._per_peer))

    def _forget_unused(self) -> None:
        for address, peer in list(self._peers.items()):
            if peer.users == 0:
                while peer.idle:
                    peer.idle.pop().close()
                del self._peers[address]

    def _reuse(self, peer: _Peer) -> Connection | None:
        while peer.idle:
            connection = peer.idle.pop()
            if connection.usable_again():
                return connection
            connection.close()
        return None

    async def _connect(self, peer: _Peer, host: str, port: int) -> Connection:
        if peer.down_until_s > time.monotonic():
            raise PeerUnreachable(f"{host}:{port} is down: {peer.last_error}")
        try:
            return await self._transport.connect(host, port, self._secret, self._connect_timeout_s)
        except TransportError as error:
            self.mark_down(host, port, str(error))
            raise
