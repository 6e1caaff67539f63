"""The HTTP server: a socket bound early, and a stop that lets running answers end."""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType
from typing import Final

import structlog
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.answers import error_response
from services.gateway.errors import overloaded
from services.gateway.gateway import Gateway
from services.gateway.port_sharing import may_share, prefer_newest, share

LET_GO_S: Final = 5.0
"""How long clients that were told to go elsewhere may take to do so."""

CONNECTIONS_PER_GENERATION: Final = 16
"""Far more than have a slot: a client that is refused is to be told so by us, with the time to come again."""

KEEP_ALIVE_S: Final = 75
"""Longer than clients keep idle connections (httpx: 5 s), so that none is closed in the moment of its next request."""

log = structlog.get_logger(__name__)


class PortTaken(Exception):
    """The address cannot be bound. The message is one line and says what to do."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises PortTaken.

    A gateway of the same stack may have the port too: while one restarts, another stands in for it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if port and may_share(host, port):
            share(listener)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortTaken(
            f"cannot listen on {host}:{port}: {error.strerror or error}; stop what uses it or set HEADRACE_PORT"
        ) from error
    return listener


class GatewayServer(uvicorn.Server):
    """uvicorn, with a stop in two steps.

    After SIGTERM no connection is taken any more and running answers go on for `drain_s`. What runs then is let go: its
    client is told to follow the request elsewhere, and the request itself goes on. A second signal ends this at once.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        settings = gateway.settings
        super().__init__(
            uvicorn.Config(
                self._serve_bounded,
                interface="asgi3",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(settings.drain_s + LET_GO_S) + 1,
            )
        )
        self._app = app
        self._gateway = gateway
        self._most_connections = CONNECTIONS_PER_GENERATION * settings.max_concurrent + 64

    async def _serve_bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, as long as there are not too many connections. uvicorn's own bound would answer without a
        word on when to come again.
        """
        if len(self.server_state.connections) < self._most_connections:
            await self._app(scope, receive, send)
            return
        refusal = overloaded(
            503,
            "gateway_overloaded",
            f"This gateway has {self._most_connections} connections or more; try again or use another.",
            self._gateway.limits.backlog.retry_after_s(),
        )
        refusal.headers["Connection"] = "close"
        await error_response(refusal)(scope, receive, send)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn in the signal handler."""
        if self.should_exit:
            self.force_exit = True
            return
        log.info("stopping", signal=signal.Signals(sig).name, running=self._gateway.limits.active)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            prefer_newest(listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.draining.set()
        loop = asyncio.get_running_loop()
        let_go = loop.call_later(self._gateway.settings.drain_s, self._gateway.stopping.set)
        try:
            await super().shutdown(sockets)
        finally:
            let_go.cancel()
