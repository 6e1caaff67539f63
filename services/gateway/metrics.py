"""What the gateway measures of one request: its root span, its latencies as the client sees them, how it ended."""

from __future__ import annotations

import time
from typing import Final

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode

from services.gateway.admission import Ticket
from services.gateway.call import GenerationCall
from services.gateway.errors import ApiError
from services.gateway.results import prompt_tokens_of, usage_of
from shared.bus import LogEntry
from shared.protocol.records import Accepted, Api, Ended, FinishReason, Tokens
from shared.telemetry import attributes, inject_headers, trace_ids, tracer
from shared.telemetry.metrics import GatewayMetrics

OPERATIONS: Final[dict[Api, str]] = {"chat": "chat", "completion": "text_completion"}

log = structlog.get_logger(__name__)


class Observation:
    """From a request's arrival to its end at this gateway. Call `close` exactly once.

    The span is the root of the request's trace, or a child of the span that the client's `traceparent` names.
    """

    def __init__(self, metrics: GatewayMetrics, api: Api, model: str, parent: Context) -> None:
        self._metrics = metrics
        self._model = model
        self._arrived_s = time.monotonic()
        self._last_tokens_s: dict[int, float] = {}
        self._choices: list[Accepted] = []
        self._ended: dict[int, Ended] = {}
        self._joined = False
        self._tokens = 0
        self._span = tracer().start_span(f"{OPERATIONS[api]} {model}", context=parent, kind=SpanKind.SERVER)
        self._context = trace.set_span_in_context(self._span)
        self._span.set_attribute(attributes.GEN_AI_OPERATION_NAME, OPERATIONS[api])
        self._span.set_attribute(attributes.GEN_AI_PROVIDER_NAME, "headrace")
        self._span.set_attribute(attributes.STAGE, "gateway")

    def trace_headers(self) -> dict[str, str]:
        """For the messages that carry this request on."""
        return inject_headers(self._context)

    def called(self, call: GenerationCall) -> None:
        for name, value in (
            (attributes.GEN_AI_REQUEST_TEMPERATURE, call.temperature),
            (attributes.GEN_AI_REQUEST_TOP_P, call.top_p),
            (attributes.GEN_AI_REQUEST_TOP_K, call.top_k),
            (attributes.GEN_AI_REQUEST_STREAM, call.stream),
            (attributes.PRIORITY, call.priority),
        ):
            self._span.set_attribute(name, value)
        if call.max_tokens is not None:
            self._span.set_attribute(attributes.GEN_AI_REQUEST_MAX_TOKENS, call.max_tokens)

    def accepted(self, ticket: Ticket, *, user: str) -> None:
        self._choices, self._joined = ticket.choices, ticket.joined
        accepted = ticket.accepted
        prompt_tokens = prompt_tokens_of(self._choices)
        self._span.set_attribute(attributes.GEN_AI_REQUEST_MODEL, accepted.model)
        self._span.set_attribute(attributes.GEN_AI_RESPONSE_ID, accepted.request_id)
        self._span.set_attribute(attributes.GEN_AI_REQUEST_SEED, accepted.seed)
        self._span.set_attribute(attributes.GEN_AI_USAGE_INPUT_TOKENS, prompt_tokens)
        self._span.set_attribute(attributes.REQUEST_ID, accepted.request_id)
        self._span.set_attribute(attributes.TENANT, accepted.tenant)
        if not self._joined:
            self._metrics.prompt_tokens.labels(self._model).inc(prompt_tokens)
        log.info(
            "request_accepted",
            request_id=accepted.request_id,
            tenant=accepted.tenant,
            user=user or None,
            prompt_tokens=prompt_tokens,
            choices=len(self._choices),
            joined=self._joined,
            **trace_ids(self._context),
        )

    def record(self, choice: int, entry: LogEntry) -> None:
        """Count one record of a choice's log, at the moment that it is passed on."""
        record = entry.record
        if isinstance(record, Ended):
            self._ended[choice] = record
        elif isinstance(record, Tokens) and record.ids:
            self._tokens += len(record.ids)
            if self._joined:  # what another request began tells nothing about latency
                return
            now_s = time.monotonic()
            if not self._last_tokens_s:
                self._metrics.ttft.labels(self._model).observe(now_s - self._arrived_s)
                self._span.set_attribute(
                    attributes.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, round(now_s - self._arrived_s, 6)
                )
            if choice in self._last_tokens_s:
                self._metrics.itl.labels(self._model).observe(now_s - self._last_tokens_s[choice])
            self._last_tokens_s[choice] = now_s

    def disconnected(self) -> None:
        self._metrics.disconnects.inc()

    def close(self, error: ApiError | None = None) -> None:
        """The answer is out, or there was none."""
        took_s = time.monotonic() - self._arrived_s
        if not self._choices:
            code = (error.code or str(error.status)) if error is not None else "internal_error"
            self._metrics.rejected.labels(code).inc()
            log.info("request_rejected", code=code, status=error.status if error else 500)
        else:
            reasons = [self._ended[choice].reason for choice in sorted(self._ended)]
            self._metrics.generation_tokens.labels(self._model).inc(self._tokens)
            for reason in reasons:
                self._metrics.finished.labels(self._model, reason).inc()
            if len(reasons) == len(self._choices) and not self._joined:
                self._metrics.e2e.labels(self._model).observe(took_s)
            if reasons:
                self._describe(reasons)
            log.info(
                "request_left",
                request_id=self._choices[0].request_id,
                reason=",".join(dict.fromkeys(reasons)) or None,
                code=error.code if error else None,
                completion_tokens=self._tokens,
                took_s=round(took_s, 3),
                **trace_ids(self._context),
            )
        if error is not None:
            self._span.set_attribute(attributes.ERROR_TYPE, error.code or str(error.status))
            if error.status >= 500:
                self._span.set_status(StatusCode.ERROR, error.code or "")
        self._span.end()

    def _describe(self, reasons: list[FinishReason]) -> None:
        """One finish reason for each choice that has ended, and what all of them used."""
        usage = usage_of((self._choices[choice], ended) for choice, ended in self._ended.items())
        self._span.set_attribute(attributes.GEN_AI_RESPONSE_MODEL, self._model)
        self._span.set_attribute(attributes.GEN_AI_RESPONSE_FINISH_REASONS, reasons)
        self._span.set_attribute(attributes.GEN_AI_USAGE_OUTPUT_TOKENS, usage.completion_tokens)
        self._span.set_attribute(attributes.GEN_AI_USAGE_CACHED_TOKENS, usage.cached_tokens)
        self._span.set_attribute(attributes.DRAFTED_TOKENS, usage.drafted_tokens)
        self._span.set_attribute(attributes.ACCEPTED_TOKENS, usage.accepted_tokens)
