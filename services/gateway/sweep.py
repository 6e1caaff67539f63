"""Ends requests past their deadline whose own gateway is gone, and takes ended work out of the queues.

Unfinished requests are found where they must be: as messages in the two work queues, which are bounded. The one gap, a
gateway that died between beginning a log and queueing the work, is closed by a look at the logs with a single record
when a gateway has vanished and when one starts.
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

from services.gateway.deadlines import Deadlines, Overdue
from services.gateway.endings import Endings
from shared.bus import Bus, BusError, RequestUnknown
from shared.protocol.jobs import GenerationRequest, decode_job, decode_request
from shared.protocol.records import Accepted
from shared.protocol.streams import JOBS, LOG, REQUESTS
from shared.protocol.subjects import decode_token

MAX_WATCHED: Final = 16_384
SETTLED_SWEEPS: Final = 2
"""Work is looked at once it was seen in this many sweeps: most requests are gone by then."""

log = structlog.get_logger(__name__)

LIST_S: Final = 5.0

Key = tuple[str, str]
"""Tenant and request id."""


class _Subjects(msgspec.Struct):
    subjects: dict[str, int] = {}


class _StreamPage(msgspec.Struct):
    """The part of JetStream's answer that counts here."""

    state: _Subjects
    total: int = 0


@dataclass
class _Watched:
    deadlines: Deadlines | None = None
    sweeps: int = 0
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
        self._watched: dict[Key, _Watched] = {}
        self._gateways: set[str] | None = None

    @property
    def watched(self) -> int:
        return len(self._watched)

    async def run(self) -> None:
        """Sweep until cancelled, at slightly irregular times so that gateways do not all sweep at once."""
        while True:
            try:
                await self.sweep()
            except (BusError, nats.errors.Error, APIError, TimeoutError) as error:
                log.warning("sweep_failed", error=str(error))
            await asyncio.sleep(self._interval_s * random.uniform(0.8, 1.2))

    async def sweep(self) -> None:
        """One round. Raises what NATS raises."""
        # In this order: work is put into the second queue before it is taken out of the first.
        queued = {key: (REQUESTS.name, subject) for key, subject in (await self._subjects(REQUESTS.name)).items()}
        queued |= {key: (JOBS.name, subject) for key, subject in (await self._subjects(JOBS.name)).items()}
        if self._gateway_vanished():
            await self._find_orphans(queued)
        self._forget(queued)
        now = time.time()
        for key, place in queued.items():
            await self._look_at(key, place)
        for key, watched in list(self._watched.items()):
            if watched.deadlines is not None and (overdue := watched.deadlines.overdue(now)) is not None:
                await self._end(key, watched, overdue)

    def _gateway_vanished(self) -> bool:
        """True on the first round, and after a gateway was not heard of any more."""
        present = {status.worker for status in self._bus.statuses.live("gateway")}
        vanished = self._gateways is None or not self._gateways <= present
        self._gateways = present
        return vanished

    def _forget(self, queued: Mapping[Key, tuple[str, str]]) -> None:
        self._watched = {key: watched for key, watched in self._watched.items() if key in queued or watched.orphan}

    async def _look_at(self, key: Key, place: tuple[str, str]) -> None:
        watched = self._watched.get(key)
        if watched is None:
            if len(self._watched) < MAX_WATCHED:
                self._watched[key] = _Watched()
            return
        watched.sweeps += 1
        if watched.deadlines is None and watched.sweeps >= SETTLED_SWEEPS:
            request = await self._read_work(*place)
            if request is not None:
                queue_unix_s = request.queue_deadline_unix_s if place[0] == REQUESTS.name else None
                watched.deadlines = Deadlines(request.deadline_unix_s, queue_unix_s)

    async def _end(self, key: Key, watched: _Watched, overdue: Overdue) -> None:
        try:
            state = await self._bus.open_log(*key).state()
        except (RequestUnknown, msgspec.DecodeError, ValueError) as error:
            log.warning("log_unreadable", request_id=key[1], error=str(error))
            self._watched.pop(key, None)
            return
        if state.ended is not None and state.accepted is not None:
            await self._endings.withdraw(state.accepted)
        elif overdue == "queue" and state.claims and watched.deadlines is not None:
            watched.deadlines.queue_unix_s = None
            return
        elif state.accepted is not None:
            self._on_overdue(state.accepted, overdue, bool(state.output_ids))
        # Whatever is still queued by the next round is looked at again.
        self._watched.pop(key, None)

    async def _find_orphans(self, queued: Mapping[Key, tuple[str, str]]) -> None:
        """Logs that hold one record only and have no work queued."""
        found = 0
        for key, count in (await self._log_sizes()).items():
            if count != 1 or key in queued or key in self._watched or len(self._watched) >= MAX_WATCHED:
                continue
            accepted = await self._only_record(key)
            if accepted is not None:
                self._watched[key] = _Watched(Deadlines(accepted.deadline_unix_s), orphan=True)
                found += 1
        if found:
            log.info("unqueued_requests_found", count=found)

    async def _only_record(self, key: Key) -> Accepted | None:
        try:
            record = (await self._bus.open_log(*key).last()).record
        except (RequestUnknown, msgspec.DecodeError):
            return None
        return record if isinstance(record, Accepted) else None

    async def _log_sizes(self) -> dict[Key, int]:
        return {_key(subject): count for subject, count in (await self._list(LOG.name)).items()}

    async def _subjects(self, stream: str) -> dict[Key, str]:
        return {_key(subject): subject for subject in await self._list(stream)}

    async def _list(self, stream: str) -> dict[str, int]:
        """All subjects of a stream and how many messages each holds. The server answers in pages, nats-py reads one."""
        subjects: dict[str, int] = {}
        while True:
            query = msgspec.json.encode({"subjects_filter": ">", "offset": len(subjects)})
            reply = await self._bus.client.request(f"$JS.API.STREAM.INFO.{stream}", query, timeout=LIST_S)
            page = msgspec.json.decode(reply.data, type=_StreamPage)
            subjects |= page.state.subjects
            if not page.state.subjects or len(subjects) >= page.total:
                return subjects

    async def _read_work(self, stream: str, subject: str) -> GenerationRequest | None:
        """The request that a queued message carries; None when it was taken out by now."""
        try:
            data = (await self._bus.js.get_msg(stream, subject=subject, direct=True)).data or b""
            return decode_request(data) if stream == REQUESTS.name else decode_job(data).request
        except APIError:
            return None
        except msgspec.DecodeError as error:
            log.warning("work_unreadable", stream=stream, subject=subject, error=str(error))
            return None


def _key(subject: str) -> Key:
    """The last two tokens of every request's subjects."""
    tenant, request_id = subject.split(".")[-2:]
    return decode_token(tenant), decode_token(request_id)
