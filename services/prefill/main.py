"""Wires a prefill worker together: bus, engine, KV client, status, metrics."""

from __future__ import annotations

import asyncio

from services.prefill.settings import PrefillSettings
from services.prefill.worker import PrefillWorker
from shared.bus import Bus, BusError
from shared.engine import EngineError
from shared.models import ModelError
from shared.telemetry import LoopLagMonitor, serve_metrics
from shared.telemetry.metrics import PrefillMetrics
from shared.worker.engine_host import BatchSizes, EngineHost
from shared.worker.kv_link import open_kv
from shared.worker.process import run_service
from shared.worker.reporting import Reporter


def main() -> int:
    settings = PrefillSettings()
    return run_service("prefill", settings, lambda stop: serve(settings, stop), (BusError, EngineError, ModelError))


async def serve(settings: PrefillSettings, stop: asyncio.Event) -> None:
    """One prefill worker until `stop`; what it holds then goes back to the queue."""
    metrics = PrefillMetrics(settings.instance)
    metrics_server = serve_metrics(settings.host, settings.metrics_port)
    async with await Bus.connect(settings.nats_url, name=settings.instance) as bus:
        reporter = Reporter("prefill", settings, settings.prefill_slots, metrics_url=metrics_server.url)
        bus.announce(reporter.report)
        sizes = BatchSizes.of_worker(settings.prefill_slots, settings.prefill_chunk_tokens)
        host = await EngineHost.load(settings, settings.model, sizes, metrics.engine)
        async with (
            open_kv(bus, settings, "prefill", settings.transport, metrics.kv) as kv,
            asyncio.TaskGroup() as tasks,
        ):
            beside = [
                tasks.create_task(LoopLagMonitor(metrics.process.event_loop_lag).run()),
                tasks.create_task(bus.watch()),
            ]
            worker = PrefillWorker(bus, host, kv.client, settings, reporter.worker, metrics)
            host.start()
            reporter.ready(host, worker.holdings, lambda: (worker.last_error, worker.last_error_unix_s), kv.describe)
            try:
                await worker.run(stop, reporter.draining)
            finally:
                for task in beside:
                    task.cancel()
                await host.stop()
    metrics_server.close()
