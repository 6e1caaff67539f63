"""Traces, metrics and logs of a service. A dead backend costs data, never a request. Imports nothing else of ours."""

from shared.telemetry.errors import MetricsServerFailed, TelemetryError
from shared.telemetry.logging import configure_logging
from shared.telemetry.loop_lag import LoopLagMonitor
from shared.telemetry.metrics_server import MetricsServer, render_metrics, serve_metrics
from shared.telemetry.tracing import (
    extract_context,
    inject_headers,
    links_to,
    record_span,
    setup_tracing,
    shutdown_tracing,
    trace_ids,
    tracer,
    tracing_configured,
)

__all__ = [
    "LoopLagMonitor",
    "MetricsServer",
    "MetricsServerFailed",
    "TelemetryError",
    "configure_logging",
    "extract_context",
    "inject_headers",
    "links_to",
    "record_span",
    "render_metrics",
    "serve_metrics",
    "setup_tracing",
    "shutdown_tracing",
    "trace_ids",
    "tracer",
    "tracing_configured",
]
