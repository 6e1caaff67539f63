"""Wires the KV store together: pool, server, index upkeep, status, metrics. Listens well within a second."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog

from services.kvstore.lease_audit import LeaseAudit
from services.kvstore.memory import available_bytes
from services.kvstore.server import StoreServer
from services.kvstore.settings import KVStoreSettings
from services.kvstore.slabs import SlabPool
from services.kvstore.status import StatusReport, update_gauges
from services.kvstore.store import BlockStore
from services.kvstore.upkeep import IndexUpkeep
from shared.blocks import BlockIndex
from shared.bus import Bus, BusError, new_worker_id
from shared.protocol.blocks import Place
from shared.telemetry import LoopLagMonitor, TelemetryError, serve_metrics
from shared.telemetry.metrics import KVStoreMetrics
from shared.transport import Listener, Transport, TransportError, is_loopback, pick_transport
from shared.worker.process import StartupError, run_service

GIB: Final = 1 << 30
PREFAULT_BYTES: Final = 2 << 20
"""One huge page, about half a millisecond of the event loop."""
PREFAULT_PAUSE_S: Final = 0.005
DRAIN_S: Final = 5.0

log = structlog.get_logger(__name__)


def main() -> int:
    settings = KVStoreSettings()
    return run_service(
        "kvstore", settings, lambda stop: serve(settings, stop), (BusError, TelemetryError, TransportError)
    )


async def serve(settings: KVStoreSettings, stop: asyncio.Event) -> None:
    """One KV store until `stop`. Transfers in work may end then, and the index forgets this store."""
    _check_secret(settings)
    pool = _make_pool(settings)
    store = BlockStore(pool, max_leases=settings.store_max_leases, max_lease_s=settings.store_max_lease_s)
    metrics = KVStoreMetrics(settings.instance)
    server = StoreServer(store, metrics, fault_injection=settings.store_fault_injection)
    async with contextlib.AsyncExitStack() as stack:
        transport = pick_transport(settings.transport, host=settings.host)
        stack.push_async_callback(transport.close)
        listener = await stack.enter_async_context(_listener(settings, transport, server))
        worker = new_worker_id(settings.instance)
        place = Place(settings.instance, settings.reachable_host, listener.port, transport.kind)
        index = BlockIndex(settings.redis_url)
        stack.push_async_callback(index.close)
        upkeep = IndexUpkeep(store, index, place, worker, metrics)
        stack.push_async_callback(upkeep.withdraw)
        metrics_server = serve_metrics(settings.host, settings.metrics_port)
        stack.callback(metrics_server.close)
        bus = await stack.enter_async_context(await Bus.connect(settings.nats_url, name=settings.instance))
        report = StatusReport(settings, worker, place, store, server, transport, index, metrics_server.url)
        audit = LeaseAudit(store, bus, metrics, rest_s=settings.store_lease_rest_s)
        await bus.on_cancel(audit.on_cancel)
        report.state = "ready"
        bus.announce(report)
        log.info("store_ready", host=settings.host, port=listener.port, transport=transport.kind)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(upkeep.run()),
                tasks.create_task(audit.run()),
                tasks.create_task(update_gauges(store, metrics)),
                tasks.create_task(LoopLagMonitor(metrics.process.event_loop_lag).run()),
                tasks.create_task(bus.watch()),
            ]
            if settings.store_prefault:
                background.append(tasks.create_task(_prefault(pool)))
            await stop.wait()
            report.state = "draining"
            await listener.stop_accepting()
            await server.drain(DRAIN_S)
            for task in background:
                task.cancel()


def _check_secret(settings: KVStoreSettings) -> None:
    """Anybody who reaches the port proves an empty secret."""
    if settings.secret.get_secret_value():
        return
    if not is_loopback(settings.host):
        raise StartupError(f"listening on {settings.host} needs HEADRACE_SECRET, the same for all services")
    log.warning("secret_is_empty", hint="every process of this machine can read and write blocks; set HEADRACE_SECRET")


def _make_pool(settings: KVStoreSettings) -> SlabPool:
    wanted = int(settings.store_memory_gib * GIB)
    available = available_bytes()
    if available is not None and wanted > available:
        raise StartupError(
            f"{available / GIB:.1f} GiB of memory are available, {settings.store_memory_gib:g} GiB are wanted; "
            "set HEADRACE_STORE_MEMORY_GIB"
        )
    return SlabPool(wanted)


def _listener(settings: KVStoreSettings, transport: Transport, server: StoreServer) -> Listener:
    return Listener(
        transport,
        server.serve,
        settings.secret.get_secret_value().encode(),
        host=settings.host,
        port=settings.store_port,
        max_connections=settings.store_max_connections,
    )


async def _prefault(pool: SlabPool) -> None:
    """Touch the pool's pages bit by bit, so that neither the start nor the first puts wait for the kernel."""
    offset = 0
    while pool.populate(offset, PREFAULT_BYTES):
        offset += PREFAULT_BYTES
        await asyncio.sleep(PREFAULT_PAUSE_S)
