"""Block bytes on the connection's own TCP socket, received straight into the caller's buffers. Works everywhere.

Device memory takes a detour through the host, in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from shared.protocol.kv import Carrier
from shared.transport.base import Arrived, Connection, Transport
from shared.transport.buffers import Buffer, check_buffer, copy_to_device, copy_to_host, host_view, is_device, n_bytes
from shared.transport.handshake import Agreement, Side
from shared.transport.stream import Stream


class TcpConnection(Connection):
    carrier: Carrier = "tcp"

    async def _send(self, buffers: Sequence[Buffer]) -> None:
        for buffer in [check_buffer(buffer, writable=False) for buffer in buffers]:
            on_host = await _in_thread(copy_to_host, buffer) if is_device(buffer) else buffer
            await self._stream.send_bytes(host_view(on_host))

    async def _receive(self, buffers: Sequence[Buffer], arrived: Arrived) -> None:
        for number, buffer in enumerate([check_buffer(buffer, writable=True) for buffer in buffers]):
            if is_device(buffer):
                staged = bytearray(n_bytes(buffer))
                await self._stream.receive_bytes(memoryview(staged))
                await _in_thread(copy_to_device, staged, buffer)
            else:
                await self._stream.receive_bytes(host_view(buffer, writable=True))
            arrived(number)

    def close(self) -> None:
        self._stream.close()


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Like asyncio.to_thread, but the thread is never left at work with the caller's buffers, cancelled or not."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


class TcpTransport(Transport):
    kind: Carrier = "tcp"

    def sides(self) -> dict[Carrier, Side]:
        return {"tcp": Side()}

    async def establish(self, stream: Stream, agreement: Agreement, *, accepted: bool) -> Connection:
        return TcpConnection(stream)

    def describe(self) -> str:
        return "tcp"

    async def close(self) -> None:
        return None
