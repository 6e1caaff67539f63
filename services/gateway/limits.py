"""How much this gateway takes on: generations at once, answers of a request, places in the queue, room in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

import nats.errors
import structlog
from nats.js.errors import APIError

from services.gateway.backlog import Backlog, bounded_s
from services.gateway.cancellation import cancel_requested
from services.gateway.errors import ApiError, invalid, overloaded
from services.gateway.quota import Quota
from services.gateway.settings import GatewaySettings
from shared.bus import Bus, BusError
from shared.protocol.streams import LOG
from shared.protocol.subjects import Priority

SAMPLE_S: Final = 0.5
BUSY_SAMPLE_S: Final = 0.25
"""While work is waiting: a new load must not have been let in for long before its rate is known."""

LOG_FULL: Final = 0.95
"""Part of the log stream's size beyond which it would soon drop its oldest records."""

log = structlog.get_logger(__name__)


class Limits:
    """Counts the running generations, and samples queues and log all the time, so that admission need not ask."""

    def __init__(self, bus: Bus, model: str, settings: GatewaySettings) -> None:
        self._bus = bus
        self._settings = settings
        self.active = 0
        self.backlog = Backlog(bus, model, settings)
        self.quota = Quota(bus, settings.max_tenant_unfinished, settings.retry_after_s)
        self._log_full_s = 0.0
        """How long the log has no room, as of the last sample; 0 while it has."""

    @contextmanager
    def slots(self, count: int = 1) -> Iterator[None]:
        """Hold generation slots of the gateway, one for each choice. Raises ApiError 503 when too few are left."""
        if self.active + count > self._settings.max_concurrent:
            raise overloaded(
                503,
                "gateway_overloaded",
                f"This gateway carries {self.active} generations and has no room for {count} more; try again or use "
                "another.",
                self.backlog.retry_after_s(),
            )
        self.active += count
        try:
            yield
        finally:
            self.active -= count

    def check_choices(self, n: int, prompts: int, *, followed: bool) -> None:
        """Raises ApiError 400 for more answers than one request may ask for.

        `followed`: this gateway would carry each of them.
        """
        most_n, most = self._settings.max_n, self._settings.max_choices
        if n > most_n:
            raise invalid(f"'n' may be {most_n} at most on this server.", "n", "invalid_value")
        _check_answers(n, prompts, min(most, self._settings.max_concurrent) if followed else most)

    def check_size(self, n: int, prompts: int, priority: Priority) -> None:
        """Raises ApiError 400 for a new request that would not fit into an empty queue, or is more than its tenant may
        have: to try again would be in vain.
        """
        most, of_tenant = self._settings.max_queued[priority], self._settings.max_tenant_unfinished
        _check_answers(n, prompts, min(most, of_tenant) if of_tenant else most)

    def check(self, priority: Priority, choices: int, queue_timeout_s: float) -> None:
        """Raises ApiError 503 when the choices would wait too long, the log has no room, or NATS is away."""
        if not self._bus.connected:
            raise self.unavailable("The gateway has lost NATS and is reconnecting.")
        if self._log_full_s > 0:
            text = "The log of running requests is full; try again later."
            raise overloaded(503, "log_full", text, bounded_s(self._log_full_s))
        self.backlog.check(priority, choices, queue_timeout_s)

    @contextmanager
    def place(self, priority: Priority, choices: int, queue_timeout_s: float) -> Iterator[None]:
        """Hold a place in the queue for each choice while they are being stored. Raises as `check` does."""
        self.check(priority, choices, queue_timeout_s)
        with self.backlog.place(priority, choices):
            yield

    def unavailable(self, message: str) -> ApiError:
        """NATS is away, and nobody knows for how long."""
        return overloaded(503, "queue_unavailable", message, self._settings.retry_after_s)

    async def run(self) -> None:
        """Sample until cancelled. While NATS is away the last sample stands."""
        while not cancel_requested():
            try:
                await self.backlog.sample()
                self._log_full_s = await self._until_log_room_s()
            except (BusError, nats.errors.Error, APIError, TimeoutError) as error:
                log.debug("load_not_sampled", error=str(error))
            await asyncio.sleep(BUSY_SAMPLE_S if self.backlog.waiting else SAMPLE_S)

    async def _until_log_room_s(self) -> float:
        """How long what a full log would drop next is still young enough to belong to a request that runs, in seconds;
        0 or less when it is not, or when the log is not full.
        """
        info = await self._bus.js.stream_info(LOG.name)
        if info.state.bytes < LOG_FULL * (info.config.max_bytes or LOG.max_bytes):
            return 0.0
        oldest = await self._bus.js.get_msg(LOG.name, seq=info.state.first_seq, direct=True)
        stored = datetime.fromisoformat((oldest.headers or {})["Nats-Time-Stamp"][:19]).replace(tzinfo=UTC)
        longest_s = 2 * self._settings.max_timeout_s  # in the queue, and from then on
        return longest_s - (datetime.now(UTC) - stored).total_seconds()


def _check_answers(n: int, prompts: int, most: int) -> None:
    if n * prompts > most:
        raise invalid(
            f"{prompts} prompts with n={n} ask for {n * prompts} answers; one request may ask for {most}.",
            "prompt" if prompts > 1 else "n",
            "invalid_value",
        )
