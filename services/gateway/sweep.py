"""Ends requests past their deadline whose own gateway is gone, and takes ended work out of the queues.

Unfinished requests are found where they must be: as messages in the work queues, which are bounded. The one gap, a
gateway that died between beginning a log and queueing the work, is closed by a look at the logs with a single record
when a gateway has vanished, when NATS was away, and when a gateway starts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import nats.errors
import structlog
from nats.js.errors import APIError

from services.gateway.cancellation import cancel_requested
from services.gateway.choice_groups import ChoiceGroups
from services.gateway.deadlines import Deadlines, Overdue
from services.gateway.endings import Endings
from services.gateway.openings import read_opening
from shared.bus import Bus, BusError, RequestKey, RequestUnknown, list_subjects, request_keys
from shared.protocol.records import Accepted
from shared.protocol.streams import JOBS, LOG, REQUESTS

MAX_WATCHED: Final = 16_384
SETTLED_SWEEPS: Final = 2
"""Work is looked at once it was seen in this many sweeps: most requests are gone by then."""

log = structlog.get_logger(__name__)


@dataclass
class _Watched:
    """One choice in the queues; `accepted` and `deadlines` are None until its log was read.

    `read_again_unix_s`: when an unclaimed one may have been claimed for so long that its compute time could be over.
    """

    accepted: Accepted | None = None
    deadlines: Deadlines | None = None
    read_again_unix_s: float = 0.0
    sweeps: int = 0
    handed_over: bool = False
    orphan: bool = False


class Sweep:
    """Watches every queued request, whichever gateway accepted it. All gateways sweep; the first to end a request wins.

    Args:
        on_overdue: has a request ended, given which deadline has passed and whether there is output yet.
    """

    def __init__(
        self, bus: Bus, endings: Endings, on_overdue: Callable[[Accepted, Overdue, bool], None], interval_s: float
    ) -> None:
        self._bus = bus
        self._endings = endings
        self._on_overdue = on_overdue
        self._interval_s = interval_s
        self._groups = ChoiceGroups(bus, endings)
        self._watched: dict[RequestKey, _Watched] = {}
        self._gateways: set[str] | None = None

    @property
    def watched(self) -> int:
        return len(self._watched)

    async def run(self) -> None:
        """Sweep until cancelled, at slightly irregular times so that gateways do not all sweep at once."""
        while not cancel_requested():
            try:
                await self.sweep()
            except (BusError, nats.errors.Error, APIError, TimeoutError) as error:
                log.warning("sweep_failed", error=str(error))
                self._gateways = None  # what was begun while NATS went away may never have been queued
            await asyncio.sleep(self._interval_s * random.uniform(0.8, 1.2))

    async def sweep(self) -> None:
        """One round. Raises what NATS raises."""
        queued = await self._queued()
        if self._gateway_vanished():
            await self._find_orphans(queued)
        self._watched = {key: watched for key, watched in self._watched.items() if key in queued or watched.orphan}
        now = time.time()
        for key, handed_over in queued.items():
            await self._look_at(key, handed_over, now)
        for key, watched in list(self._watched.items()):
            if watched.deadlines is not None and (overdue := watched.deadlines.overdue(now)) is not None:
                await self._end(key, watched, overdue)
        known = {key: watched.accepted for key, watched in self._watched.items() if watched.accepted is not None}
        await self._groups.check(queued, known)

    async def _queued(self) -> dict[RequestKey, bool]:
        """All work in the queues; whether prefill has handed it over to decode."""
        queued: dict[RequestKey, bool] = {}
        # In this order: work is put into the second queue before it is taken out of the first.
        for spec in (*REQUESTS.values(), JOBS):
            for key in request_keys(await list_subjects(self._bus.client, spec.name)).values():
                queued[key] = spec is JOBS
        return queued

    def _gateway_vanished(self) -> bool:
        """True on the first round, and after a gateway was not heard of any more."""
        present = {status.worker for status in self._bus.statuses.live("gateway")}
        vanished = self._gateways is None or not self._gateways <= present
        self._gateways = present
        return vanished

    async def _look_at(self, key: RequestKey, handed_over: bool, now: float) -> None:
        watched = self._watched.get(key)
        if watched is None:
            if len(self._watched) < MAX_WATCHED:
                self._watched[key] = _Watched(handed_over=handed_over)
            return
        watched.sweeps += 1
        if watched.sweeps < SETTLED_SWEEPS:
            return
        unclaimed = watched.deadlines is None or watched.deadlines.first_claim_unix_s is None
        if unclaimed and (now >= watched.read_again_unix_s or handed_over != watched.handed_over):
            watched.handed_over = handed_over
            await self._read(key, watched, now)

    async def _read(self, key: RequestKey, watched: _Watched, now: float) -> None:
        accepted, claim = await read_opening(self._bus, key)
        if accepted is None:
            watched.read_again_unix_s = now + self._interval_s
            return
        watched.accepted = accepted
        watched.deadlines = Deadlines.of(accepted, claim)
        watched.read_again_unix_s = now + (accepted.compute_timeout_s or accepted.deadline_unix_s - now)

    async def _end(self, key: RequestKey, watched: _Watched, overdue: Overdue) -> None:
        try:
            state = await self._bus.open_log(*key).state()
        except (RequestUnknown, msgspec.DecodeError, ValueError) as error:
            log.warning("log_unreadable", request_id=key[1], error=str(error))
            self._watched.pop(key, None)
            return
        if state.ended is not None and state.accepted is not None:
            await self._endings.withdraw(state.accepted)
        elif overdue == "queue" and state.claims and watched.deadlines is not None:
            watched.deadlines.claimed(state.claims[0])
            return
        elif state.accepted is not None:
            self._on_overdue(state.accepted, overdue, bool(state.output_ids))
        # Whatever is still queued by the next round is looked at again.
        self._watched.pop(key, None)

    async def _find_orphans(self, queued: Mapping[RequestKey, bool]) -> None:
        """Logs that hold one record only and have no work queued."""
        found = 0
        counts = await list_subjects(self._bus.client, LOG.name)
        for subject, key in request_keys(counts).items():
            if counts[subject] != 1 or key in queued or key in self._watched or len(self._watched) >= MAX_WATCHED:
                continue
            accepted, _ = await read_opening(self._bus, key)
            if accepted is not None:
                self._watched[key] = _Watched(accepted, Deadlines.of(accepted, None), orphan=True)
                found += 1
        if found:
            log.info("unqueued_requests_found", count=found)
