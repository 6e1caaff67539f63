"""What the store says about itself, once a second, to the status board and to Prometheus."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Final, Literal

from services.kvstore.server import StoreServer
from services.kvstore.settings import KVStoreSettings
from services.kvstore.store import BlockStore
from shared.blocks import BlockIndex
from shared.protocol.blocks import Place
from shared.protocol.status import InstanceStatus
from shared.telemetry.metrics import KVStoreMetrics
from shared.transport import Transport

GAUGES_S: Final = 1.0


class StatusReport:
    """Builds the status of the moment. `state` is set by the service's main."""

    def __init__(
        self,
        settings: KVStoreSettings,
        worker: str,
        place: Place,
        store: BlockStore,
        server: StoreServer,
        transport: Transport,
        index: BlockIndex,
        metrics_url: str,
    ) -> None:
        self._settings = settings
        self._worker = worker
        self._place = place
        self._store = store
        self._server = server
        self._transport = transport
        self._index = index
        self._metrics_url = metrics_url
        self._started_unix_s = time.time()
        self.state: Literal["starting", "ready", "draining"] = "starting"

    def __call__(self) -> InstanceStatus:
        self._store.expire(time.monotonic())
        stats = self._store.stats()
        return InstanceStatus(
            stage="kvstore",
            instance=self._settings.instance,
            worker=self._worker,
            pid=os.getpid(),
            host=socket.gethostname(),
            started_unix_s=self._started_unix_s,
            sent_unix_s=time.time(),
            state=self.state,
            running=self._server.transfers,
            blocks_total=stats.slots,
            blocks_used=stats.blocks,
            blocks_evictable=stats.evictable,
            leases=stats.leases,
            transport=self._transport.describe(),
            place=self._place if self.state == "ready" else None,
            metrics_url=self._metrics_url,
            last_error="" if self._index.available else "the block index (Redis) does not answer",
            details={"capacity_gib": stats.capacity_bytes / 2**30, "used_gib": stats.used_bytes / 2**30},
        )


async def update_gauges(store: BlockStore, metrics: KVStoreMetrics) -> None:
    """Until cancelled."""
    evictions = 0
    while True:
        store.expire(time.monotonic())
        stats = store.stats()
        metrics.capacity_bytes.set(stats.capacity_bytes)
        metrics.used_bytes.set(stats.used_bytes)
        metrics.blocks.set(stats.blocks)
        metrics.leases.set(stats.leases)
        metrics.blocks_evicted.inc(stats.evictions - evictions)
        evictions = stats.evictions
        await asyncio.sleep(GAUGES_S)
