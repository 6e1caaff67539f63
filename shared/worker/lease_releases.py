"""Ends the leases of requests that are over, in the background: a store that hangs holds up no request."""

from __future__ import annotations

import asyncio

import structlog

from shared.blocks import KVClient

MAX_WAITING = 4096

log = structlog.get_logger(__name__)


class LeaseReleases:
    """A bounded queue of leases and, while `run` runs, the one task that ends them.

    What is lost here (a full queue, a worker that stops) costs memory of a store until the lease ends by itself.
    """

    def __init__(self, kv: KVClient) -> None:
        self._kv = kv
        self._waiting: asyncio.Queue[str] = asyncio.Queue(MAX_WAITING)

    async def add(self, lease_id: str) -> None:
        """Have the lease ended soon. Does not wait."""
        try:
            self._waiting.put_nowait(lease_id)
        except asyncio.QueueFull:
            log.warning("lease_left_to_expire", lease_id=lease_id)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._kv.release(await self._waiting.get())
