"""Checks before anything is started: free ports, disk, memory. Each failure is one line that says what to change."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from services.cli.errors import PortInUse, TooLittle
from services.cli.spec import StackSpec

STORE_BYTES = 500_000_000
"""Room for the NATS store and the logs of an ordinary day."""
_PROCESS_BYTES = 350_000_000
"""Code and libraries of one torch process."""
_LIGHT_PROCESS_BYTES = 100_000_000
_LOADING_FACTOR = 2.0
"""Weights as read and weights as packed are in memory together while a worker loads."""


@dataclass(frozen=True)
class Port:
    """A port that the stack will listen on, and the variables that move it."""

    number: int
    what: str
    remedy: str


def stack_ports(spec: StackSpec) -> list[Port]:
    ports = []
    if "nats" in spec.servers:
        remedy = "set HEADRACE_NATS_PORT, or HEADRACE_NATS_URL to use a server that runs already"
        ports.append(Port(spec.nats_port, "the embedded NATS server", remedy))
    if "valkey" in spec.servers:
        remedy = "set HEADRACE_REDIS_PORT, or HEADRACE_REDIS_URL to use a server that runs already"
        ports.append(Port(spec.redis_port, "the embedded Valkey server", remedy))
    ports += [gateway_port(spec, number) for number in range(spec.counts.get("gateway", 0))]
    return ports


def gateway_port(spec: StackSpec, number: int) -> Port:
    return Port(spec.gateway_port + number, f"gateway-{number}", "set HEADRACE_PORT")


def require_free(ports: Iterable[Port]) -> None:
    """Raises PortInUse for the first port that cannot be bound, and names its holder where that can be seen."""
    taken: dict[int, Port] = {}
    for port in ports:
        if port.number in taken:
            other = taken[port.number].what
            raise PortInUse(f"port {port.number} cannot be for {other} and for {port.what}; {port.remedy}")
        taken[port.number] = port
        if not _can_bind(port.number):
            raise PortInUse(f"port {port.number} for {port.what} is in use{_holder(port.number)}; {port.remedy}")


def require_disk(home: Path) -> None:
    free = shutil.disk_usage(home).free
    if free < STORE_BYTES:
        raise TooLittle(
            f"{free / 1e9:.1f} GB are free in {home}, {STORE_BYTES / 1e9:.1f} GB are needed; "
            "make room or set HEADRACE_HOME"
        )


def memory_needed(
    spec: StackSpec, *, weights_bytes: int, draft_weights_bytes: int, kv_memory_gib: float, store_memory_gib: float
) -> int:
    """Bytes that the stack will have in use at most, estimated from the sizes of the weights on disk."""
    workers = spec.counts.get("prefill", 0) + spec.counts.get("decode", 0)
    worker_bytes = _PROCESS_BYTES + weights_bytes * _LOADING_FACTOR + kv_memory_gib * (1 << 30)
    draft_bytes = _PROCESS_BYTES + draft_weights_bytes * _LOADING_FACTOR
    stores_bytes = spec.counts.get("kvstore", 0) * (_LIGHT_PROCESS_BYTES + store_memory_gib * (1 << 30))
    rest_bytes = (spec.counts.get("gateway", 0) + len(spec.servers)) * _LIGHT_PROCESS_BYTES
    return int(workers * worker_bytes + spec.counts.get("draft", 0) * draft_bytes + stores_bytes + rest_bytes)


def require_memory(needed_bytes: int) -> None:
    available = psutil.virtual_memory().available
    if available < needed_bytes:
        raise TooLittle(
            f"{available / 1e9:.1f} GB of memory are available, about {needed_bytes / 1e9:.1f} GB are needed; "
            "set HEADRACE_KV_MEMORY_GIB lower, choose a smaller HEADRACE_MODEL or start fewer instances"
        )


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:
        return ""  # other users' processes may not be looked at
    return ""
