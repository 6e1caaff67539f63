"""Accepts peers: bounded in number, cut off when they do not prove the secret in time, each with a task of its own."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from types import TracebackType
from typing import Final, Self

import structlog

from shared.transport.base import Connection, Handler, Transport
from shared.transport.errors import AddressTaken, TransportError
from shared.transport.handshake import NoPlace, greet_as_store, refuse
from shared.transport.stream import Stream

HANDSHAKE_TIMEOUT_S: Final = 3.0
MAX_STRANGERS: Final = 32
"""Peers in the handshake, so that they cost at most this many sockets and small buffers. One more puts out the one that
has been at it for longest: proving the secret takes milliseconds, so those who hold it are the last to go."""

FULL: Final = "too many connections"

TELL_S: Final = 10.0
"""A flood of strangers is logged this often."""

log = structlog.get_logger(__name__)


class Listener:
    """`async with Listener(...)`: bound on entry, serving inside, all connections closed on exit.

    The handler runs once per connection, which is closed after it. It is cancelled when the listener closes.
    """

    def __init__(
        self,
        transport: Transport,
        handler: Handler,
        secret: bytes,
        *,
        host: str,
        port: int = 0,
        max_connections: int = 256,
    ) -> None:
        self._transport = transport
        self._handler = handler
        self._secret = secret
        self._address = (host, port)
        self._max_connections = max_connections
        self._strangers: dict[asyncio.Task[None], None] = {}
        """In the order of their coming."""
        self._put_out = 0
        self._told_s = -TELL_S
        self._admitted: set[asyncio.Task[None]] = set()
        """Who proved the secret: from before they hear of it until their connection is closed."""
        self._peers: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def connections(self) -> int:
        return len(self._admitted)

    async def __aenter__(self) -> Self:
        """Raises AddressTaken."""
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        try:
            sock = socket.create_server(self._address, family=family, backlog=128)
        except OSError as error:
            raise AddressTaken(f"cannot listen on {self._address[0]}:{self._address[1]}: {error.strerror}") from error
        sock.setblocking(False)
        self._socket = sock
        self.port = sock.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(sock), name="kv-accept")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def stop_accepting(self) -> None:
        """Close the door; those inside go on."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._accepting = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def close(self) -> None:
        await self.stop_accepting()
        for task in self._peers:
            task.cancel()
        if self._peers:
            await asyncio.wait(self._peers)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                # Out of descriptors, or the peer went away before we came to it: neither may end the listener.
                log.warning("accept_failed", error=str(error))
                await asyncio.sleep(0.1)
                continue
            stream = Stream(sock)
            self._make_room()
            task = asyncio.create_task(self._serve(stream), name="kv-peer")
            self._strangers[task] = None
            self._peers.add(task)
            task.add_done_callback(functools.partial(self._forget, stream))

    def _make_room(self) -> None:
        """Put out the stranger that has been here for longest, if there are as many as there may be."""
        if len(self._strangers) < MAX_STRANGERS:
            return
        oldest = next(iter(self._strangers))
        del self._strangers[oldest]
        oldest.cancel()
        self._put_out += 1
        if time.monotonic() - self._told_s >= TELL_S:
            self._told_s = time.monotonic()
            log.warning("strangers_put_out", count=self._put_out, at_once=MAX_STRANGERS)
            self._put_out = 0

    def _forget(self, stream: Stream, task: asyncio.Task[None]) -> None:
        """Also for a task that was cancelled before it began."""
        stream.close()
        self._peers.discard(task)
        self._strangers.pop(task, None)

    async def _serve(self, stream: Stream) -> None:
        connection: Connection | None = None
        try:
            connection = await self._admit(stream)
            if connection is not None:
                await self._handler(connection)
        except TransportError as error:
            log.info("peer_lost", peer=stream.peer, error=str(error))
        except Exception:
            log.exception("peer_handler_failed", peer=stream.peer)
        finally:
            self._admitted.discard(asyncio.current_task())
            if connection is not None:
                connection.close()

    async def _admit(self, stream: Stream) -> Connection | None:
        """The connection of a peer that proved the secret. Raises TransportError."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                if len(self._admitted) >= self._max_connections:
                    await refuse(stream, FULL)
                    return None
                agreement = await greet_as_store(stream, self._secret, self._transport.sides(), self._take_place)
        except TimeoutError:
            log.warning("peer_unproven", peer=stream.peer, after_s=HANDSHAKE_TIMEOUT_S)
            return None
        return await self._transport.establish(stream, agreement, accepted=True)

    def _take_place(self) -> None:
        """The running task's peer proved the secret. Raises NoPlace, as others may have been admitted meanwhile."""
        if len(self._admitted) >= self._max_connections:
            raise NoPlace(FULL)
        task = asyncio.current_task()
        self._strangers.pop(task, None)  # type: ignore[arg-type]
        self._admitted.add(task)  # type: ignore[arg-type]
