"""How late the event loop runs what is due: the first sign of blocking code or of too little CPU."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from prometheus_client import Histogram

_log = structlog.get_logger(__name__)

INTERVAL_S: Final = 0.25
BLOCKED_S: Final = 1.0


class LoopLagMonitor:
    """Sleeps for `interval_s` again and again and records by how much each sleep overran.

    Run it in the service's task group: `tg.create_task(monitor.run())`. `last_s` and `worst_s` are seconds.
    """

    def __init__(self, histogram: Histogram, interval_s: float = INTERVAL_S, blocked_s: float = BLOCKED_S) -> None:
        self._histogram = histogram
        self._interval_s = interval_s
        self._blocked_s = blocked_s
        self.last_s = 0.0
        self.worst_s = 0.0

    async def run(self) -> None:
        """Measure until cancelled. Logs a warning for a lag of `blocked_s` or more."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self.last_s = max(0.0, loop.time() - due_s)
            self.worst_s = max(self.worst_s, self.last_s)
            self._histogram.observe(self.last_s)
            if self.last_s >= self._blocked_s:
                _log.warning("event_loop_blocked", lag_s=round(self.last_s, 3))
