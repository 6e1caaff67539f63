"""The interface of the KV plane's transports: connections that carry headers and block bytes, made and accepted.

Two implementations: `tcp` moves the bytes on the connection's own socket, `ucx` moves them beside it. The socket
carries headers and proofs in both, so a peer that dies is noticed at once, and both kinds of client can use one port.
"""

from __future__ import annotations

import abc
import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from shared.protocol.kv import MAX_HEADER_BYTES, Carrier
from shared.transport.buffers import Buffer
from shared.transport.errors import PeerUnreachable
from shared.transport.handshake import Agreement, Side, greet_as_client
from shared.transport.stream import Stream

PROBE_TIMEOUT_S: Final = 5.0
"""For the first bytes over a new UCX endpoint; making the first endpoint of a process takes up to 0.5 s."""

T = TypeVar("T")
Arrived = Callable[[int], None]


class Connection(abc.ABC):
    """An authenticated peer. One exchange at a time.

    Every operation may be cancelled or time out. When it returns or raises, in whatever way, nobody writes to its
    buffers any more; after any failure the connection is closed and of no further use.
    """

    carrier: Carrier

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def peer(self) -> str:
        return self._stream.peer

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def usable_again(self) -> bool:
        """Whether another exchange may begin, as far as can be known without waiting.

        Between two exchanges the peer has nothing to say: whatever can be read means that it has left, or that the two
        are out of step.
        """
        return self._stream.is_silent()

    async def send_header(self, header: bytes) -> None:
        """Raises PeerGone, ProtocolViolation (longer than MAX_HEADER_BYTES)."""
        await self._run(self._stream.send_frame(header, MAX_HEADER_BYTES))

    async def receive_header(self) -> bytes:
        """Waits without limit. Raises PeerGone, ProtocolViolation."""
        return await self._run(self._stream.receive_frame(MAX_HEADER_BYTES))

    async def send_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Send the bytes of all buffers in order. Raises PeerGone, UnusableBuffer (before anything is sent)."""
        await self._run(self._send(buffers))

    async def receive_buffers(self, buffers: Sequence[Buffer], arrived: Arrived = lambda _: None) -> None:
        """Fill all buffers in order, with no copy of ours in between. Raises like `send_buffers`.

        `arrived(i)` is called as soon as buffer i is full, while others may be on their way; it must be quick.
        """
        await self._run(self._receive(buffers, arrived))

    async def _run(self, operation: Awaitable[T]) -> T:
        try:
            return await operation
        except BaseException:
            self.close()
            raise

    @abc.abstractmethod
    async def _send(self, buffers: Sequence[Buffer]) -> None: ...

    @abc.abstractmethod
    async def _receive(self, buffers: Sequence[Buffer], arrived: Arrived) -> None: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Idempotent, and safe while an operation runs: that one fails with PeerGone."""


Handler = Callable[[Connection], Awaitable[None]]


class Transport(abc.ABC):
    """Makes connections of one kind; owned by a process's main, which closes it last."""

    kind: Carrier

    @abc.abstractmethod
    def sides(self) -> dict[Carrier, Side]:
        """What a new connection of this process can carry blocks with, best first, with a fresh mark each."""

    @abc.abstractmethod
    async def establish(self, stream: Stream, agreement: Agreement, *, accepted: bool) -> Connection:
        """Turn an authenticated stream into a connection. Raises PeerUnreachable when the bytes find no way."""

    @abc.abstractmethod
    def describe(self) -> str:
        """What carries the bytes now, for people: `tcp`, `ucx (posix, cma)`."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Give everything back. Connections and listeners are closed first, by their owners."""

    async def connect(self, host: str, port: int, secret: bytes, timeout_s: float) -> Connection:
        """Connect and prove the secret. Raises PeerUnreachable, PeerRefused, PeerGone, ProtocolViolation."""
        stream = await _open_stream(host, port, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                agreement = await greet_as_client(stream, secret, self.sides())
            return await self.establish(stream, agreement, accepted=False)
        except TimeoutError as error:
            stream.close()
            raise PeerUnreachable(f"{host}:{port} accepted but did not greet within {timeout_s:g} s") from error
        except BaseException:
            stream.close()
            raise


async def _open_stream(host: str, port: int, timeout_s: float) -> Stream:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, proto, _, address = found[0]
            sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                return Stream(sock)
            except BaseException:
                sock.close()
                raise
    except (OSError, TimeoutError) as error:
        raise PeerUnreachable(f"no connection to {host}:{port} within {timeout_s:g} s: {error}") from error
