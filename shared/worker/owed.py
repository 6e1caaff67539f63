"""Hand-backs that NATS did not take: kept, and recorded once it answers. What is handed back, `holdings` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import structlog

from shared.bus import Bus, BusError, RequestUnknown
from shared.protocol.records import Claimed, HandedBack

MAX_OWED = 256
"""The oldest beyond them are given up: their claims then count as crashes."""

MAX_CLAIMS = 8
"""Of one request, that nobody knows to be stored."""

TRY_S = 0.5
RECORD_PATIENCE_S = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Owed:
    """Claims of this worker that ended in good order, of which one at most is stored. Where none is known to be,
    `behind_seq` is the record behind which one may be stored yet, else 0."""

    tenant: str
    claims: tuple[Claimed, ...]
    behind_seq: int


class OwedHandBacks:
    """What one worker owes the logs of requests that it holds no longer, by request id.

    Without the record such a claim would count as a crash. It is written only while the log still stands at that
    claim: behind another's it would refuse the new holder's appends.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._owed: dict[str, Owed] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._owed))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._owed

    def owe(self, tenant: str, request_id: str, claim: Claimed, behind_seq: int = 0) -> None:
        """`behind_seq`: the claim is not known to be stored, but may come to stand behind this record."""
        earlier = self._owed.pop(request_id, None)
        claims = (*earlier.claims, claim)[-MAX_CLAIMS:] if earlier is not None else (claim,)
        if len(self._owed) >= MAX_OWED:
            self._give_up(next(iter(self._owed)), "too many are owed")
        self._owed[request_id] = Owed(tenant, claims, behind_seq)

    def forget(self, request_id: str) -> None:
        """This worker has claimed the request again."""
        self._owed.pop(request_id, None)

    def _give_up(self, request_id: str, why: str) -> None:
        log.warning("hand_back_given_up", request_id=request_id, reason=why)
        self.forget(request_id)

    async def settle(self, request_id: str) -> None:
        """Record what is owed to a request, if anything is, or find that it no longer matters.

        A claim counts as a crash as long as its record is the last: any other means that it made progress, or is known
        to have been handed back, or that the request has ended or is another's.

        Raises AppendRefused when somebody wrote meanwhile, another BusError without NATS: it is owed as before then.
        """
        owed = self._owed.get(request_id)
        if owed is None:
            return
        request_log = self._bus.open_log(owed.tenant, request_id)
        try:
            last = await request_log.last()
        except (RequestUnknown, msgspec.DecodeError) as error:
            self._give_up(request_id, str(error))
            return
        if last.seq <= owed.behind_seq:
            return
        if isinstance(last.record, Claimed) and last.record in owed.claims:
            claim = last.record
            request_log.last_seq = last.seq
            back = HandedBack(claim.epoch, claim.stage, claim.worker)
            await request_log.append(back, patience_s=RECORD_PATIENCE_S)
            log.info("hand_back_recorded", request_id=request_id, epoch=claim.epoch)
        if self._owed.get(request_id) is owed:
            del self._owed[request_id]
        await self._bus.announce_now()  # the others wait for it

    async def try_to_settle(self, request_id: str) -> None:
        """The same as far as NATS answers at once."""
        if not self._bus.connected:
            return
        try:
            async with asyncio.timeout(TRY_S):
                await self.settle(request_id)
        except (BusError, TimeoutError) as error:
            log.debug("hand_back_still_owed", request_id=request_id, error=str(error))
