"""Small programs for the telemetry tests, each a process of its own as services are. Usage: NAME [JSON arguments]."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import logging.config
import subprocess
import sys
import threading
import time
from typing import Any

import structlog
from opentelemetry.sdk.trace import ReadableSpan

from shared.telemetry import attributes as names
from shared.telemetry import (
    configure_logging,
    extract_context,
    inject_headers,
    links_to,
    record_span,
    setup_tracing,
    shutdown_tracing,
    tracer,
)

log = structlog.get_logger("telemetry_program")


def run_next(name: str, headers: dict[str, str], **arguments: Any) -> None:
    command = [sys.executable, __file__, name, json.dumps({"headers": headers, **arguments})]
    subprocess.run(command, check=True, timeout=60)


def gateway() -> None:
    """The root: hands its context to prefill as message headers."""
    configure_logging("gateway", "gateway-0", format="json")
    setup_tracing("gateway", "gateway-0")
    attributes = {
        names.GEN_AI_OPERATION_NAME: "chat",
        names.REQUEST_ID: "req-1",
        names.GEN_AI_RESPONSE_FINISH_REASONS: ["stop"],
    }
    with tracer().start_as_current_span("chat smollm2", attributes=attributes):
        log.info("request_accepted", request_id="req-1")
        run_next("prefill", inject_headers(), published_s=time.time())
    shutdown_tracing(10)


def prefill(headers: dict[str, str], published_s: float) -> None:
    configure_logging("prefill", "prefill-0", format="json")
    setup_tracing("prefill", "prefill-0")
    context = extract_context(headers)
    record_span("queue", published_s, time.time(), context=context, attributes={names.STAGE: "prefill"})
    with tracer().start_as_current_span("prefill", context=context):
        with tracer().start_as_current_span("prefill chunk", attributes={names.CHUNK_INDEX: 0}):
            pass
        first = tracer().start_span("decode", context=context)
        first.set_attribute(names.EPOCH, 1)
        first.end()
        attempt = {
            "traceparent": f"00-{first.get_span_context().trace_id:032x}-{first.get_span_context().span_id:016x}-01"
        }
        run_next("decode", inject_headers(context), attempt=attempt)
    shutdown_tracing(10)


def decode(headers: dict[str, str], attempt: dict[str, str]) -> None:
    """A redelivery: same parent, and a link to the attempt that failed."""
    configure_logging("decode", "decode-1", format="json")
    setup_tracing("decode", "decode-1")
    links = links_to(extract_context(attempt))
    with tracer().start_as_current_span("decode", context=extract_context(headers), links=links) as span:
        span.set_attribute(names.EPOCH, 2)
        log.info("claimed", request_id="req-1", epoch=2)
    shutdown_tracing(10)


def state() -> None:
    """What tracing costs and does in this environment."""
    setup_tracing("decode", "decode-0")
    with tracer().start_as_current_span("work", context=extract_context(REMOTE)) as span:
        report = {
            "recording": span.is_recording(),
            "headers": inject_headers(),
            "threads": threading.active_count(),
            "exporters": sorted(name for name in sys.modules if name.startswith("opentelemetry.exporter")),
        }
    print(json.dumps(report))
    shutdown_tracing(5)


REMOTE = {"TraceParent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def flood(spans: int) -> None:
    """Make many spans, whatever the collector does, then stop with little patience."""
    configure_logging("decode", "decode-0", format="json")
    setup_tracing("decode", "decode-0")
    for number in range(spans):
        with tracer().start_as_current_span("step", attributes={"number": number}):
            pass
    kept = sum(isinstance(thing, ReadableSpan) for thing in gc.get_objects())
    flushed = shutdown_tracing(1.0)
    log.info("flooded", kept=kept, flushed=flushed)


def logs() -> None:
    """One line of each kind that a service writes."""
    configure_logging("decode", "decode-0", format="json")
    setup_tracing("decode", "decode-0")
    with tracer().start_as_current_span("decode"):
        log.info("claimed", request_id="req-1", prompt="SECRET-PROMPT", job={"prompt_ids": "SECRET-PROMPT"})
        logging.getLogger("nats.aio.client").warning("slow consumer on %s", "hr.live.x")
        try:
            json.loads("SECRET-PROMPT")
        except ValueError:
            log.exception("refused", request_id="req-1")
    logging.getLogger("httpx").info("HTTP Request: SECRET-PROMPT")
    log.debug("not_shown")
    shutdown_tracing(5)


async def serve(port: int) -> None:
    """A uvicorn server that answers one request and ends."""
    import uvicorn  # noqa: PLC0415 - the other programs start faster without it
    from fastapi import FastAPI  # noqa: PLC0415

    logging.config.dictConfig(uvicorn.config.LOGGING_CONFIG)  # a set-up of its own, that ours must replace
    configure_logging("gateway", "gateway-0", format="json")
    app = FastAPI()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))

    @app.get("/")
    async def index() -> str:
        server.should_exit = True
        raise RuntimeError("broken handler")

    await server.serve()


if __name__ == "__main__":
    name, arguments = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    result = globals()[name](**arguments)
    if asyncio.iscoroutine(result):
        asyncio.run(result)
