"""The most unfinished requests of one tenant, counted in the queues themselves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from services.gateway.backlog import bounded_s
from services.gateway.errors import overloaded
from shared.bus import Bus

WINDOW_S: Final = 60.0
MAX_LOOKS: Final = 1024


class Turnover:
    """How many of a tenant's requests leave the queues per second, from who was there at each look. Pure."""

    def __init__(self) -> None:
        self._last: frozenset[str] = frozenset()
        self._looks: deque[tuple[float, int]] = deque(maxlen=MAX_LOOKS)
        """When it was looked, and how many had left since the look before."""

    def look(self, at_s: float, unfinished: frozenset[str]) -> None:
        if self._looks and at_s - self._looks[-1][0] > WINDOW_S:  # nobody knows when those left
            self._looks.clear()
            self._last = frozenset()
        self._looks.append((at_s, len(self._last - unfinished)))
        self._last = unfinished
        while len(self._looks) > 2 and self._looks[1][0] < at_s - WINDOW_S:
            self._looks.popleft()

    def per_s(self) -> float | None:
        """None while none was seen to leave."""
        left = sum(count for _, count in list(self._looks)[1:])
        return left / (self._looks[-1][0] - self._looks[0][0]) if left else None


class Quota:
    """Counts what a tenant has in the queues and what this gateway is about to put there for it.

    Exact at one gateway. Several may each let in what they are storing at the same moment.

    Args:
        limit: 0 is none.
        retry_after_s: what refused clients are told to wait while it is not known how fast their requests end.
    """

    def __init__(self, bus: Bus, limit: int, retry_after_s: int) -> None:
        self._bus = bus
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._storing: dict[str, dict[str, None]] = {}
        """By tenant, the ids of requests that are being stored, in the order in which they came."""
        self._turnover: dict[str, Turnover] = {}

    @contextmanager
    def storing(self, tenant: str, request_ids: Sequence[str]) -> Iterator[None]:
        """Around the check and the storing of new requests."""
        if not self._limit:
            yield
            return
        self._storing.setdefault(tenant, {}).update(dict.fromkeys(request_ids))
        try:
            yield
        finally:
            for request_id in request_ids:
                self._storing[tenant].pop(request_id, None)

    async def check(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Raises ApiError 429 when they are more than the tenant may have; PublishFailed without NATS.

        Of two that come at once, the first counts for the second and not the other way round.
        """
        if not self._limit:
            return
        earlier = set()
        for request_id in self._storing.get(tenant, {}):
            if request_id in request_ids:
                break
            earlier.add(request_id)
        queued = await self._bus.unfinished_of(tenant)
        turnover = self._turnover.setdefault(tenant, Turnover())
        turnover.look(time.monotonic(), frozenset(queued))
        unfinished = len((queued | earlier) - set(request_ids))
        if (over := unfinished + len(request_ids) - self._limit) > 0:
            per_s = turnover.per_s()
            raise overloaded(
                429,
                "rate_limit_exceeded",
                f"{unfinished} of your requests are unfinished; {self._limit} at once are allowed. Try again when some "
                "have ended.",
                self._retry_after_s if per_s is None else bounded_s(over / per_s),
            )
