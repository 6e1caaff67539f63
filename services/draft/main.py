"""Wires a drafter together: bus, proposers, status, metrics."""

from __future__ import annotations

import asyncio

from services.draft.service import DraftService
from services.draft.settings import DraftSettings
from services.draft.vocabulary import require_same_vocabulary
from shared.bus import Bus, BusError
from shared.engine import EngineError
from shared.models import ModelError, resolve_model
from shared.telemetry import LoopLagMonitor, serve_metrics
from shared.telemetry.metrics import DraftMetrics, EngineMetrics
from shared.worker.engine_host import BatchSizes, EngineHost
from shared.worker.process import run_service
from shared.worker.reporting import Reporter


def main() -> int:
    settings = DraftSettings()
    return run_service("draft", settings, lambda stop: serve(settings, stop), (BusError, EngineError, ModelError))


async def serve(settings: DraftSettings, stop: asyncio.Event) -> None:
    """One drafter until `stop`. Losing it costs its decode workers speed, nothing else."""
    metrics = DraftMetrics(settings.instance)
    metrics_server = serve_metrics(settings.host, settings.metrics_port)
    async with await Bus.connect(settings.nats_url, name=settings.instance) as bus:
        reporter = Reporter("draft", settings, settings.max_sequences, metrics_url=metrics_server.url)
        bus.announce(reporter.report)
        target = await asyncio.to_thread(resolve_model, settings.model)
        host = await _load_draft_model(settings, metrics.engine) if settings.draft_model else None
        if host is not None:
            require_same_vocabulary(target, host.model)
            host.start()
        service = DraftService(bus, settings, target.name, metrics, host)
        reporter.ready_without_engine(target.name, lambda: len(service), lambda: service.last_error)
        async with asyncio.TaskGroup() as tasks:
            lag = tasks.create_task(LoopLagMonitor(metrics.process.event_loop_lag).run())
            try:
                await service.run(stop)
            finally:
                lag.cancel()
                if host is not None:
                    await host.stop()
    metrics_server.close()


async def _load_draft_model(settings: DraftSettings, metrics: EngineMetrics) -> EngineHost:
    sizes = BatchSizes(settings.draft_slots, settings.draft_batch_tokens)
    return await EngineHost.load(settings, settings.draft_model, sizes, metrics)
