"""A worker's end of the KV plane: transport, index and client, opened and closed together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.blocks import BlockIndex, KVClient
from shared.bus import Bus
from shared.protocol.blocks import Place
from shared.protocol.subjects import Stage
from shared.settings import CommonSettings
from shared.telemetry.metrics import KVTransferMetrics
from shared.transport import Preference, Transport, pick_transport


@dataclass(frozen=True)
class KVLink:
    """`describe` names the transport in use, for the status."""

    client: KVClient
    transport: Transport

    def describe(self) -> str:
        return self.transport.describe()


@asynccontextmanager
async def open_kv(
    bus: Bus, settings: CommonSettings, stage: Stage, preference: Preference, metrics: KVTransferMetrics
) -> AsyncIterator[KVLink]:
    """Live stores come from the status board, so stores may join and leave at any time."""

    def stores() -> list[Place]:
        return [s.place for s in bus.statuses.live("kvstore") if s.place is not None and s.state == "ready"]

    transport = pick_transport(preference, host=settings.host)
    index = BlockIndex(settings.redis_url)
    client = KVClient(stores, transport, settings.secret.get_secret_value(), index, stage=stage, metrics=metrics)
    try:
        yield KVLink(client, transport)
    finally:
        client.close()
        await index.close()
        await transport.close()
