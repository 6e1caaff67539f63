"""Block bytes on the connection's own TCP socket, received straight into the caller's buffers. Works everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from shared.protocol.kv import Carrier
from shared.transport.base import Arrived, Connection, Transport
from shared.transport.buffers import Buffer, host_view
from shared.transport.handshake import Agreement, Side
from shared.transport.stream import Stream


class TcpConnection(Connection):
    carrier: Carrier = "tcp"

    async def _send(self, buffers: Sequence[Buffer]) -> None:
        for view in [host_view(buffer) for buffer in buffers]:
            await self._stream.send_bytes(view)

    async def _receive(self, buffers: Sequence[Buffer], arrived: Arrived) -> None:
        for number, view in enumerate([host_view(buffer, writable=True) for buffer in buffers]):
            await self._stream.receive_bytes(view)
            arrived(number)

    def close(self) -> None:
        self._stream.close()


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
