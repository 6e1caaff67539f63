"""Wires a drafter together: bus, proposers, status, metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from services.draft.service import DraftService
from services.draft.settings import DraftSettings
from shared.bus import Bus, BusError
from shared.models import ModelError, ModelFiles, resolve_model
from shared.models.drafts import draft_of
from shared.telemetry import LoopLagMonitor, serve_metrics
from shared.telemetry.metrics import DraftMetrics, EngineMetrics
from shared.worker.process import run_service
from shared.worker.reporting import Reporter

if TYPE_CHECKING:
    from services.draft.draft_model import DraftModel

log = structlog.get_logger(__name__)


def main() -> int:
    settings = DraftSettings()
    return run_service("draft", settings, lambda stop: serve(settings, stop), (BusError, ModelError))


async def serve(settings: DraftSettings, stop: asyncio.Event) -> None:
    """One drafter until `stop`. Losing it costs its decode workers speed, nothing else."""
    metrics = DraftMetrics(settings.instance)
    metrics_server = serve_metrics(settings.host, settings.metrics_port)
    async with await Bus.connect(settings.nats_url, name=settings.instance) as bus:
        reporter = Reporter("draft", settings, settings.max_sequences, metrics_url=metrics_server.url)
        bus.announce(reporter.report)
        target = await asyncio.to_thread(resolve_model, settings.model)
        draft_model = await _load_draft_model(settings, target, metrics.engine)
        service = DraftService(bus, settings, target.name, metrics, draft_model)
        reporter.ready_without_engine(
            target.name,
            lambda: len(service),
            lambda: (service.last_error, service.last_error_unix_s),
            # Decode asks those only that would answer.
            lambda: {"speculation": "off"} if settings.speculation == "off" else {},
        )
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(LoopLagMonitor(metrics.process.event_loop_lag).run()),
                tasks.create_task(bus.watch()),
            ]
            if draft_model is not None:
                beside.append(tasks.create_task(draft_model.exit_when_broken(settings.stall_s)))
            try:
                if settings.speculation == "off":
                    log.info("speculation_off")
                    await stop.wait()
                else:
                    await service.run(stop)
            finally:
                for task in beside:
                    task.cancel()
                if draft_model is not None:
                    await draft_model.stop()
    metrics_server.close()


async def _load_draft_model(settings: DraftSettings, target: ModelFiles, metrics: EngineMetrics) -> DraftModel | None:
    """None where there are only lookups. Only a draft model that was asked for by name must be there."""
    name = draft_of(settings.model) if settings.draft_model == "auto" else settings.draft_model
    if not name or settings.speculation == "off":
        return None
    try:
        await asyncio.to_thread(resolve_model, name)
    except ModelError as error:
        if settings.draft_model != "auto":
            raise
        log.warning("shipped_draft_not_usable", draft=name, error=str(error))
        return None
    from services.draft.draft_model import DraftModel  # noqa: PLC0415 - torch, only where a model drafts

    return await DraftModel.load(settings, name, target, metrics)
