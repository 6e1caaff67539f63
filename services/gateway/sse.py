"""Server-sent events on an ASGI connection: the headers, and sending with a bound on the client's slowness."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Receive, Send

from services.gateway.follow import ClientGone

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


class SseConnection:
    """One streaming response. Raises ClientGone when the client takes nothing for `send_timeout_s`."""

    def __init__(self, send: Send, send_timeout_s: float) -> None:
        self._send = send
        self._send_timeout_s = send_timeout_s

    async def open(self, headers: Mapping[str, str]) -> None:
        extra = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *extra]})

    async def write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except (TimeoutError, OSError) as error:
            raise ClientGone from error

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
