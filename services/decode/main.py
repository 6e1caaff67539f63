"""Wires a decode worker together: bus, engine, KV client, status, metrics."""

from __future__ import annotations

import asyncio

from services.decode.settings import DecodeSettings
from services.decode.worker import DecodeWorker
from shared.bus import Bus, BusError
from shared.engine import EngineError
from shared.models import ModelError
from shared.telemetry import LoopLagMonitor, serve_metrics
from shared.telemetry.metrics import DecodeMetrics
from shared.worker.engine_host import BatchSizes, EngineHost
from shared.worker.kv_link import open_kv
from shared.worker.process import run_service
from shared.worker.reporting import Reporter


def main() -> int:
    settings = DecodeSettings()
    return run_service("decode", settings, lambda stop: serve(settings, stop), (BusError, EngineError, ModelError))


async def serve(settings: DecodeSettings, stop: asyncio.Event) -> None:
    """One decode worker until `stop`; what it holds then goes back to the queue."""
    metrics = DecodeMetrics(settings.instance)
    metrics_server = serve_metrics(settings.host, settings.metrics_port)
    async with await Bus.connect(settings.nats_url, name=settings.instance) as bus:
        reporter = Reporter("decode", settings, settings.decode_slots, metrics_url=metrics_server.url)
        bus.announce(reporter.report)
        sizes = BatchSizes.of_worker(settings.decode_slots, settings.decode_batch_tokens, settings.draft_rows)
        host = await EngineHost.load(settings, settings.model, sizes, metrics.engine)
        if settings.speculation == "auto":
            await asyncio.to_thread(host.async_engine.engine.measure_costs)
        async with open_kv(bus, settings, "decode", settings.transport, metrics.kv) as kv, asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(LoopLagMonitor(metrics.process.event_loop_lag).run()),
                tasks.create_task(bus.watch()),
            ]
            worker = DecodeWorker(bus, host, kv.client, settings, reporter.worker, metrics)
            host.start()
            reporter.ready(
                host,
                worker.holdings,
                lambda: (worker.last_error, worker.last_error_unix_s),
                kv.describe,
                worker.speculation.describe,
            )
            try:
                await worker.run(stop, reporter.draining)
            finally:
                for task in beside:
                    task.cancel()
                await host.stop()
    metrics_server.close()
