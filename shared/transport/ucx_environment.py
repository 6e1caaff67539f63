"""The one place that sets UCX's environment. UCX reads it when ucxx is imported and when its context is made."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Final

HOST_TLS: Final = "posix,cma,self,tcp"
DEVICE_TLS: Final = "cuda_copy,cuda_ipc"

_DEFAULTS: Final = {
    # With error handling a killed peer is an error; without it, UCX aborts the process that talks to it. Shared memory
    # and cma take part only when these say so; otherwise everything silently goes over TCP.
    "UCX_POSIX_ERROR_HANDLING": "y",
    "UCX_SYSV_ERROR_HANDLING": "y",
    "UCX_CMA_MEMORY_INVALIDATE": "y",
    "UCX_KEEPALIVE_INTERVAL": "1s",
    "UCX_TCP_TX_SEG_SIZE": "1M",
    "UCX_TCP_RX_SEG_SIZE": "1M",
    "UCXX_LOG_LEVEL": "error",
}


def is_loopback(host: str) -> bool:
    """Whether a listener bound to `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def has_cuda_driver() -> bool:
    return os.path.exists("/dev/nvidiactl")


@contextlib.contextmanager
def ucx_environment(host: str, log_descriptor: int) -> Iterator[None]:
    """Set what the user has not set, for as long as UCX is started, so that child processes inherit none of it.

    `host` is what this process binds. UCX logs into the open file `log_descriptor`, unless the user chose a log level.
    """
    values = dict(_DEFAULTS)
    values["UCX_TLS"] = f"{HOST_TLS},{DEVICE_TLS}" if has_cuda_driver() else HOST_TLS
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if is_loopback(host) and loopback is not None:
        # UCX's own sockets stay on loopback too. Between hosts or containers this would make peers unreachable.
        values["UCX_NET_DEVICES"] = loopback
    if "UCX_LOG_LEVEL" not in os.environ:
        values["UCX_LOG_LEVEL"] = "info"
        values["UCX_LOG_FILE"] = f"/proc/self/fd/{log_descriptor}"
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
