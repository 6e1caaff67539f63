"""Gives back the leases of requests that have ended, whoever forgot to: the request's log says so, nothing else does.

Holders release their leases themselves; this is for those that were killed first, and for puts that came too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from itertools import islice
from typing import Final

import msgspec
import structlog

from services.kvstore.store import BlockStore
from shared.bus import Bus, BusError, RequestUnknown
from shared.protocol.records import Ended
from shared.telemetry.metrics import KVStoreMetrics

ROUND_S: Final = 1.0
LOOKS_PER_ROUND: Final = 64
"""Half a millisecond each on one machine. A thousand leases that rest are gone through in 16 s."""
MAX_HINTS: Final = 1024
"""Hints that wait to be checked. What is beyond is found as a lease that rests."""

log = structlog.get_logger(__name__)


class LeaseAudit:
    """One task of the store's main. Looks at the logs of leases that rest, and of requests that a hint names.

    A lease rests while nobody puts, leases or renews under it; after `rest_s` of that its log is read, and again each
    `rest_s`. While NATS is away leases stay, until their time is over.
    """

    def __init__(self, store: BlockStore, bus: Bus, metrics: KVStoreMetrics, *, rest_s: float) -> None:
        self._store = store
        self._bus = bus
        self._metrics = metrics
        self._rest_s = rest_s
        self._hinted: dict[str, None] = {}
        self._hint = asyncio.Event()
        self._blind = False

    async def on_cancel(self, request_id: str) -> None:
        """Somebody says that the request has ended. The log is asked all the same: a hint proves nothing."""
        if self._store.tenant_of(request_id) and len(self._hinted) < MAX_HINTS:
            self._hinted[request_id] = None
            self._hint.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.step(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._hint.wait()

    async def step(self, now_s: float) -> None:
        """One round: at most `LOOKS_PER_ROUND` logs, one after the other, and none more once NATS does not answer."""
        self._hint.clear()
        hinted = [(lease_id, self._store.tenant_of(lease_id)) for lease_id in islice(self._hinted, LOOKS_PER_ROUND)]
        for lease_id, tenant in [
            *hinted,
            *self._store.resting_leases(self._rest_s, LOOKS_PER_ROUND - len(hinted), now_s),
        ]:
            try:
                over = await self._is_over(tenant, lease_id)
            except BusError as error:
                self._note_blind(error)
                return  # the hints stay
            self._blind = False
            self._hinted.pop(lease_id, None)
            if over and self._store.release(lease_id, now_s):
                self._metrics.leases_given_back.inc()
                log.info("lease_given_back", request_id=lease_id)
        if self._hinted:
            self._hint.set()

    async def _is_over(self, tenant: str, request_id: str) -> bool:
        """Whether the log has ended, or is gone: it outlives every request. Raises BusError."""
        if not tenant:  # the lease has gone since the hint
            return False
        try:
            last = await self._bus.open_log(tenant, request_id).last()
        except RequestUnknown:
            return True
        except (msgspec.DecodeError, ValueError) as error:
            log.warning("lease_log_unreadable", request_id=request_id, error=str(error))
            return False
        return isinstance(last.record, Ended)

    def _note_blind(self, error: BusError) -> None:
        if not self._blind:
            log.warning("leases_unchecked", error=str(error))
        self._blind = True
