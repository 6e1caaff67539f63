"""Where Prometheus reads the metrics: an endpoint on a thread for services without HTTP, and bytes for the gateway."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.exposition import choose_encoder

from shared.telemetry.errors import MetricsServerFailed


class MetricsServer:
    """A running endpoint. `url` is complete; `close` frees the port."""

    def __init__(self, server: WSGIServer, thread: threading.Thread, host: str) -> None:
        self._server = server
        self._thread = thread
        self.host = host
        self.port: int = server.server_port

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=1.0)


def serve_metrics(host: str = "127.0.0.1", port: int = 0, registry: CollectorRegistry = REGISTRY) -> MetricsServer:
    """Serve `registry` on a daemon thread. Port 0 takes a free one. Raises MetricsServerFailed."""
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise MetricsServerFailed(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
    return MetricsServer(server, thread, host)


def render_metrics(accept: str = "", registry: CollectorRegistry = REGISTRY) -> tuple[bytes, str]:
    """The metrics and their content type, in the format that the scraper's Accept header prefers."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
