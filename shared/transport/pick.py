"""Chooses this process's transport: UCX where it loads, TCP where it does not, and says so."""

from __future__ import annotations

from typing import Literal

import structlog

from shared.transport.base import Transport
from shared.transport.errors import TransportUnavailable
from shared.transport.tcp import TcpTransport
from shared.transport.ucx import UcxTransport

Preference = Literal["auto", "ucx", "tcp"]

log = structlog.get_logger(__name__)


def pick_transport(preference: Preference = "auto", *, host: str = "127.0.0.1") -> Transport:
    """The transport of a process that binds `host`. Call it on the event loop that will use it; close it at the end.

    `auto` falls back to TCP with a warning. `ucx` raises TransportUnavailable instead.
    """
    if preference == "tcp":
        return TcpTransport()
    try:
        return UcxTransport.open(host)
    except TransportUnavailable as error:
        if preference == "ucx":
            raise
        log.warning("transport_fell_back", to="tcp", reason=str(error))
        return TcpTransport()
