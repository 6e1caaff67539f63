"""An instance that nobody hears of any more ends, on a real NATS server."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus import Bus, BusError
from shared.protocol.status import InstanceStatus


async def test_an_instance_that_cannot_announce_itself_any_more_ends(nats_url: str) -> None:
    """It would serve, and look dead to all others."""

    def report() -> InstanceStatus:
        raise KeyError("no status")

    async with await Bus.connect(nats_url, name="silent") as bus:
        bus.announce(report)
        async with asyncio.timeout(10):
            with pytest.raises(BusError, match="no status"):
                await bus.watch()
