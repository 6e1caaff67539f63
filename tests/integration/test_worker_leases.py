"""Leases of running requests are kept, and taken again where they were lost. They are ended in the background: nobody
waits for a store that does not answer, and what waits is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shared.blocks import KVClient
from shared.protocol.blocks import Place
from shared.transport.tcp import TcpTransport
from shared.worker import lease_releases
from shared.worker.lease_releases import LeaseReleases
from tests.integration.kv_harness import eventually
from tests.integration.pipeline_harness import BLOCK, Gate, Pipeline, pipeline_on, text
from tests.unit.engine_harness import tiny_model


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


@pytest_asyncio.fixture
async def pipeline(tmp_path: Path, nats_url: str, redis_url: str) -> AsyncIterator[Pipeline]:
    async with pipeline_on(nats_url, redis_url, tiny_model(tmp_path / tmp_path.name)) as made:
        yield made


async def test_a_lease_that_ended_under_a_running_request_is_taken_again(pipeline: Pipeline) -> None:
    """As after a job that waited for a successor for longer than its dead holder's lease lasts."""
    await pipeline.prefill()
    decode = await pipeline.decode(lease_s=1.5)
    gate = Gate(decode.host)
    request = await pipeline.submit(text(1, 6 * BLOCK + 5))
    await gate.until_begun(1)  # what was loaded is loaded, and nothing is put before this step ends
    place = pipeline.running_store.place

    async def leased() -> bool:
        stats = await decode.kv.stats(place)
        return stats is not None and (stats.leases, stats.blocks, stats.evictable) == (1, 7, 0)

    await eventually(leased)
    await decode.kv.release(request.request_id)
    await eventually(leased)
    gate.open()
    await pipeline.until_ended(request)

    async def released() -> bool:
        stats = await decode.kv.stats(place)
        return stats is not None and stats.leases == 0

    await eventually(released)


async def test_a_store_that_is_away_is_asked_for_renewals_only(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pipeline.prefill()
    decode = await pipeline.decode(lease_s=1.5)
    gate = Gate(decode.host)
    request = await pipeline.submit(text(1, 6 * BLOCK + 5))
    await gate.until_begun(1)
    await pipeline.close_store()
    asked: list[str] = []

    def noted(name: str) -> None:
        method = getattr(decode.kv, name)

        async def note(*args: Any, **options: Any) -> Any:
            asked.append(name)
            return await method(*args, **options)

        monkeypatch.setattr(decode.kv, name, note)

    noted("renew")
    noted("lease")

    async def renewed() -> bool:
        return asked.count("renew") >= 3

    await eventually(renewed)
    assert set(asked) == {"renew"}
    gate.open()
    await pipeline.until_ended(request)
