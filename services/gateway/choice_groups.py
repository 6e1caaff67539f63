"""When one choice of a request has failed, there is no answer: the others are ended with the same cause.

A gateway with a client on the request does so at once; this is for requests that nobody follows here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from services.gateway.endings import Endings
from services.gateway.errors import failure_of
from shared.bus import Bus, RequestKey, RequestUnknown
from shared.protocol.records import Accepted, Ended, choice_request_id


class ChoiceGroups:
    """Looks at the logs of choices that have left the queues while others of their request are still there."""

    def __init__(self, bus: Bus, endings: Endings) -> None:
        self._bus = bus
        self._endings = endings
        self._answered: dict[RequestKey, set[RequestKey]] = {}
        """By request, the choices that are known to have ended with an answer."""

    async def check(self, queued: Collection[RequestKey], watched: Mapping[RequestKey, Accepted]) -> None:
        """`watched`: those of the queued choices whose first record is known. Raises BusError."""
        groups: dict[RequestKey, list[Accepted]] = {}
        for accepted in watched.values():
            if accepted.choices > 1:
                groups.setdefault(_request(accepted), []).append(accepted)
        self._answered = {request: done for request, done in self._answered.items() if request in groups}
        for request, running in groups.items():
            done = self._answered.setdefault(request, set())
            absent = set(_choices(request, running[0].choices)) - set(queued) - done
            if (failed := await self._first_failure(absent, done)) is not None:
                self._endings.request_all(running, failed.reason, failure_of(failed))

    async def _first_failure(self, absent: Iterable[RequestKey], done: set[RequestKey]) -> Ended | None:
        for key in sorted(absent):
            try:
                last = (await self._bus.open_log(*key).last()).record
            except (RequestUnknown, msgspec.DecodeError):
                continue
            if isinstance(last, Ended):
                if failure_of(last) is not None:
                    return last
                done.add(key)
        return None


def _request(accepted: Accepted) -> RequestKey:
    """The key of the whole request: its first choice's."""
    suffix = choice_request_id("", accepted.choice)
    return accepted.tenant, accepted.request_id.removesuffix(suffix)


def _choices(request: RequestKey, count: int) -> list[RequestKey]:
    tenant, request_id = request
    return [(tenant, choice_request_id(request_id, choice)) for choice in range(count)]
