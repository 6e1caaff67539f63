"""Moves block bytes between processes: one interface, over UCX or plain TCP, with peers that prove a shared secret.

Knows nothing of keys, stores or Redis; that is `shared.blocks`.
"""

from shared.transport.base import Connection, Handler, Transport
from shared.transport.buffers import Buffer, copy_to_host, host_view, is_device, n_bytes
from shared.transport.errors import (
    AddressTaken,
    PeerGone,
    PeerRefused,
    PeerUnreachable,
    ProtocolViolation,
    TransportError,
    TransportUnavailable,
    UnusableBuffer,
)
from shared.transport.listener import Listener
from shared.transport.pick import Preference, pick_transport
from shared.transport.pool import ConnectionPool
from shared.transport.ucx_environment import is_loopback

__all__ = [
    "AddressTaken",
    "Buffer",
    "Connection",
    "ConnectionPool",
    "Handler",
    "Listener",
    "PeerGone",
    "PeerRefused",
    "PeerUnreachable",
    "Preference",
    "ProtocolViolation",
    "Transport",
    "TransportError",
    "TransportUnavailable",
    "UnusableBuffer",
    "copy_to_host",
    "host_view",
    "is_device",
    "is_loopback",
    "n_bytes",
    "pick_transport",
]
