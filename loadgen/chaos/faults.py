"""Makes faults: kills, stops and restarts processes, cuts and holds connections. When and whom is decided elsewhere."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass, field
from typing import Final

from loadgen.chaos.aiming import Sight
from loadgen.chaos.errors import FaultUnavailable
from loadgen.chaos.proxy import Link
from loadgen.chaos.schedule import Fault
from loadgen.chaos.servers import ServerName, Servers
from loadgen.chaos.stack import Stack
from loadgen.chaos.wave import Flight
from shared.protocol.status import InstanceStatus

SERVER_RESTART_S: Final = 0.5
"""How long a supervisor takes to see that a server is gone and to start it again."""


@dataclass
class Strike:
    """A fault that was made. `over_s`: when it was undone, or when the command that made it returned."""

    fault: Fault
    target: str
    hits: list[Flight]
    at_s: float = field(default_factory=time.monotonic)
    at_unix_s: float = field(default_factory=time.time)
    over_s: float = 0.0


async def strike(stack: Stack, fault: Fault, sight: Sight) -> Strike:
    """Make the fault and undo it. Returns when it is over. Raises FaultUnavailable when its target has gone."""
    target = sight.instance.instance if sight.instance is not None else fault.target
    made = Strike(fault, target, sight.hits)
    if fault.target in ("nats", "valkey"):
        await _strike_server(stack, fault)
    elif fault.act == "cut" and fault.target == "client":
        _cut_clients(sight)
    elif fault.target == "kv":
        for proxy in stack.kv_proxies.values():
            proxy.cut()
    else:
        if sight.instance is None:
            raise FaultUnavailable(f"{fault.name}: no instance")
        await _strike_instance(stack, fault, sight.instance)
    made.over_s = time.monotonic()
    return made


async def _strike_instance(stack: Stack, fault: Fault, status: InstanceStatus) -> None:
    match fault.act:
        case "kill":
            stack.send_signal(status, signal.SIGKILL)
        case "drain":
            stack.send_signal(status, signal.SIGTERM)
        case "stop":
            stack.send_signal(status, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                stack.send_signal(status, signal.SIGCONT)
        case "restart":
            await stack.headrace("restart", status.stage)
        case "cut":
            proxy = _servers(stack, fault).proxies["nats"]
            if not proxy.cut(lambda link: _is_of(link, status)):
                raise FaultUnavailable(f"{fault.name}: {status.instance} has no connection")
        case "stall":
            held = _servers(stack, fault).proxies["nats"].hold(lambda link: _is_of(link, status))
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                for link in held:
                    link.flows.set()
        case "away":
            raise FaultUnavailable(f"{fault.name}: only servers go away")


async def _strike_server(stack: Stack, fault: Fault) -> None:
    name: ServerName = "nats" if fault.target == "nats" else "valkey"
    if stack.servers is not None:
        await stack.servers.crash(name, fault.lasts_s or SERVER_RESTART_S)
    elif fault.act == "kill":
        await stack.headrace("kill", name)
    else:
        raise FaultUnavailable(f"{fault.name}: this stack's servers are not the run's own")


def _cut_clients(sight: Sight) -> None:
    for flight in sight.hits:
        for reading in flight.readings:
            reading.cut_asked = reading.kind == "stream" and reading.gateway >= 0


def _servers(stack: Stack, fault: Fault) -> Servers:
    if stack.servers is None:
        raise FaultUnavailable(f"{fault.name}: this stack has no proxies")
    return stack.servers


def _is_of(link: Link, status: InstanceStatus) -> bool:
    """Services call their connections `headrace-<name>-<process id>`."""
    return link.name.endswith(f"-{status.pid}")
