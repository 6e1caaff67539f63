"""Waits until a freshly launched stack answers, watches for instances that keep dying meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import httpx

from services.cli.errors import StartFailed
from services.cli.log_files import last_complaint
from services.cli.overview import Row, merge
from services.cli.stack import Stack
from services.cli.supervisor import ProcessInfo
from shared.bus import Bus
from shared.protocol.subjects import STATUS_PING

_POLL_S = 0.25
_HTTP_TIMEOUT_S = 2.0
_NATS_WAIT_S = 15.0
MAX_DEATHS = 3
"""An instance that ended this often before it was ever ready will not come up by itself."""


@dataclass
class DeathWatch:
    """Counts how often each process was started anew before it was ready."""

    _starts: dict[str, set[int]] = field(default_factory=dict)

    def hopeless(self, processes: Mapping[str, ProcessInfo]) -> str | None:
        """The name of a process that was given up or has died `MAX_DEATHS` times, if there is one."""
        for info in processes.values():
            starts = self._starts.setdefault(info.name, set())
            starts.add(info.start_unix_s)
            starts.discard(0)
            dead_now = info.state in ("BACKOFF", "EXITED", "FATAL")
            if info.state == "FATAL" or len(starts) - (0 if dead_now else 1) >= MAX_DEATHS:
                return info.name
        return None


async def await_ready(stack: Stack, show: Callable[[list[Row]], None], timeout_s: float) -> None:
    """Return when every instance says that it is ready and the first gateway serves the model end to end.

    Raises StartFailed: an instance keeps dying, or time is up.
    """
    deadline = time.monotonic() + timeout_s
    await await_instances(stack, stack.spec.programs(), timeout_s, show)
    if not stack.spec.counts.get("gateway"):
        return
    async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S, trust_env=False) as http:
        while not await _answers(http, stack.spec.gateway_url()):
            if time.monotonic() > deadline:
                raise StartFailed(f"{stack.spec.gateway_url()}/readyz does not say ready within {timeout_s:.0f} s")
            await asyncio.sleep(_POLL_S)


async def await_instances(
    stack: Stack, names: Collection[str], timeout_s: float, show: Callable[[list[Row]], None] = lambda _: None
) -> None:
    """Return when all the named programs are ready. Raises StartFailed as `await_ready`."""
    deadline = time.monotonic() + timeout_s
    watch = DeathWatch()
    async with await Bus.connect(stack.spec.nats_url, name="cli", wait_s=_NATS_WAIT_S) as bus:
        await bus.client.publish(STATUS_PING, b"")  # those that are ready need not be waited for
        while True:
            processes = await asyncio.to_thread(stack.supervisor.processes)
            rows = merge(processes, bus.statuses.live(), time.time(), stack.home.logs)
            show(rows)
            if (name := watch.hopeless({n: info for n, info in processes.items() if n in names})) is not None:
                log = stack.home.log_of(name)
                raise StartFailed(f"{name} keeps dying: {last_complaint(log)} (see {log})")
            waiting = [row.name for row in rows if row.name in names and row.state != "ready"]
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"{', '.join(waiting)} not ready within {timeout_s:.0f} s; logs are in {stack.home.logs}, "
                    "HEADRACE_START_TIMEOUT_S allows more time"
                )
            await asyncio.sleep(_POLL_S)


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/readyz")).is_success
    except httpx.HTTPError:
        return False
