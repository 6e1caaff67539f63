"""Reads a request's body, bounded in bytes and in time, before anything is parsed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from starlette.requests import ClientDisconnect, Request

from services.gateway.errors import ApiError, invalid, too_large

DISCARD_S: Final = 2.0
"""How long an oversize body is taken and thrown away, so that the client reads the refusal instead of a reset."""


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body, however it is framed. Raises ApiError 400, 408 or 413, or starlette's ClientDisconnect."""
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length) > max_bytes:
        await _discard(request)
        raise _oversize(max_bytes)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise invalid("Compressed bodies are not supported.", "content-encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    break
    except TimeoutError as error:
        raise ApiError(408, f"The body did not arrive within {timeout_s:.0f} s.", code="request_timeout") from error
    if len(body) > max_bytes:
        await _discard(request)
        raise _oversize(max_bytes)
    return bytes(body)


async def _discard(request: Request) -> None:
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DISCARD_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _oversize(max_bytes: int) -> ApiError:
    return too_large(f"The request body is larger than {max_bytes} bytes.")
