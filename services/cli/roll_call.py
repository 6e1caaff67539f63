"""Asks all instances for their status over NATS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from services.cli.overview import Row, merge
from services.cli.spec import SERVERS
from services.cli.stack import Stack
from services.cli.supervisor import ProcessInfo
from shared.bus import Bus
from shared.protocol.status import InstanceStatus
from shared.protocol.subjects import STATUS_PING

NATS_WAIT_S = 2.0
_ANSWER_S = 1.2
"""Instances announce themselves each second and when asked."""
_POLL_S = 0.02


async def call_roll(bus: Bus, processes: Mapping[str, ProcessInfo]) -> list[InstanceStatus]:
    """What every instance says of itself. Returns early when all that run under the supervisor have answered."""
    await bus.client.publish(STATUS_PING, b"")
    expected = {name for name, info in processes.items() if info.pid and name not in SERVERS}
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
        if expected and expected <= {status.instance for status in bus.statuses.live()}:
            break
    return bus.statuses.live()


async def rows_of(stack: Stack) -> list[Row]:
    """All instances of the stack and those that were started elsewhere. Raises BusError without NATS."""
    processes = await asyncio.to_thread(stack.supervisor.processes)
    async with await Bus.connect(stack.spec.nats_url, name="cli", wait_s=NATS_WAIT_S) as bus:
        return merge(processes, await call_roll(bus, processes), time.time(), stack.home.logs)
