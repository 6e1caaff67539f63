"""One TCP socket that carries small framed messages and, between them, raw bytes straight from and into buffers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

from shared.transport.errors import PeerGone, ProtocolViolation

_LENGTH = struct.Struct("<I")


class Stream:
    """Owns a connected, non-blocking socket. Not for concurrent use in one direction.

    Any failed or cancelled operation leaves the stream between two messages: the owner must close it then.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.closed = False
        try:
            self.peer = "{}:{}".format(*sock.getpeername()[:2])
        except OSError:
            self.peer = "gone"

    async def send_frame(self, payload: bytes, limit: int) -> None:
        """Raises ProtocolViolation when the payload is longer than `limit` bytes, PeerGone."""
        if len(payload) > limit:
            raise ProtocolViolation(f"a header of {len(payload)} bytes is longer than the limit of {limit}")
        await self.send_bytes(memoryview(_LENGTH.pack(len(payload)) + payload))

    async def receive_frame(self, limit: int) -> bytes:
        """The next message. Allocates nothing before its length is known to be within `limit` bytes."""
        head = bytearray(_LENGTH.size)
        await self.receive_bytes(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > limit:
            raise ProtocolViolation(f"{self.peer} announced a header of {length} bytes; the limit is {limit}")
        payload = bytearray(length)
        await self.receive_bytes(memoryview(payload))
        return bytes(payload)

    async def send_bytes(self, view: memoryview) -> None:
        try:
            await self._loop.sock_sendall(self._sock, view)
        except OSError as error:
            raise PeerGone(f"{self.peer} is gone: {error}") from error

    async def receive_bytes(self, view: memoryview) -> None:
        """Fill the view. The kernel copies into it within this call only, so it may be cancelled at any time."""
        filled = 0
        while filled < len(view):
            try:
                n = await self._loop.sock_recv_into(self._sock, view[filled:])
            except OSError as error:
                raise PeerGone(f"{self.peer} is gone: {error}") from error
            if n == 0:
                raise PeerGone(f"{self.peer} closed the connection")
            filled += n

    def peer_has_closed(self) -> bool:
        """Whether the end of the stream, or an error, is already here. Does not block and takes no data."""
        return self._peek() == b""

    def is_silent(self) -> bool:
        """Whether nothing is here to be read, not even the end. Does not block."""
        return self._peek() is None

    def _peek(self) -> bytes | None:
        """The next byte, empty for the end or an error, None when there is nothing yet."""
        if self.closed:
            return b""
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    def watch(self, on_readable: Callable[[], None]) -> None:
        """Call back while something (data or the end) can be read. Not while a receive is pending."""
        self._loop.add_reader(self._sock.fileno(), on_readable)

    def unwatch(self) -> None:
        if not self.closed:
            self._loop.remove_reader(self._sock.fileno())

    def close(self) -> None:
        if self.closed:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
