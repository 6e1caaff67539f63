"""Traces: one OTLP exporter chosen by the standard OTEL_ variables, and the trace context in message headers.

Without an endpoint nothing is recorded, and a traceparent that came in still goes out. A collector that is slow or
dead costs dropped spans: export happens on one background thread behind a bounded queue.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Final

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_log = structlog.get_logger(__name__)

SCHEDULE_DELAY_MS: Final = 1000
"""How long a span waits to be sent, unless OTEL_BSP_SCHEDULE_DELAY says otherwise: what a kill -9 may lose."""

_REPEAT_S: Final = 60.0
_NOISY_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "urllib3.connectionpool",
)

_propagator = TraceContextTextMapPropagator()
_provider: TracerProvider | None = None


class _OncePerMinute(logging.Filter):
    """Lets one line per minute of each source line through, so that a dead collector does not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key, now_s = (record.pathname, record.lineno), time.monotonic()
        if now_s - self._last_s.get(key, -_REPEAT_S) < _REPEAT_S:
            return False
        self._last_s[key] = now_s
        return True


def setup_tracing(service: str, instance: str) -> None:
    """Start exporting spans of this process, if the environment names a collector. A second call does nothing.

    Read: OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER (`otlp` or `none`), OTEL_EXPORTER_OTLP_[TRACES_]ENDPOINT and _PROTOCOL
    (`http/protobuf`, the default, or `grpc`), OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
    OTEL_BSP_* and the exporters' own (headers, time-out, certificates, compression). A value that cannot be used is
    logged and ignored, as the specification asks: telemetry never keeps a service from starting.
    """
    global _provider  # noqa: PLW0603  (one provider per process, as in the OpenTelemetry API itself)
    if _provider is not None or not tracing_configured():
        return
    try:
        exporter = _make_exporter(_setting("PROTOCOL") or "http/protobuf")
        processor = BatchSpanProcessor(
            exporter,
            schedule_delay_millis=None if os.environ.get("OTEL_BSP_SCHEDULE_DELAY") else SCHEDULE_DELAY_MS,
        )
    except Exception as error:  # a bad certificate path, an exporter that is not installed, a queue size of zero
        _log.warning("tracing_not_started", endpoint=_setting("ENDPOINT"), error=repr(error))
        return
    repeats = _OncePerMinute()
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).addFilter(repeats)
    _provider = TracerProvider(resource=_resource(service, instance), shutdown_on_exit=False)
    _provider.add_span_processor(processor)
    trace.set_tracer_provider(_provider)
    _log.info("tracing_started", endpoint=_setting("ENDPOINT"), exporter=type(exporter).__module__.split(".")[-2])


def shutdown_tracing(timeout_s: float = 3.0) -> bool:
    """Send what is queued and stop; blocks for at most `timeout_s`. True when that was time enough."""
    provider = _provider
    if provider is None:
        return True
    # The SDK's own shutdown waits up to 30 s for a silent collector. The thread is a daemon: exit does not wait for it.
    closer = threading.Thread(target=provider.shutdown, name="tracing-shutdown", daemon=True)
    closer.start()
    closer.join(timeout_s)
    return not closer.is_alive()


def tracing_configured() -> bool:
    """Whether the environment asks for traces."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() not in ("", "otlp"):
        return False
    return bool(_setting("ENDPOINT"))


def tracer(name: str = "headrace") -> Tracer:
    """The tracer to start spans with. Safe at import time: it follows a later `setup_tracing`."""
    return trace.get_tracer(name)


def inject_headers(ctx: Context | None = None) -> dict[str, str]:
    """W3C headers (`traceparent`, `tracestate`) of `ctx`, or of the current span; empty when there is no trace."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, context=ctx)
    return headers


def extract_context(headers: Mapping[str, str] | None) -> Context:
    """The remote context that message or HTTP headers carry. Empty (a new trace) when absent or malformed."""
    carrier = {key.lower(): value for key, value in (headers or {}).items() if key.lower() in _propagator.fields}
    return _propagator.extract(carrier, context=Context())


def links_to(*contexts: Context | None) -> list[Link]:
    """Links to the spans of these contexts: they tie redelivered work to the attempt before it. Skips invalid ones."""
    spans = (trace.get_current_span(context).get_span_context() for context in contexts if context is not None)
    return [Link(span) for span in spans if span.is_valid]


def trace_ids(ctx: Context | None = None) -> dict[str, str]:
    """`trace_id` and `span_id` in hex of `ctx`, or of the current span, to bind to a logger; empty without a trace."""
    span = trace.get_current_span(ctx).get_span_context()
    if not span.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}


def record_span(
    name: str,
    start_unix_s: float,
    end_unix_s: float,
    *,
    context: Context | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    links: Sequence[Link] = (),
    kind: SpanKind = SpanKind.INTERNAL,
) -> SpanContext:
    """Record a span that was timed elsewhere, such as a wait in a queue. Times are Unix seconds.

    The start may come from another machine's clock; an end before it is moved to it, so that no span is negative.
    """
    start_ns = int(start_unix_s * 1e9)
    span = tracer().start_span(
        name, context=context, kind=kind, attributes=attributes, links=list(links), start_time=start_ns
    )
    span.end(max(start_ns, int(end_unix_s * 1e9)))
    return span.get_span_context()


def _setting(what: str) -> str:
    """A setting of the exporter: the variable for traces wins over the one for all signals."""
    for name in (f"OTEL_EXPORTER_OTLP_TRACES_{what}", f"OTEL_EXPORTER_OTLP_{what}"):
        if value := os.environ.get(name, "").strip():
            return value
    return ""


def _make_exporter(protocol: str) -> SpanExporter:
    # Imported here: grpc takes 0.2 s and 30 MB, and a process without a collector needs neither.
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter  # noqa: PLC0415

        return GrpcExporter()
    if protocol != "http/protobuf":
        _log.warning("trace_protocol_unknown", protocol=protocol, used="http/protobuf")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter  # noqa: PLC0415

    return HttpExporter()


def _resource(service: str, instance: str) -> Resource:
    return Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"headrace-{service}",
            "service.namespace": "headrace",
            "service.instance.id": instance,
            "service.version": metadata.version("headrace"),
            "headrace.stage": service,
        }
    )
