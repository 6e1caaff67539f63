"""A collector for tests: receives real OTLP over HTTP or gRPC and keeps the spans, for a look at the tree."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]  # no stubs are published with it
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """One span. Ids are hex, times Unix nanoseconds; `parent_id` is empty for a root."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: str
    failed: bool
    attributes: dict[str, Any] = field(default_factory=dict)
    resource: dict[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()
    """(trace id, span id) of each link."""


class OtlpReceiver:
    """What arrived, and the environment that makes a process send its spans here."""

    def __init__(self, endpoint: str, protocol: str) -> None:
        self.endpoint = endpoint
        self.protocol = protocol
        self.requests = 0
        self._changed = threading.Condition()
        self._spans: list[ReceivedSpan] = []

    @property
    def environment(self) -> dict[str, str]:
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._changed:
            return list(self._spans)

    def receive(self, request: service_pb.ExportTraceServiceRequest) -> None:
        with self._changed:
            self._spans.extend(_spans_of(request))
            self._changed.notify_all()

    def wait_for(self, enough: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 20.0) -> list[ReceivedSpan]:
        """The spans, as soon as `enough` of them came. Raises TimeoutError that names what did come."""
        with self._changed:
            if not self._changed.wait_for(lambda: enough(self._spans), timeout_s):
                raise TimeoutError(f"after {timeout_s} s only these spans came: {sorted(s.name for s in self._spans)}")
            return list(self._spans)

    def wait_for_names(self, names: Iterable[str], timeout_s: float = 20.0) -> list[ReceivedSpan]:
        wanted = set(names)
        return self.wait_for(lambda spans: wanted <= {span.name for span in spans}, timeout_s)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of one trace, by start time."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)


def children(spans: Sequence[ReceivedSpan], parent: ReceivedSpan) -> list[ReceivedSpan]:
    return [span for span in spans if span.parent_id == parent.span_id]


def orphans(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
    """Spans whose parent is named but did not come: a broken tree."""
    known = {span.span_id for span in spans}
    return [span for span in spans if span.parent_id and span.parent_id not in known]


def render_tree(spans: Sequence[ReceivedSpan]) -> str:
    """The tree as indented text, siblings by start time, for assertions that fail readably."""
    spans = sorted(spans, key=lambda span: span.start_ns)
    known = {span.span_id for span in spans}

    def lines(parent_id: str, depth: int) -> Iterator[str]:
        for span in spans:
            if span.parent_id == parent_id or (depth == 0 and span.parent_id and span.parent_id not in known):
                yield f"{'  ' * depth}{span.service}: {span.name}"
                yield from lines(span.span_id, depth + 1)

    return "\n".join(lines("", 0))


@contextmanager
def otlp_http_receiver(status: int = 200) -> Iterator[OtlpReceiver]:
    """Receives on a free loopback port until the block ends. Another `status` refuses every batch with it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            answer_status = status if self.path == "/v1/traces" else 404
            receiver.requests += 1
            if answer_status == 200:
                receiver.receive(service_pb.ExportTraceServiceRequest.FromString(body))
            answer = service_pb.ExportTraceServiceResponse().SerializeToString()
            self.send_response(answer_status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_port}", "http/protobuf")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextmanager
def otlp_grpc_receiver() -> Iterator[OtlpReceiver]:
    """The same over gRPC."""

    class Servicer(service_grpc.TraceServiceServicer):
        def Export(self, request: service_pb.ExportTraceServiceRequest, context: Any) -> Any:
            receiver.requests += 1
            receiver.receive(request)
            return service_pb.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    service_grpc.add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    receiver = OtlpReceiver(f"http://127.0.0.1:{port}", "grpc")
    server.start()
    try:
        yield receiver
    finally:
        server.stop(grace=1.0).wait(5)


def _spans_of(request: service_pb.ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for group in request.resource_spans:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    name=span.name,
                    service=resource.get("service.name", ""),
                    instance=resource.get("service.instance.id", ""),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    kind=span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                    failed=span.status.code == 2,
                    attributes=_attributes(span.attributes),
                    resource=resource,
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
