"""Leases are ended in the background: nobody waits for a store that does not answer, and what waits is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.blocks import KVClient
from shared.protocol.blocks import Place
from shared.transport.tcp import TcpTransport
from shared.worker import lease_releases
from shared.worker.lease_releases import LeaseReleases
from tests.integration.kv_harness import eventually


@asynccontextmanager
async def silent_store() -> AsyncIterator[tuple[KVClient, list[int]]]:
    """A client of a store that takes connections and says nothing, and who has connected."""
    connected: list[int] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(len(connected))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    place = Place("silent", "127.0.0.1", server.sockets[0].getsockname()[1], "tcp")
    client = KVClient(lambda: [place], TcpTransport(), "secret", None)
    yield client, connected
    client.close()
    server.close()


async def test_whoever_has_a_lease_ended_waits_for_no_store() -> None:
    async with silent_store() as (client, connected):
        releases = LeaseReleases(client)
        running = asyncio.create_task(releases.run())
        try:
            async with asyncio.timeout(1):  # half of what one store may take to answer
                for number in range(100):
                    await releases.add(f"lease-{number}")

            async def asked() -> bool:
                return bool(connected)

            await eventually(asked)
        finally:
            running.cancel()
            await asyncio.wait({running})


async def test_what_does_not_fit_is_left_to_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_releases, "MAX_WAITING", 2)
    async with silent_store() as (client, _):
        releases = LeaseReleases(client)
        async with asyncio.timeout(1):
            for number in range(5):
                await releases.add(f"lease-{number}")
        assert releases._waiting.qsize() == 2
