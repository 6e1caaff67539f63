"""How much this gateway takes on: generations at once, the queue's length, room in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

import nats.errors
import structlog
from nats.js.errors import APIError

from services.gateway.errors import invalid, overloaded
from services.gateway.settings import GatewaySettings
from shared.bus import Bus, BusError
from shared.protocol.streams import LOG

SAMPLE_S: Final = 0.5
LOG_FULL: Final = 0.95
"""Part of the log stream's size beyond which it would soon drop its oldest records."""

log = structlog.get_logger(__name__)


class Limits:
    """Counts the running generations, and samples queue and log twice a second, so that admission need not ask."""

    def __init__(self, bus: Bus, model: str, settings: GatewaySettings) -> None:
        self._bus = bus
        self._model = model
        self._settings = settings
        self.active = 0
        self.waiting = 0
        """Requests of the model that no worker has pulled, at the last sample."""
        self._log_full = False

    @contextmanager
    def slots(self, count: int = 1) -> Iterator[None]:
        """Hold generation slots of the gateway, one for each choice. Raises ApiError 503 when too few are left."""
        if self.active + count > self._settings.max_concurrent:
            raise overloaded(
                503,
                "gateway_overloaded",
                f"This gateway carries {self.active} generations and has no room for {count} more; try again or use "
                "another.",
                self._settings.retry_after_s,
            )
        self.active += count
        try:
            yield
        finally:
            self.active -= count

    def check_choices(self, n: int, prompts: int) -> None:
        """Raises ApiError 400 for more answers than one request may ask for."""
        most_n, most = self._settings.max_n, self._settings.max_choices
        if n > most_n:
            raise invalid(f"'n' may be {most_n} at most on this server.", "n", "invalid_value")
        if n * prompts > most:
            raise invalid(
                f"{prompts} prompts with n={n} ask for {n * prompts} answers; one request may ask for {most}.",
                "prompt" if prompts > 1 else "n",
                "invalid_value",
            )

    def check_queue(self, choices: int) -> None:
        """Raises ApiError 429 when enough work waits, 503 when the log has no room or NATS is away."""
        retry_after_s = self._settings.retry_after_s
        if not self._bus.connected:
            raise overloaded(503, "queue_unavailable", "The gateway has lost NATS and is reconnecting.", retry_after_s)
        if self.waiting + choices > self._settings.max_waiting:
            raise overloaded(429, "queue_full", f"{self.waiting} requests wait already; try again.", retry_after_s)
        if self._log_full:
            raise overloaded(503, "log_full", "The log of running requests is full; try again later.", retry_after_s)

    async def run(self) -> None:
        """Sample until cancelled. While NATS is away the last sample stands."""
        while True:
            try:
                self.waiting = await self._bus.queue_depth("prefill", self._model)
                self._log_full = await self._is_log_full()
            except (BusError, nats.errors.Error, APIError, TimeoutError) as error:
                log.debug("load_not_sampled", error=str(error))
            await asyncio.sleep(SAMPLE_S)

    async def _is_log_full(self) -> bool:
        """Whether what the log would drop next is young enough to belong to a request that still runs."""
        info = await self._bus.js.stream_info(LOG.name)
        if info.state.bytes < LOG_FULL * (info.config.max_bytes or LOG.max_bytes):
            return False
        oldest = await self._bus.js.get_msg(LOG.name, seq=info.state.first_seq, direct=True)
        stored = datetime.fromisoformat((oldest.headers or {})["Nats-Time-Stamp"][:19]).replace(tzinfo=UTC)
        return (datetime.now(UTC) - stored).total_seconds() < self._settings.max_timeout_s
